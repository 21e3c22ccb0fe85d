"""The committed measurements: where they are, and the only place that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relampago.errors import Unsupported

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "benchmarks" / "results"


def require() -> None:
    """Refuse where there are none: a wheel carries no measurements."""
    if not RESULTS.is_dir():
        raise Unsupported(
            "a report needs the committed measurements, which are in a clone of the repository only"
        )


def load(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def there(name: str) -> bool:
    """Whether it has been committed."""
    return (RESULTS / name).exists()
