"""Host time: what one warm call costs before anything runs on the device.

    PYTHONPATH=src python benchmarks/host_time.py --json $OUT/host-time.json     on an H200, with compiles under 60 s
    PYTHONPATH=src:tests python benchmarks/host_time.py --stand-in               on a CPU, without a driver

Columns: a warm call, and the same call by Triton's own launches (`tape` kept from playing), medians in one process, in
alternating order. Calls are enqueued in short runs, so that no queue fills. The stand-in (`tests/pretended_cuda.py`)
has all of the Python and Triton's part of the C, and CPU tensors; the driver's and the allocator's share is missing. It
counts the process's CPU time, since a build machine is shared.
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import relampago as rl
from relampago import tape
from relampago.cache import CacheView

GOAL = 25.0  # µs above an empty launch
CALLS, ROUNDS, SECONDS = 100, 15, 1.5  # of a run, of a row; a row takes no longer
LENGTH, HEADS, KEYS = 64, 4, 8192
Call = Callable[[], Any]


@triton.jit
def empty(x, n: tl.constexpr):
    """Nothing."""


@contextlib.contextmanager
def by_triton() -> Iterator[None]:
    """Inside, no launch is made the short way."""
    call = tape.Like.__call__
    tape.Like.__call__ = lambda self, given, anew: anew(given)
    try:
        yield
    finally:
        tape.Like.__call__ = call


def clock(call: Call, wait: Call | None) -> float:
    """µs of one call in a run of them; of CPU time where there is nothing to wait for."""
    now = time.process_time if wait is None else time.perf_counter
    start = now()
    for _ in range(CALLS):
        call()
    took = now() - start
    if wait is not None:
        wait()
    return took / CALLS * 1e6


def row(call: Call, wait: Call | None, both: bool) -> dict[str, float]:
    """Medians of a row's columns."""
    ways = {"warm": contextlib.nullcontext, **({"triton": by_triton} if both else {})}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        with way():
            for _ in range(6):
                call()
    if wait is not None:
        wait()
    start = time.perf_counter()
    for turn in range(ROUNDS):
        for name, way in sorted(ways.items(), reverse=bool(turn % 2)):
            with way():
                found[name].append(clock(call, wait))
        if time.perf_counter() - start > SECONDS:
            break
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def peers(device: str, draw: Callable[..., Tensor]) -> dict[str, Call]:
    """What is compared with: an empty launch, and on a card SDPA's flash backend."""
    x = torch.zeros(16, device=device)
    calls: dict[str, Call] = {"empty Triton launch": lambda: empty[(1,)](x, 1)}
    if device == "cpu":
        return calls
    q, k, v = (draw(1, HEADS, LENGTH, 64) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def flash(*tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=True)

    calls["SDPA flash d64"] = lambda: flash(q, k, v)
    calls["SDPA flash d64, with gradient"] = lambda: flash(*leaves)
    calls["SDPA flash d64, forward and backward"] = lambda: flash(*leaves).backward(q)
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
            calls[f"{name}, forward and backward"] = lambda f=forward, given=leaves, dout=q: f(
                *given
            ).backward(dout)
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
    found: dict[str, dict[str, float]] = {}
    for name, call in peers(device, draw).items():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found[name] = row(call, wait, both=False)
    for name, call in own(device, draw).items():
        found[name] = row(call, wait, both=True)
    return found


def show(rows: dict[str, dict[str, float]]) -> None:
    """One table, in microseconds."""
    floor = rows["empty Triton launch"]["warm"]
    print(f"{'µs a call':44}{'warm':>9}{'above empty':>13}{'by Triton':>11}")
    for name, times in rows.items():
        other = f"{times['triton']:11.1f}" if "triton" in times else ""
        print(f"{name:44}{times['warm']:9.1f}{times['warm'] - floor:13.1f}{other}")


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
