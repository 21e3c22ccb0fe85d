"""Batch invariance: does it hold over hundreds of random batches, and what does it cost?

    PYTHONPATH=src:tests python benchmarks/batch_invariance.py --json benchmarks/results/cpu/batch-invariance.json

    PYTHONPATH=src:tests python benchmarks/batch_invariance.py --device cuda --backend triton --seconds 110 --json ...

Prices come first, then random batches until they are done or the seconds are over. Times: medians of all ways in one
run, in alternating order; ratios are medians of the rounds' ratios. On a GPU a time is that of calls in a CUDA graph,
and prefill is also compared with the backend that would be chosen without batch invariance. On a shared machine
--cpu-time counts the CPU time of one thread instead.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from unit.invariance import Batch

import relampago as rl
from relampago.cache import KVCache
from relampago.plan import Plan, table

PREFILL = (  # length, heads, kv heads, dim, window
    (1024, 8, 8, 64, None),
    (4096, 8, 8, 64, None),
    (4096, 8, 8, 128, None),
    (4096, 8, 2, 128, None),
    (8192, 8, 8, 64, (1023, 0)),
)
DECODE = (  # sequences, keys, heads, kv heads, dim
    (1, 8192, 32, 8, 128),
    (1, 32768, 32, 8, 128),
    (8, 2048, 32, 8, 128),
    (1, 8192, 8, 8, 128),
)
GPU_PREFILL = (
    (8192, 32, 8, 128, None),
    (32768, 32, 8, 128, None),
    (8192, 32, 8, 64, None),
    (32768, 32, 8, 128, (4095, 0)),
    (8192, 16, 8, 256, None),
)
GPU_DECODE = (
    *((batch, keys, 32, 8, 128) for keys in (8192, 32768) for batch in (1, 8, 64)),
    (1, 8192, 8, 1, 128),
    (1, 32768, 8, 1, 128),
    (1, 8192, 32, 8, 64),
)
GPU_BATCH = {  # few kernels to compile
    "more": {"window": None, "softcap": None, "sinks": None},
    "dims": ((128, 128),),
    "groups": ((2, 4),),
}
CALLS = 10  # in a graph
KEYED = ["dtype", "dim_max", "dim_v_max"]
VARIANTS = {
    64: ((128, 4),),
    128: ((128, 2),),
    256: ((32, 3),),
}  # keys and stages of a tile, by head dim


def hold(
    first: int, batches: int, device: str, backend: str | None, until: float
) -> dict[str, Any]:
    """Check random batches from a seed on, as many as there is time for; the first that differs raises."""
    longest = 300 if device == "cpu" else 4000
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,)
    facts = {} if device == "cpu" else GPU_BATCH
    done = sequences = 0
    start = time.perf_counter()
    while done < batches and time.perf_counter() < until:
        batch = Batch(first + done, longest, dtypes, device, backend, **facts)
        batch.check()
        sequences += len(batch.sequences)
        done += 1
        if done % 50 == 1:
            print(f"{done} batches, {time.perf_counter() - start:.0f} s", flush=True)
    return {
        "first": first,
        "batches": done,
        "sequences": sequences,
        "longest": longest,
        "differences": 0,
        "seconds": round(time.perf_counter() - start, 1),
    }


def timed(call: Callable[[], Any], device: str, clock: Callable[[], float]) -> Callable[[], float]:
    """What tells the milliseconds of a call; it has been made before."""
    call()
    if device == "cpu":

        def once() -> float:
            start = clock()
            call()
            return 1e3 * (clock() - start)

        return once
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def replayed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / CALLS

    return replayed


def price(
    ways: dict[str, Callable[[], Any]], device: str, clock: Callable[[], float], rounds: int
) -> dict[str, float]:
    """Milliseconds of each way, and the ratios of the batch-invariant one to the others."""
    watches = {name: timed(call, device, clock) for name, call in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways) if i % 2 else reversed(ways):
            found[name].append(watches[name]())
    row = {f"{name}_ms": round(statistics.median(times), 4) for name, times in found.items()}
    for name, times in found.items():
        if name != "invariant":
            pairs = zip(found["invariant"], times, strict=True)
            ratio = round(statistics.median(b / a for b, a in pairs), 3)
            row["ratio" if name == "free" else f"{name}_ratio"] = ratio
    return row


def prefill(
    case: tuple[Any, ...], dtype: torch.dtype, device: str, backend: str | None
) -> dict[str, Callable[[], Any]]:
    """Calls of `attention`, batch-invariant and not; if a backend is given, also by the one that would be chosen."""
    length, heads, kv, dim, window = case
    q, k, v = (torch.randn(1, length, h, dim, device=device).to(dtype) for h in (heads, kv, kv))
    options = {"causal": True, "window": window}

    def call(backend: str | None, on: bool) -> Callable[[], Any]:
        return lambda: rl.attention(q, k, v, **options, backend=backend, batch_invariant=on)

    ways = {"free": call(backend, False), "invariant": call(backend, True)}
    return ways if backend is None or device == "cpu" else {**ways, "chosen": call(None, False)}


def decode(
    case: tuple[Any, ...], dtype: torch.dtype, device: str, backend: str | None
) -> dict[str, Callable[[], Any]]:
    """Calls of `attention_decode`, batch-invariant and not."""
    batch, keys, heads, kv, dim = case
    cache = KVCache(batch, keys, kv, dim, dtype=dtype, device=device)
    cache.append(*(torch.randn(batch, keys, kv, dim, device=device, dtype=dtype) for _ in range(2)))
    q = torch.randn(batch, 1, heads, dim, device=device).to(dtype)
    options = {"backend": backend}
    return {
        "free": lambda: rl.attention_decode(q, cache, **options, batch_invariant=False),
        "invariant": lambda: rl.attention_decode(q, cache, **options, batch_invariant=True),
    }


def others(call: Callable[[], Any], dim: int) -> dict[str, Callable[[], Any]]:
    """The batch-invariant call with VARIANTS of the plan that Hopper's table has for many kv heads."""
    rows = table("sm90")["triton.invariant"]
    (plan,) = [r.plan for r in rows if [n for n, _ in r.when] == KEYED and r.when[1][1] == dim]

    def planned(plan: Plan) -> Callable[[], Any]:
        def called() -> Any:
            with rl.using(plan=plan):
                return call()

        return called

    return {
        f"{keys} keys, {stages} stages": planned(replace(plan, block_k=keys, stages=stages))
        for keys, stages in VARIANTS[dim]
    }


