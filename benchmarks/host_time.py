"""Host time: what one warm call costs before anything runs on the device.

    PYTHONPATH=src python benchmarks/host_time.py --json $OUT/host-time.json     on an H200, with compiles under 60 s
    PYTHONPATH=src:tests python benchmarks/host_time.py --stand-in               on a CPU, without a driver

Columns, in microseconds of a call: warm, until the call returns; by Triton's own launches (`tape` kept from playing);
of backwards, by autograd in the calling thread, which spares the way to its device's thread and back; until the device
is done, which is more than "warm" where kernels outlast their calls; how many launches a call makes; and how long
relampago's own part of a backward takes in its device's thread, and in the calling one.

Medians in one process. All rows and columns take turns, in alternating order, each for a short run of calls: a moment
in which the machine is slow is then no row's own. A run's launches are far from filling a queue (1024), and the device
is waited for before each. The stand-in (`tests/pretended_cuda.py`) has all of the Python and Triton's part of the C,
and CPU tensors; the driver's and the allocator's share is missing, as is autograd's thread, and only Triton's launches
are counted. It counts the process's CPU time, since a build machine is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import relampago as rl
from relampago import tape, warm
from relampago.cache import CacheView

GOAL = 25.0  # µs above an empty launch
CALLS, ROUNDS, SECONDS = 25, 60, 60.0  # of a run, of a column; all of it takes no longer
LENGTH, HEADS, KEYS = 64, 4, 8192
PEERS = ("empty", "SDPA")
BACKWARD = "forward and backward"
Call = Callable[[], Any]


@triton.jit
def empty(x, n: tl.constexpr):
    """Nothing."""


class Nothing(torch.autograd.Function):
    """What a gradient costs that is written in Python, before it does anything."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Of three tensors, one."""
        ctx.save_for_backward(*tensors)
        return tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        """The same for each."""
        return dout, *ctx.saved_tensors[1:]


@contextlib.contextmanager
def by_triton() -> Iterator[None]:
    """Inside, no launch is made the short way."""
    call = tape.Like.__call__
    tape.Like.__call__ = lambda self, given, anew: anew(given)
    try:
        yield
    finally:
        tape.Like.__call__ = call


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, autograd works in the calling thread."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


WAYS = {"warm": contextlib.nullcontext, "triton": by_triton, "thread": one_thread}


def clock(call: Call, wait: Call | None) -> tuple[float, float]:
    """µs of a call in a run of them: until it returns, and until the device is done; without one, of CPU time."""
    now = time.process_time if wait is None else time.perf_counter
    for _ in range(2):
        call()
    if wait is not None:
        wait()
    start = now()
    for _ in range(CALLS):
        call()
    returned = now()
    if wait is not None:
        wait()
    return (returned - start) / CALLS * 1e6, (now() - start) / CALLS * 1e6


def timed(calls: dict[str, Call], wait: Call | None) -> dict[str, dict[str, float]]:
    """Medians of all columns of all rows, which take turns."""
    turns = [(name, way) for name in calls for way in ways_of(name, wait is not None)]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {turn: [] for turn in turns}
    for name, way in turns:
        with WAYS[way]():
            for _ in range(6):
                calls[name]()
    start = time.perf_counter()
    for round_ in range(ROUNDS):
        for name, way in turns[:: -1 if round_ % 2 else 1]:
            with WAYS[way]():
                found[name, way].append(clock(calls[name], wait))
        if time.perf_counter() - start > SECONDS:
            break
    rows: dict[str, dict[str, float]] = {name: {} for name in calls}
    for (name, way), times in found.items():
        returned, done = (statistics.median(column) for column in zip(*times, strict=True))
        rows[name][way] = round(returned, 2)
        if way == "warm" and wait is not None:
            rows[name]["done"] = round(done, 2)
    return rows


def ways_of(name: str, device: bool) -> list[str]:
    """A row's columns."""
    own_row = not name.startswith(PEERS)
    threads = device and name.endswith(BACKWARD)
    return ["warm", *(["triton"] if own_row else []), *(["thread"] if threads else [])]


def inside(call: Call, way: str, wait: Call | None) -> float:
    """µs of relampago's own part of a backward: its key, its launches, what it allocates."""
    found: list[float] = []
    backward = warm.Known.backward

    def watched(self: warm.Known, *given: Any) -> Any:
        start = time.perf_counter()
        try:
            return backward(self, *given)
        finally:
            found.append((time.perf_counter() - start) * 1e6)

    warm.Known.backward = watched
    try:
        with WAYS[way]():
            for _ in range(ROUNDS):
                clock(call, wait)
    finally:
        warm.Known.backward = backward
    return round(statistics.median(found), 2)


