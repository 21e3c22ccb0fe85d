"""Time and peak memory against length: one causal layer, 8 heads of dim 64, three ways.

Standard attention is left out where it would take too much; what it would have cost is then an estimate, and marked as
one: time grows fourfold per doubling, memory by two N×N matrices per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor

import relampago as rl
from relampago.cli import machine, memory, timing
from relampago.cli.console import progress, seconds, size
from relampago.cli.explain import torch_dtype

HEADS, DIM = 8, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
QUICK = (128, 256, 512)
MOST_SECONDS = 15.0
MOST_BYTES = 4_000_000_000
STANDARD, SDPA, RELAMPAGO = "standard attention", "torch SDPA", "relampago"


class Point(NamedTuple):
    """One cell of the table; `bytes` is None where it cannot be measured."""

    method: str
    length: int
    seconds: float
    bytes: int | None
    estimate: bool = False


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v as the formula reads, on (B, L, H, D): S and P are each N×N."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).mul_(DIM**-0.5)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return (scores.masked_fill_(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def relampago(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the library."""
    return rl.attention(q, k, v, causal=True)


METHODS: dict[str, Callable[..., Tensor]] = {STANDARD: standard, SDPA: sdpa, RELAMPAGO: relampago}


def dtype_on(device: str) -> str:
    """fp32 on a CPU; bf16 on a GPU, whose matrix units it feeds."""
    return "bf16" if device == "cuda" else "fp32"


def _call(method: str, length: int, device: str) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(length)
    made = (torch.randn(1, length, HEADS, DIM, generator=generator) for _ in range(3))
    tensors = [t.to(device=device, dtype=torch_dtype(dtype_on(device))) for t in made]

    def call() -> Tensor:
        with torch.no_grad():
            return METHODS[method](*tensors)

    return call


def for_memory(method: str, length: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A small call and the one to measure, for `memory.on_cpu`."""
    return _call(method, 128, "cpu"), _call(method, length, "cpu")


def standard_bytes(length: int, device: str) -> int:
    """What standard attention holds beside its inputs and output: S and P."""
    itemsize = torch_dtype(dtype_on(device)).itemsize
    return 2 * itemsize * HEADS * length**2


def run(device: str, lengths: tuple[int, ...]) -> list[Point]:
    """All points, in order of length."""
    most = most_bytes(device)
    times: dict[tuple[str, int], float] = {}
    skipped: list[Point] = []
    with progress() as bar:
        task = bar.add_task("time", total=len(lengths))
        for method in METHODS:  # threads and libraries, once
            _call(method, 64, device)()
        for length in lengths:
            bar.update(task, description=f"time, {length} tokens")
            expected = _expected(times, length)
            needs = standard_bytes(length, device)
            methods = list(METHODS)
            if needs > most or expected[STANDARD] > MOST_SECONDS:
                methods.remove(STANDARD)
                skipped.append(Point(STANDARD, length, expected[STANDARD], needs, True))
            times |= _time(methods, length, device, expected)
            times |= {(p.method, p.length): p.seconds for p in skipped}
            bar.advance(task)
    measured = [key for key in times if not any(key == (p.method, p.length) for p in skipped)]
    peaks = _peaks(measured, device)
    points = [Point(*key, times[key], peaks[key]) for key in measured] + skipped
    return sorted(points, key=lambda p: (p.length, list(METHODS).index(p.method)))


def most_bytes(device: str) -> int:
    """How much standard attention may take here."""
    if device == "cuda":
        return int(0.6 * torch.cuda.mem_get_info()[0])
    return min(MOST_BYTES, int(0.6 * (machine.memory_available() or MOST_BYTES)))


def _expected(times: dict[tuple[str, int], float], length: int) -> dict[str, float]:
    """Seconds at this length, from those at the last one: quadratic."""
    found = {}
    for method in METHODS:
        known = [n for m, n in times if m == method]
        last = max(known, default=0)
        found[method] = times[method, last] * (length / last) ** 2 if last else 0.0
    return found


def _time(
    methods: list[str], length: int, device: str, expected: dict[str, float]
) -> dict[tuple[str, int], float]:
    """Medians of calls in alternating order; what takes seconds is called less often, standard attention once."""
    found = {}
    slow = {m for m in methods if expected[m] > 3.0 and m == STANDARD}
    calls = {m: _call(m, length, device) for m in methods}
    quick = {m: call for m, call in calls.items() if m not in slow}
    slowest = max((expected[m] for m in quick), default=0.0)
    repeats = 7 if slowest < 0.3 else 3 if slowest < 3.0 else 2
    timed = timing.alternate(quick, device=device, repeats=repeats, warm=slowest < 1.0)
    timed |= timing.alternate({m: calls[m] for m in slow}, device=device, repeats=1, warm=False)
    for method, timing_ in timed.items():
        found[method, length] = timing_.median
    return found


def _peaks(measured: list[tuple[str, int]], device: str) -> dict[tuple[str, int], int | None]:
    with progress() as bar:
        task = bar.add_task("peak memory, each point in a process of its own", total=len(measured))
        found: dict[tuple[str, int], int | None] = {}
        if device == "cuda":
            for method, length in measured:
                found[method, length] = memory.on_gpu(_call(method, length, device))
                bar.advance(task)
            return found
        jobs: list[dict[str, Any]] = [{"method": m, "length": n} for m, n in measured]
        answers = memory.on_cpu(f"{__name__}:for_memory", jobs)
        for key, answer in zip(measured, answers, strict=True):
            found[key] = answer
            bar.advance(task)
    return found


def table(points: list[Point], device: str) -> Table:
    """A row per length, time and memory of each method."""
    found = {(p.method, p.length): p for p in points}
    title = f"one layer, {HEADS} heads of {DIM}, causal, {dtype_on(device)}"
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("tokens", justify="right")
    for what in ("time", "peak memory"):
        for method in METHODS:
            view.add_column(f"{what}\n{method.removesuffix(' attention')}", justify="right")
    for length in sorted({p.length for p in points}):
        row = [found[m, length] for m in METHODS if (m, length) in found]
        times = [_cell(p, seconds(p.seconds)) for p in row]
        view.add_row(str(length), *times, *(_cell(p, size(p.bytes)) for p in row))
    if any(p.estimate for p in points):
        view.caption = f"~ estimate, not run: more than {most_bytes(device) / 1e9:.3g} GB or {MOST_SECONDS:.0f} s"
        view.caption_justify = "left"
    return view


def _cell(point: Point, value: str) -> Text:
    return Text(f"~{value}", style="dim italic") if point.estimate else Text(value)


def gains(points: list[Point]) -> str:
    """What the longest length shows, in words."""
    longest = max(p.length for p in points)
    at = {p.method: p for p in points if p.length == longest}
    ours, base = at[RELAMPAGO], at[STANDARD]
    words = "an estimated " if base.estimate else ""
    said = f"{longest} tokens in {seconds(ours.seconds)}"
    said += f" (standard {words}{seconds(base.seconds)}, SDPA {seconds(at[SDPA].seconds)})"
    if ours.bytes is not None and math.isfinite(base.bytes or math.inf):
        said += f"; {size(ours.bytes)} at the peak (standard {words}{size(base.bytes)})"
    return said
