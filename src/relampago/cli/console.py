"""The terminal: how tables, progress, numbers and errors look, in every command alike."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

console = Console(highlight=False)
if not console.is_terminal:
    console.width = max(console.width, 110)  # a pipe or a file has no edge
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """An error: its first line in red, what follows as it is."""
    first, *rest = message.splitlines() or ["unknown error"]
    _errors.print(Text(f"error: {first}", style="red"))
    for line in rest:
        _errors.print(Text(line))


def progress() -> Progress:
    """A bar that vanishes when done; for whatever takes more than two seconds."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def seconds(value: float) -> str:
    """0.00123 as 1.23 ms."""
    if not math.isfinite(value):
        return "-"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def between(low: float, high: float) -> str:
    """A range in the unit of its upper end: 27.1 to 36 ms."""
    value, unit = seconds(high).split()
    factor = high / float(value) if float(value) else 1.0
    return f"{low / factor:.3g} to {value} {unit}"


def size(count: float | None) -> str:
    """Bytes in powers of 1024: 1536 as 1.5 KiB."""
    if count is None:
        return "-"
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
