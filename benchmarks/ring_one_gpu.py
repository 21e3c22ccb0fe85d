"""Ring attention's kernels on one GPU: every step of every rank, one after another, against one device's whole call.

    python benchmarks/ring_one_gpu.py 120 [--out FILE] [--dry]

Virtual ranks run the programs they would run on a cluster (relampago.distributed.simulator); messages are handed over
without a copy. What is compared is the time of all ranks' steps together with that of one call on the whole sequence:
kernel efficiency, merging included, no links. The goal for 64k tokens on 8 ranks, zigzag ring, is a ratio of at most
1.10. Beside it: the difference from one device's result, and the merge timed alone; of the goal's case also the ring as
it was (`ring_before.py`), and how many kernels each starts. `--dry` runs on a CPU, tiny.

The first argument is a budget in seconds: cases are ordered by weight, and what does not fit is left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import torch  # noqa: E402
from ring_before import before  # noqa: E402

import relampago as rl  # noqa: E402
from relampago import op, tape  # noqa: E402
from relampago.distributed import ContextParallelPlan, Simulation  # noqa: E402

DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
HEADS, KV_HEADS, DIM = (8, 2, 16) if DRY else (32, 8, 128)
DTYPE = torch.float32 if DRY else torch.bfloat16
DECIDE, TURNED = op._decide, {}
REPEATS = 2 if DRY else 5
K = 1024

# (strategy, ranks, tokens, window): the first is the goal's
CASES: list[tuple[str, int, int, int | None]] = [
    ("ring", 8, 64 * K, None),
    ("ring", 4, 64 * K, None),
    ("ring", 2, 64 * K, None),
    ("ring", 8, 128 * K, None),
    ("allgather", 8, 64 * K, None),
    ("ulysses", 8, 64 * K, None),
    ("halo", 8, 64 * K, 4095),
    ("ring", 16, 64 * K, None),
    ("ring", 8, 32 * K, None),
]
if DRY:
    CASES = [(s, p, n // 512, None if w is None else 31) for s, p, n, w in CASES]


def clock() -> float:
    """Seconds, when the device has done all it was asked."""
    if not DRY:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Any) -> float:
    before = clock()
    call()
    return clock() - before


def tensors(length: int) -> list[torch.Tensor]:
    g = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(1, length, h, DIM, generator=g, device=DEVICE, dtype=torch.float32)
        .to(DTYPE)
        .requires_grad_()
        for h in (HEADS, KV_HEADS, KV_HEADS)
    ]


class Timed(Simulation):
    """A simulation that times all ranks' programs together, sharding and joining apart.

    Ranks' steps follow one another on the device without a pause, as one rank's do on a cluster: the host runs ahead.
    """

    def __init__(self, plan: ContextParallelPlan) -> None:
        super().__init__(plan, latency=0.0, copies=False)
        self.times: list[float] = []

    def run(self, course: Any, make: Any) -> list[Any]:
        before = clock()
        results = super().run(course, make)
        self.times.append(clock() - before)
        return results


def alone(qkv: list[torch.Tensor], dout: torch.Tensor, window: Any) -> tuple[list[float], Any]:
    """One device, the whole sequence: seconds of forward and backward, and the results."""
    before = clock()
    out = rl.attention(*qkv, causal=True, window=window)
    middle = clock()
    grads = torch.autograd.grad(out, qkv, dout)
    return [middle - before, clock() - middle], [out.detach(), *grads]


def together(
    run: Timed, qkv: list[torch.Tensor], dout: torch.Tensor, window: Any
) -> tuple[list[float], Any]:
    """Virtual ranks: the time of all their steps."""
    run.times.clear()
    out = run.attention(*qkv, causal=True, window=window)
    grads = torch.autograd.grad(out, qkv, dout)
    return [*run.times], [out.detach(), *grads]


def turned(
    run: Timed, qkv: list[torch.Tensor], dout: torch.Tensor, window: Any
) -> tuple[list[float], Any]:
    """Likewise, where steps without a mask begin at another block of keys by tile."""
    with (
        mock.patch.object(op, "_decide", with_turns),
        mock.patch.object(tape, "_known", TURNED),  # launches of its own, to be made again
    ):
        return together(run, qkv, dout, window)


@functools.lru_cache(maxsize=4096)
def with_turns(p: Any, *forced: Any) -> Any:
    """What is chosen, and its plan."""
    backend, plan = DECIDE(p, *forced)
    return backend, replace(plan, rotate=1) if p.direction == "forward" else plan


def launches(call: Any) -> int:
    """Kernels and copies that a call starts on the device."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())