def prices(
    device: str,
    backend: str | None,
    clock: Callable[[], float],
    rounds: int,
    until: float,
    more: bool,
) -> list[dict[str, Any]]:
    """Every problem in fp32 (on the CPU) and bf16, as far as there is time; `more`: `others` as well."""
    found = []
    cpu = device == "cpu"
    cases = (PREFILL, DECODE) if cpu else (GPU_PREFILL, GPU_DECODE)
    kinds = (
        ("decode", decode, cases[1], ("batch", "keys", "heads", "kv_heads", "dim"), 3 * rounds),
        ("prefill", prefill, cases[0], ("length", "heads", "kv_heads", "dim", "window"), rounds),
    )
    for dtype in (torch.float32, torch.bfloat16) if cpu else (torch.bfloat16,):
        for kind, make, problems, names, turns in kinds:
            for case in problems:
                if time.perf_counter() > until:
                    print(f"no time for {kind} {case}", flush=True)
                    continue
                named = dict(zip(names, case, strict=True))
                ways = make(case, dtype, device, backend)
                if more:
                    ways |= others(ways["invariant"], named["dim"])
                row = price(ways, device, clock, turns)
                found.append(
                    {"kind": kind, "dtype": str(dtype).removeprefix("torch."), **named, **row}
                )
                print(found[-1], flush=True)
    return found


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--variants", action="store_true", help="other tiles for Hopper, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    until = time.perf_counter() + options.seconds
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    where = (options.device, options.backend)
    found = []
    if options.rounds:
        found = prices(*where, clock, options.rounds, until, options.variants)
    held = hold(options.first, options.batches, *where, until) if options.batches else None
    print(held, flush=True)
    machine = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor()
    data = {
        "machine": machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(), "clock": clock.__name__, "held": held, "prices": found,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
