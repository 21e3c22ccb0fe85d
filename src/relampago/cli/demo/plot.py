"""The sweep as a picture of two panels: time and peak memory against length, both axes logarithmic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relampago.cli import charts
from relampago.cli.console import seconds, size
from relampago.cli.demo.sweep import METHODS, RELAMPAGO, SDPA, STANDARD, Point

COLORS = {STANDARD: charts.STANDARD, SDPA: charts.TORCH, RELAMPAGO: charts.OURS}


def draw(points: list[Point], path: Path, caption: str) -> None:
    """Write a PNG.

    Args:
        points: the sweep's.
        path: of the file.
        caption: the machine and the layer, below the panels.
    """
    title = "Exact attention: the same result, without the N x N matrix"
    with charts.canvas(path, 2, title=title, caption=caption) as (left, right):
        _panel(left, points, "seconds", "time of one layer", seconds)
        _panel(right, points, "bytes", "peak memory beside q, k and v", size)


def _panel(axes: Any, points: list[Point], field: str, title: str, show: Any) -> None:
    charts.log_axis(axes, 2 if field == "bytes" else 10)
    ends = {}
    for method in METHODS:
        line = [
            (float(p.length), getattr(p, field), p.estimate) for p in points if p.method == method
        ]
        line = [entry for entry in line if entry[1]]
        if line:
            charts.line(axes, line, COLORS[method], bold=method == RELAMPAGO)
            ends[method] = line[-1]
    charts.lengths_axis(axes, sorted({p.length for p in points}))
    charts.values_axis(axes, show)
    charts.frame(axes, title)
    charts.names_at_ends(axes, ends, COLORS, show)
