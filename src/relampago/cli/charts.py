"""How pictures look: one style, one colour per contestant, lines that carry their own names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

INK, FAINT, SOFT = "#22262b", "#e3e5e8", "#666c74"
OURS, STANDARD, TORCH, GREEN, VIOLET, SAND = (
    "#e0571b", "#8a8f98", "#2f7ebc", "#3d9a5f", "#8e5cb8", "#d9a441",
)  # fmt: skip
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.edgecolor": "#9aa0a8", "text.color": INK,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "svg.hashsalt": "relampago",
}  # fmt: skip

Point = tuple[float, float, bool]  # x, y, whether it is an estimate


@contextlib.contextmanager
def canvas(
    path: Path, columns: int, *, title: str = "", caption: str = "", height: float = 4.9
) -> Iterator[Any]:
    """A row of panels, saved where the block ends; the file's suffix says as what (png, svg).

    Args:
        path: of the picture.
        columns: how many panels.
        title: above all.
        caption: below all: machine, versions, date.
        height: in inches.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    style: Any = STYLE
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, columns, figsize=(5.75 * max(columns, 1.25), height), dpi=160, squeeze=False
        )
        yield list(axes[0])
        if title:
            figure.suptitle(title, x=0.03, ha="left", fontsize=13.5, fontweight="bold")
        if caption:
            figure.text(0.03, 0.015, caption, fontsize=8, color=SOFT)
        below = 0.05 if caption else 0
        figure.tight_layout(rect=(0.015, below, 1, 0.99 if title else 1), w_pad=2.5)
        plain: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        figure.savefig(path, **plain)
        plt.close(figure)


def lengths_axis(axes: Any, lengths: list[int], room: float = 2.6) -> None:
    """Sequence lengths in powers of two, and room at the right for the lines' names."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * room * max(1.0, len(lengths) / 5))
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: count(n)))
    axes.set_xlabel("sequence length (tokens)")


def log_axis(axes: Any, base: int) -> None:
    """A logarithmic vertical axis; called before lines are drawn."""
    axes.set_yscale("log", base=base)


def values_axis(axes: Any, show: Callable[[float], str]) -> None:
    """Ticks of the vertical axis in words; every second power of two where it is logarithmic in 2."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if axes.get_yscale() == "log" and axes.yaxis.get_transform().base == 2:
        low, high = (math.log2(t) for t in axes.get_ylim())
        ticks = [2.0**i for i in range(math.ceil(low), int(high) + 1) if i % 2 == 0]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def frame(axes: Any, title: str, grid: str = "both") -> None:
    """Title, faint grid, no box."""
    axes.set_title(title, loc="left", fontsize=11, pad=14)
    axes.grid(True, which="major", axis=grid, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def line(axes: Any, points: list[Point], color: str, *, bold: bool = False) -> None:
    """Measured points filled and joined; estimates hollow and dotted."""
    known = [(x, y) for x, y, estimate in points if not estimate]
    guessed = [(x, y) for x, y, estimate in points if estimate]
    width, over = (2.6, 3) if bold else (1.8, 2)
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


def names_at_ends(
    axes: Any, ends: Mapping[str, Point], colors: Mapping[str, str], show: Callable[[float], str]
) -> None:
    """Each line's name and last value beside its last point, moved apart where they would touch."""
    for name, y in apart(axes, {name: end[1] for name, end in ends.items()}).items():
        x, value, estimate = ends[name]
        said = f"{name}\n{'~' if estimate else ''}{show(value)}{', estimate' if estimate else ''}"
        axes.annotate(
            said, (x, y), xytext=(9, 0), textcoords="offset points", va="center", fontsize=9,
            color=colors[name], fontweight="bold" if colors[name] == OURS else "normal", linespacing=1.1,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip


def apart(axes: Any, values: Mapping[str, float]) -> dict[str, float]:
    """Heights for the names: at the lines' ends, but no closer than one name's height."""
    logarithmic = axes.get_yscale() == "log"
    into, back = (math.log, math.exp) if logarithmic else (float, float)
    low, high = (into(t) for t in axes.get_ylim())
    gap = 0.105 * (high - low)
    placed: dict[str, float] = {}
    below = -math.inf
    for name in sorted(values, key=lambda m: values[m]):
        below = max(into(values[name]), below + gap)
        placed[name] = below
    spill = max(0.0, below - high)
    return {name: back(y - spill) for name, y in placed.items()}


def count(n: float) -> str:
    """8192 as 8k."""
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"
