"""Batch invariance: does it hold over hundreds of random batches, and what does it cost?

    PYTHONPATH=src:tests python benchmarks/batch_invariance.py --json benchmarks/results/cpu/batch-invariance.json

On a GPU add --device cuda --backend triton. Times: medians of both ways in one run, in alternating order; the ratio is
the median of the pairs' ratios. On a shared machine --cpu-time counts the CPU time of one thread instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from unit.invariance import Batch

import relampago as rl
from relampago.cache import KVCache

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


def hold(first: int, batches: int, device: str, backend: str | None) -> dict[str, Any]:
    """Check random batches from a seed on; the first that differs raises."""
    longest = 300 if device == "cpu" else 4000
    dtypes = (torch.float32, torch.bfloat16)
    sequences = 0
    start = time.perf_counter()
    for seed in range(first, first + batches):
        batch = Batch(seed, longest, dtypes, device, backend)
        batch.check()
        sequences += len(batch.sequences)
        if seed % 50 == 0:
            print(f"{seed - first} batches, {time.perf_counter() - start:.0f} s", flush=True)
    seconds = round(time.perf_counter() - start, 1)
    return {
        "first": first,
        "batches": batches,
        "sequences": sequences,
        "longest": longest,
        "differences": 0,
        "seconds": seconds,
    }


def price(
    call: Callable[[bool], Any], device: str, clock: Callable[[], float], rounds: int
) -> dict[str, float]:
    """Milliseconds without and with, and the ratio."""

    def once(invariant: bool) -> float:
        start = clock()
        call(invariant)
        if device != "cpu":
            torch.cuda.synchronize()
        return 1e3 * (clock() - start)

    once(False), once(True)
    pairs = []
    for i in range(rounds):
        order = (False, True) if i % 2 else (True, False)
        times = {which: once(which) for which in order}
        pairs.append((times[False], times[True]))
    free, fixed = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return {"free_ms": round(free, 3), "invariant_ms": round(fixed, 3), "ratio": round(ratio, 3)}


def prefill(
    case: tuple[Any, ...], dtype: torch.dtype, device: str, backend: str | None
) -> Callable[[bool], Any]:
    """A call of `attention`, batch-invariant or not."""
    length, heads, kv, dim, window = case
    q, k, v = (torch.randn(1, length, h, dim, device=device).to(dtype) for h in (heads, kv, kv))
    options = {"causal": True, "window": window, "backend": backend}
    return lambda on: rl.attention(q, k, v, **options, batch_invariant=on)


def decode(
    case: tuple[Any, ...], dtype: torch.dtype, device: str, backend: str | None
) -> Callable[[bool], Any]:
    """A call of `attention_decode`, batch-invariant or not."""
    batch, keys, heads, kv, dim = case
    cache = KVCache(batch, keys, kv, dim, dtype=dtype, device=device)
    cache.append(*(torch.randn(batch, keys, kv, dim, device=device).to(dtype) for _ in range(2)))
    q = torch.randn(batch, 1, heads, dim, device=device).to(dtype)
    return lambda on: rl.attention_decode(q, cache, backend=backend, batch_invariant=on)


def prices(
    device: str, backend: str | None, clock: Callable[[], float], rounds: int
) -> list[dict[str, Any]]:
    """Every problem in fp32 (on the CPU) and bf16."""
    found = []
    kinds = (
        ("prefill", prefill, PREFILL, ("length", "heads", "kv_heads", "dim", "window"), rounds),
        ("decode", decode, DECODE, ("batch", "keys", "heads", "kv_heads", "dim"), 3 * rounds),
    )
    for dtype in (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,):
        for kind, make, cases, names, turns in kinds:
            for case in cases:
                row = price(make(case, dtype, device, backend), device, clock, turns)
                named = dict(zip(names, case, strict=True))
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cpu_time:
        torch.set_num_threads(1)
    held = (
        hold(options.first, options.batches, options.device, options.backend)
        if options.batches
        else None
    )
    print(held, flush=True)
    clock = time.process_time if options.cpu_time else time.perf_counter
    found = prices(options.device, options.backend, clock, options.rounds) if options.rounds else []
    machine = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor()
    data = {
        "machine": machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(), "clock": clock.__name__, "held": held, "prices": found,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
