"""The rows as a table of the terminal and of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from relampago.cli.console import seconds, size
from relampago.cli.train_step.rows import STATIC, Row
from relampago.cli.train_step.shapes import Shape

HEAD = (
    "tokens", "attention", "step", "tokens/s", "MFU", "peak", "held", "activations", "attention's",
)  # fmt: skip


def cells(row: Row, shape: Shape, peak_flops: float | None) -> list[str]:
    """A row in words, in the order of HEAD; ~ marks an estimate."""
    mark = "~" if row.estimate else ""

    def known(value: float | None, show: Callable[[float], str]) -> str:
        return "–" if value is None else mark + show(value)

    split = row.split or {}
    if row.seconds is None:
        return [str(row.length), row.kind, row.short, *[""] * (len(HEAD) - 3)]
    return [
        str(row.length),
        row.kind,
        known(row.seconds, seconds),
        known(row.length / row.seconds, lambda rate: f"{rate:,.0f}"),
        known(row.utilisation(shape, peak_flops), lambda part: f"{part:.0%}"),
        known(row.peak, size),
        held(split),
        known(split.get("activations"), size),
        known(split.get("attention"), size),
    ]


def held(split: Mapping[str, int]) -> str:
    """Weights, gradients and optimiser, in the unit of their sum."""
    unit = size(sum(split[name] for name in STATIC)).split()[1]
    factor = {"GiB": 2**30, "MiB": 2**20}.get(unit, 2**10)
    return " + ".join(f"{split[name] / factor:.1f}" for name in STATIC) + f" {unit}"


def table(made: list[Row], shape: Shape, peak_flops: float | None) -> Table:
    """All rows."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(HEAD):
        view.add_column(name, justify="left" if place == 1 else "right", no_wrap=True)
    for place, row in enumerate(made):
        style = "dim italic" if row.estimate else "bold" if row.kind == "relampago" else ""
        last = place + 1 == len(made) or made[place + 1].length != row.length
        view.add_row(
            *(Text(c, style=style) for c in cells(row, shape, peak_flops)), end_section=last
        )
    view.caption = "held: weights + gradients + optimiser"
    if any(row.estimate for row in made):
        view.caption += "; ~ estimate: it ran out of memory; from shorter lengths of this run"
    view.caption_justify = "left"
    return view
