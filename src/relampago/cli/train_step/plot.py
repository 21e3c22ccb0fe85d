"""A step's time and peak memory against length, and the parts of the peak at the longest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relampago.cli import charts
from relampago.cli.console import seconds, size
from relampago.cli.train_step.cell import WITHOUT
from relampago.cli.train_step.rows import Row, of_record

COLORS = {
    "eager": charts.STANDARD, "sdpa": charts.TORCH, "relampago": charts.OURS, WITHOUT: charts.SAND,
}  # fmt: skip
PARTS = {
    "weights": "#c9ced6", "gradients": "#aab2bd", "optimiser": "#8d97a5", "activations": charts.SAND,
    "attention": charts.OURS,
}  # fmt: skip


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the picture of a record."""
    shape, rows = of_record(record)
    first, facts = record["cells"][0], record["machine"]
    chip = facts["gpus"][0]["name"] if first["device"] == "cuda" else facts["cpu"]
    title = f"A training step of {first['model']}, {shape.layers} layers"
    caption = (
        f"{chip}; torch {facts['torch']}; bf16, random weights, real text, batch 1, checkpoints: "
        f"{first['checkpoint']}, AdamW {first['optimiser']}; {facts['date'][:10]}; hollow: estimates"
    )
    with charts.canvas(path, 3, title=title, caption=caption) as (left, middle, right):
        _lines(left, rows, "seconds", "time of a step", seconds)
        _lines(middle, rows, "beyond", "memory beyond weights, gradients, optimiser", size)
        _parts(right, rows)


def _lines(axes: Any, rows: list[Row], field: str, title: str, show: Any) -> None:
    charts.log_axis(axes, 2 if field == "beyond" else 10)
    ends = {}
    for kind, color in COLORS.items():
        points = [
            (float(row.length), float(value), row.estimate)
            for row in rows
            if row.kind == kind and (value := getattr(row, field))
        ]
        if points:
            charts.line(axes, points, color, bold=kind == "relampago")
            ends[kind] = points[-1]
    charts.lengths_axis(axes, sorted({row.length for row in rows}))
    charts.values_axis(axes, show)
    charts.frame(axes, title)
    charts.names_at_ends(axes, ends, COLORS, show)


def _parts(axes: Any, rows: list[Row]) -> None:
    """Stacked bars: one per kind at the longest length that has all parts."""
    whole = [r for r in rows if r.split and "attention" in r.split and r.kind != WITHOUT]
    longest = max((row.length for row in whole), default=0)
    shown = [row for row in whole if row.length == longest]
    for place, row in enumerate(shown):
        assert row.split is not None
        foot = 0.0
        for name, color in PARTS.items():
            hatch = "///" if row.estimate and name == "attention" else None
            axes.bar(
                place, row.split[name] / 2**30, bottom=foot, color=color, width=0.62, hatch=hatch,
                edgecolor="white", linewidth=0.8, label=name if place == 0 else None,
            )  # fmt: skip
            foot += row.split[name] / 2**30
        text = f"{'~' if row.estimate else ''}{size(row.peak)}"
        axes.text(place, foot, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(shown)), [row.kind for row in shown])
    axes.set_ylabel("GiB")
    axes.margins(y=0.12)
    charts.frame(axes, f"the peak at {charts.count(longest)} tokens", grid="y")
    if shown:
        axes.legend(
            frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True
        )