def launches(call: Call, device: str) -> int:
    """How many kernels, copies and fills a call starts."""
    if device == "cpu":
        from pretended_cuda import written

        with written() as found:
            call()
        return len(found)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or ())


def peers(device: str, draw: Callable[..., Tensor]) -> dict[str, Call]:
    """What is compared with: an empty launch, and on a card SDPA's flash backend."""
    x = torch.zeros(16, device=device)
    q, k, v = (draw(1, HEADS, LENGTH, 64) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    calls: dict[str, Call] = {
        "empty Triton launch": lambda: empty[(1,)](x, 1),
        f"empty autograd.Function, {BACKWARD}": lambda: grad(Nothing.apply(*leaves), leaves, q),
    }
    if device == "cpu":
        return calls

    def flash(*tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=True)

    calls["SDPA flash d64"] = lambda: flash(q, k, v)
    calls["SDPA flash d64, with gradient"] = lambda: flash(*leaves)
    calls[f"SDPA flash d64, {BACKWARD}"] = lambda: grad(flash(*leaves), leaves, q)
    return calls


def own(device: str, draw: Callable[..., Tensor]) -> dict[str, Call]:
    """relampago's calls."""
    calls: dict[str, Call] = {}
    for backend in ("gluon_sm90", "triton"):
        for dim in (64, 128):
            q, k, v = (draw(1, LENGTH, HEADS, dim) for _ in range(3))
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]

            def forward(*tensors: Tensor, backend: str = backend) -> Tensor:
                return rl.attention(*tensors, causal=True, backend=backend)

            name = f"{backend} d{dim}"
            calls[name] = lambda f=forward, given=(q, k, v): f(*given)
            calls[f"{name}, with gradient"] = lambda f=forward, given=leaves: f(*given)
            calls[f"{name}, {BACKWARD}"] = lambda f=forward, given=leaves, dout=q: grad(
                f(*given), given, dout
            )
    q, k, v = draw(1, 1, 32, 128), draw(1, KEYS, 8, 128), draw(1, KEYS, 8, 128)
    calls["decode, one query of 8192 keys"] = lambda: rl.attention(q, k, v, backend="triton")
    lengths = torch.full((1,), KEYS, dtype=torch.int32, device=device)
    cache = CacheView(k, v, lengths)
    calls["attention_decode, a cache of 8192 keys"] = lambda: rl.attention_decode(
        q, cache, backend="triton"
    )
    return calls


def measure(device: str) -> dict[str, dict[str, float]]:
    """All rows."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)

    wait = torch.cuda.synchronize if device == "cuda" else None
    calls = {**peers(device, draw), **own(device, draw)}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        rows = timed(calls, wait)
        for name, call in calls.items():
            if name.endswith(BACKWARD) and not name.startswith(PEERS):
                rows[name]["inside"] = inside(call, "warm", wait)
                rows[name]["inside thread"] = inside(call, "thread", wait)
        for name, call in calls.items():  # at the end: the profiler leaves its traces
            rows[name]["launches"] = launches(call, device)
    return rows


def show(rows: dict[str, dict[str, float]]) -> None:
    """One table, in microseconds."""
    floor = rows["empty Triton launch"]["warm"]
    heads = ("above empty", "by Triton", "one thread", "until done", "inside", "in one", "launches")
    print(f"{'µs a call':46}{'warm':>12}" + "".join(f"{head:>12}" for head in heads))
    for name, row in rows.items():
        others = ("triton", "thread", "done", "inside", "inside thread")
        cells = (row["warm"], row["warm"] - floor, *map(row.get, others))
        text = "".join(f"{'' if cell is None else format(cell, '.1f'):>12}" for cell in cells)
        print(f"{name:46}{text}{row['launches']:12}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stand-in", action="store_true", help="on a CPU, without a driver")
    parser.add_argument(
        "--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "host-time.json"
    )
    options = parser.parse_args()
    if options.stand_in:
        from pretended_cuda import pretended

        with pretended():
            rows = measure("cpu")
    else:
        rows = measure("cuda")
    show(rows)
    floor = rows["empty Triton launch"]["warm"]
    machine = "stand-in on a CPU" if options.stand_in else torch.cuda.get_device_name()
    data = {
        "machine": machine, "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "unit": "us", "goal": GOAL,
        "met": {n: t["warm"] - floor < GOAL for n, t in rows.items() if n in ("gluon_sm90 d64", "gluon_sm90 d128",
                                                                              "triton d64", "triton d128")},
        "rows": rows,
    }  # fmt: skip
    options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
