"""The report's pictures: speed and memory against length, from the committed JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relampago.cli import charts
from relampago.cli.console import size
from relampago.cli.report import tables
from relampago.cli.report.results import load

COLORS = {
    "relampago": charts.OURS, "cuDNN": charts.TORCH, "FA3": charts.GREEN, "FA2": charts.VIOLET,
    "torch SDPA": charts.TORCH, "relampago, Triton": charts.SAND,
}  # fmt: skip
DIM = 128
Lines = dict[str, list[charts.Point]]


def hopper(path: Path) -> None:
    """The H200: forward and backward at head dim 128."""
    caption = f"{load(tables.FORWARD[0])['machine']}, bf16, d {DIM}, {2048 // DIM} heads, 16k tokens in all, or 32k"
    with charts.canvas(path, 3, caption=caption) as panels:
        for axes, causal in zip(panels, (False, True), strict=False):
            _draw(
                axes, forward(causal), f"forward, {'causal' if causal else 'full'}, TFLOP/s", _rate
            )
        _draw(panels[2], backward(), "backward, full, TFLOP/s", _rate)


def forward(causal: bool) -> Lines:
    """TFLOP/s by length."""
    lines = Lines()
    for batch, length in tables.SHAPES:
        rates = tables.of_first_run(DIM, DIM, causal, batch, length)
        for name, label in {"ours": "relampago", "cudnn": "cuDNN", "fa3": "FA3"}.items():
            if rate := rates.get(name):
                lines.setdefault(label, []).append((length, rate, False))
    return lines


def backward() -> Lines:
    """TFLOP/s by length."""
    rates, lines = tables.backward_rates(tables.BACKWARD_RUNS[0]), Lines()
    for (batch, length), ours in zip(tables.SHAPES, tables.BACKWARD[DIM, 0], strict=True):
        names = {ours: "relampago", "cudnn": "cuDNN", "flash": "FA2"}
        for name, label in names.items():
            if rate := rates.get((DIM, 0, batch, length, name)):
                lines.setdefault(label, []).append((length, rate, False))
    return lines


def cpu(path: Path) -> None:
    """A CPU: time relative to SDPA, and memory, by length."""
    facts = load("cpu/bench.json")["machine"]
    caption = (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, 8 heads, d 64, causal"
    )
    with charts.canvas(path, 3, caption=caption) as (left, middle, right):
        _draw(left, on_cpu("forward", "fp32", _speed), "forward, fp32, GFLOP/s", _rate)
        _draw(middle, on_cpu("both", "fp32", _speed), "forward and backward, fp32, GFLOP/s", _rate)
        charts.log_axis(right, 2)
        peaks = on_cpu("both", "fp32", lambda row: row["peak_bytes"])
        _draw(right, peaks, "peak memory, forward and backward", size)


def on_cpu(direction: str, dtype: str, field: Callable[[dict[str, Any]], float | None]) -> Lines:
    """A figure by length, of the causal cases at head dim 64."""
    lines = Lines()
    for row in load("cpu/bench.json")["rows"]:
        fits = row["case"].startswith("causal-d64-") and "seconds" in row
        if (
            fits
            and (row["direction"], row["dtype"]) == (direction, dtype)
            and (value := field(row))
        ):
            length = int(row["case"].rsplit("-", 1)[1].removesuffix("k")) * 1024
            label = {"cpu": "relampago", "sdpa": "torch SDPA"}[row["backend"]]
            lines.setdefault(label, []).append((length, value, False))
    return lines


def _speed(row: dict[str, Any]) -> float:
    return row["flops"] / row["seconds"]["median"] / 1e9


def _rate(value: float) -> str:
    return f"{value:.0f}"


def _draw(axes: Any, lines: Lines, title: str, show: Callable[[float], str]) -> None:
    for name, points in lines.items():
        charts.line(axes, points, COLORS[name], bold=name == "relampago")
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    charts.lengths_axis(axes, sorted({int(p[0]) for points in lines.values() for p in points}))
    charts.values_axis(axes, show)
    charts.frame(axes, title)
    ends = {name: points[-1] for name, points in lines.items()}
    charts.names_at_ends(axes, ends, COLORS, show)


FIGURES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "hopper": ("Hopper", hopper),
    "cpu": ("CPU", cpu),
}
