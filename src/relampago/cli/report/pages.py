"""README and docs: each table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->` and is written here."""

from __future__ import annotations

import re
import sys

from relampago.cli.report.results import ROOT, there
from relampago.cli.report.tables import TABLES

PAGES = (
    "README.md", "README.es.md", "docs/batch-invariance.md", "docs/benchmarks.md", "docs/derivatives.md",
    "docs/distributed.md", "docs/fp8.md", "docs/hopper.md", "docs/statistics.md", "docs/support.md",
    "docs/switching.md",
)  # fmt: skip


def rendered(text: str) -> str:
    """A page with every table made anew; one without its JSON is left empty."""
    for name, (file, make) in TABLES.items():
        if f"<!-- begin: {name} -->" not in text:
            continue
        table = make() if not file or there(file) else ""
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        text = pattern.sub(
            lambda m, table=table: f"{m[1]}{table}\n{m[2]}" if table else f"{m[1]}{m[2]}", text
        )
    return text


def main() -> int:
    """Write every page, or with --check write nothing and answer 1 if a table is not what the JSON says."""
    stale = []
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        if before != after:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0
