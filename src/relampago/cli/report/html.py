"""The report as one HTML file that needs nothing beside itself: pictures inline, tables from the same Markdown."""

from __future__ import annotations

import html
import re
from pathlib import Path

from relampago.cli.report.figures import FIGURES
from relampago.cli.report.results import there
from relampago.cli.report.tables import TABLES

STYLE = """
:root { --ink: #22262b; --soft: #666c74; --line: #e3e5e8; --ours: #e0571b; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.55 "DejaVu Sans", system-ui, sans-serif; color: var(--ink); background: #f6f7f8; }
main { max-width: 1240px; margin: 0 auto; padding: 36px 28px 64px; }
h1 { font-size: 34px; margin: 0; letter-spacing: -0.02em; } h1 b { color: var(--ours); }
.lead { color: var(--soft); margin: 4px 0 22px; font-size: 16px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 12px; }
section { padding: 18px 22px; margin: 18px 0; overflow-x: auto; }
h2 { font-size: 18px; margin: 0 0 10px; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tbody tr:hover { background: #fdf3ee; } p { color: var(--soft); font-size: 12.5px; margin: 10px 0 0; }
"""


def write(out: Path) -> Path:
    """Pictures as SVG and PNG, and `index.html` with them; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, (title, draw) in FIGURES.items():
        for suffix in (".png", ".svg"):
            draw(out / f"{name}{suffix}")
        picture = (out / f"{name}.svg").read_text(encoding="utf-8")
        picture = re.sub(
            r'(id="|href="#|url\(#)', rf"\g<1>{name}-", picture[picture.index("<svg") :]
        )
        parts.append(f"<section><h2>{title}</h2>{picture}</section>")
    tables = "".join(
        f"<section>{of_markdown(table)}</section>"
        for file, make in TABLES.values()
        if file and there(file)
        for table in one_by_one(make())
    )
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>relampago, measured</title><style>{STYLE}</style>'
        "<main><h1><b>relampago</b>, measured</h1><div class=lead>FlashAttention in pure Python. Every figure is from "
        f"a JSON file under <code>benchmarks/results/</code>.</div>{''.join(parts)}{tables}</main></html>\n"
    )
    (out / "index.html").write_text(page, encoding="utf-8")
    return out / "index.html"


def one_by_one(text: str) -> list[str]:
    """The tables of a text: some stand several together."""
    return re.split(r"\n\n(?=\*\*)", text)


def of_markdown(text: str) -> str:
    """A table of `tables.markdown`: its bold title, its rows, its note."""
    title, _, *lines = text.splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    note = " ".join(line for line in lines if line and not line.startswith("|"))
    head = "".join(f"<th>{html.escape(cell)}" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows[2:])
    return (
        f"<h2>{html.escape(title.strip('*'))}</h2><table><thead><tr>{head}<tbody>{body}</table>"
        f"<p>{html.escape(note)}</p>"
    )
