"""The sweep as a picture of two panels: time and peak memory against length, both axes logarithmic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from relampago.cli.console import seconds, size
from relampago.cli.demo.sweep import METHODS, RELAMPAGO, SDPA, STANDARD, Point

COLORS = {STANDARD: "#8a8f98", SDPA: "#2f7ebc", RELAMPAGO: "#e0571b"}
INK, FAINT = "#22262b", "#e3e5e8"


def draw(points: list[Point], path: Path, caption: str) -> None:
    """Write a PNG.

    Args:
        points: the sweep's.
        path: of the file.
        caption: the machine and the layer, below the panels.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 10, "axes.edgecolor": "#9aa0a8", "text.color": INK,
        "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.9), dpi=160)
        _panel(axes[0], points, "seconds", "time of one layer", seconds)
        _panel(axes[1], points, "bytes", "peak memory beside q, k and v", size)
        figure.suptitle(
            "Exact attention: the same result, without the N x N matrix", x=0.03, ha="left",
            fontsize=13.5, fontweight="bold",
        )  # fmt: skip
        figure.text(0.03, 0.015, caption, fontsize=8, color="#666c74")
        figure.tight_layout(rect=(0.015, 0.05, 1, 0.99), w_pad=2.5)
        figure.savefig(path)
        plt.close(figure)


def _panel(axes: Any, points: list[Point], field: str, title: str, show: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lengths = sorted({p.length for p in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if field == "bytes" else 10)
    ends = {}
    for method in METHODS:
        line = [(p.length, getattr(p, field), p.estimate) for p in points if p.method == method]
        line = [entry for entry in line if entry[1]]
        if line:
            _line(axes, line, COLORS[method], bold=method == RELAMPAGO)
            ends[method] = line[-1]
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 2.6 * max(1.0, len(lengths) / 5))
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _count(n)))
    if field == "bytes":
        low, high = (math.log2(t) for t in axes.get_ylim())
        axes.yaxis.set_major_locator(
            FixedLocator([2.0**i for i in range(math.ceil(low), int(high) + 1) if i % 2 == 0])
        )
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("sequence length (tokens)")
    axes.grid(True, which="major", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for method, y in _apart(axes, {m: end[1] for m, end in ends.items()}).items():
        length, value, estimate = ends[method]
        text = f"{method}\n{'~' if estimate else ''}{show(value)}{', estimate' if estimate else ''}"
        axes.annotate(
            text, (length, y), xytext=(9, 0), textcoords="offset points", va="center", fontsize=9,
            color=COLORS[method], fontweight="bold" if method == RELAMPAGO else "normal", linespacing=1.1,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip


def _line(axes: Any, line: list[tuple[int, float, bool]], color: str, *, bold: bool) -> None:
    """Measured points filled and joined; estimates hollow and dotted."""
    known = [(x, y) for x, y, estimate in line if not estimate]
    guessed = [(x, y) for x, y, estimate in line if estimate]
    width = 2.6 if bold else 1.8
    over = 3 if bold else 2
    if known:
        axes.plot(
            *zip(*known, strict=True), "-o", color=color, linewidth=width, markersize=5, zorder=over
        )
    if guessed:
        joined = [*known[-1:], *guessed]
        axes.plot(*zip(*joined, strict=True), ":", color=color, linewidth=width, zorder=over)
        axes.plot(
            *zip(*guessed, strict=True), "o", markerfacecolor="white", markeredgecolor=color,
            markersize=5.5, zorder=over + 1,
        )  # fmt: skip


def _apart(axes: Any, values: dict[str, float]) -> dict[str, float]:
    """Heights for the labels: at the lines' ends, but no closer than one label's height."""
    low, high = (math.log(t) for t in axes.get_ylim())
    gap = 0.105 * (high - low)
    placed: dict[str, float] = {}
    below = -math.inf
    for method in sorted(values, key=lambda m: values[m]):
        below = max(math.log(values[method]), below + gap)
        placed[method] = below
    spill = max(0.0, below - high)
    return {method: math.exp(y - spill) for method, y in placed.items()}


def _count(n: float) -> str:
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"
