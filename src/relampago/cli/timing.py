"""How time is measured: side by side in one run, in alternating order, after a warm-up; the median and the spread.

On a CPU the wall clock, after a pause: torch's OpenMP threads spin for some 10 ms after a parallel region, and would
take a core from whoever comes next. A call much shorter than a millisecond is repeated until it fills one. On a GPU a
pair of CUDA events around each call, after the L2 cache has been overwritten: the overwriting also keeps the GPU busy
while the host launches, so that launch time does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 * 2**20  # more than any L2
LEAST_SAMPLE = 1e-3  # seconds of wall clock that one sample fills
LEAST_ROUNDS = 3
PAUSE = 0.02  # seconds, before each sample on a CPU


@dataclass(frozen=True)
class Timing:
    """Samples of one contestant, in seconds per call."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        """The least."""
        return min(self.samples)

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.samples)

    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def record(self) -> dict[str, object]:
        """For a JSON file."""
        q1, q3 = self.quartiles()
        return {
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "q1": q1,
            "q3": q3,
            "samples": list(self.samples),
        }


def alternate(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: str,
    repeats: int,
    budget: float = math.inf,
    warm: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time all calls in turn, forth and back, so that drift and neighbours hit each alike.

    Args:
        calls: by name.
        device: "cpu" or "cuda".
        repeats: samples of each.
        budget: stop early, but not before three rounds, once this many seconds are spent.
        warm: call each once, or twice if quick, before; False if they have just run.
        tick: called after each round.

    Returns:
        By name; all with the same number of samples.
    """
    started = time.perf_counter()
    inner = {}
    sample = _CudaSample() if device == "cuda" else wall_clock
    for name, call in calls.items():
        once = wall_clock(call) if warm else math.inf
        if warm and once < 1.0:
            once = wall_clock(call)
        short = device != "cuda" and once < LEAST_SAMPLE
        inner[name] = math.ceil(LEAST_SAMPLE / max(once, 1e-7)) if short else 1
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats):
        for name in list(calls) if round_ % 2 == 0 else list(calls)[::-1]:
            if device != "cuda":
                time.sleep(PAUSE)
            found[name].append(sample(calls[name], inner[name]))
        tick()
        if round_ + 1 >= LEAST_ROUNDS and time.perf_counter() - started > budget:
            break
    return {name: Timing(tuple(samples)) for name, samples in found.items()}


def wall_clock(call: Callable[[], object], times: int = 1) -> float:
    """Seconds per call."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


class _CudaSample:
    """Seconds of GPU time per call, from a cold L2."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, call: Callable[[], object], times: int = 1) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.zero_()
        start.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / times