def compare(case: tuple[str, int, int, int | None], beside: bool) -> dict[str, Any]:
    """All contestants in one loop, in turns that go round: the card's clock moves with its power."""
    strategy, ranks, length, left = case
    window = None if left is None else (left, None)
    qkv = tensors(length)
    dout = torch.randn_like(qkv[0])
    run = Timed(ContextParallelPlan(ranks, length, strategy=strategy))
    calls = {
        "one": lambda: alone(qkv, dout, window),
        "sum": lambda: together(run, qkv, dout, window),
    }
    if beside:

        def old() -> tuple[list[float], Any]:
            with before(not DRY):
                return together(run, qkv, dout, window)

        calls["before"] = old
    if beside and not DRY:
        calls["turned"] = lambda: turned(run, qkv, dout, window)
    row: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "tokens": length, "window": left}
    found = {name: call()[1] for name, call in calls.items()}  # compiles
    names = ("out", "dq", "dk", "dv")
    row["difference"] = {
        name: ((a - b).float().norm() / b.float().norm()).item()
        for name, a, b in zip(names, found["sum"], found["one"], strict=True)
    }
    del found
    if beside and not DRY:
        row["launches"] = {name: launches(call) for name, call in calls.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(REPEATS):
        for name in order:
            times[name].append(calls[name]()[0])
        order = [*order[1:], order[0]]
    median = {
        name: [statistics.median(t) for t in zip(*all_, strict=True)]
        for name, all_ in times.items()
    }
    one = median.pop("one")
    row["one_ms"] = dict(zip(("forward", "backward"), (t * 1e3 for t in one), strict=True))
    for name, (forward, backward) in median.items():
        row[name] = {
            "forward_ms": forward * 1e3, "backward_ms": backward * 1e3, "forward_ratio": forward / one[0],
            "backward_ratio": backward / one[1], "ratio": (forward + backward) / sum(one),
        }  # fmt: skip
    return row


def fold_cost() -> dict[str, float]:
    """The merge by itself: milliseconds and GB/s for the rows of one rank at 64k tokens on 8."""
    from relampago.merge import fold_

    rows = 64 if DRY else 8 * K
    out, part = (torch.randn(1, rows, HEADS, DIM, device=DEVICE) for _ in range(2))
    lse, part_lse = (torch.randn(1, HEADS, rows, device=DEVICE) for _ in range(2))
    times = [timed(lambda: fold_(out, lse, part, part_lse)) for _ in range(REPEATS + 1)][1:]
    seconds = statistics.median(times)
    return {"ms": seconds * 1e3, "gb_per_s": 12 * out.numel() / seconds / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("budget", type=float, nargs="?", default=120.0, help="seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    rows, left_out, longest = [], [], 0.0
    for case in CASES:
        if time.monotonic() - start + longest > options.budget:
            left_out.append(case)
            continue
        begun = time.monotonic()
        try:
            row = compare(case, beside=case == CASES[0])
        except Exception as error:  # the other cases still count
            row = {
                "strategy": case[0],
                "ranks": case[1],
                "tokens": case[2],
                "error": repr(error)[:500],
            }
        longest = max(longest, time.monotonic() - begun)
        rows.append(row)
        print(json.dumps(row), flush=True)
    name = "cpu, dry" if DRY else torch.cuda.get_device_name()
    report = {
        "machine": f"{name}, torch {torch.__version__}", "date": datetime.date.today().isoformat(),
        "shape": f"causal, heads {HEADS}/{KV_HEADS}, dim {DIM}, {DTYPE}, batch 1; medians of {REPEATS}",
        "meaning": "sum over virtual ranks of their computing, against one call on the whole: no links",
        "fold": fold_cost(), "rows": rows, "left_out": left_out,
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
