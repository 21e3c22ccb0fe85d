"""What statistics cost beside one forward, in one run: `python benchmarks/statistics_cost.py [--out FILE]`; CPU or GPU.

Medians in alternating order; on the CPU of CPU seconds, all threads together, which neighbours on the machine disturb
least. Peak memory of each statistic is measured at the longest length, beyond its inputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics as middle
import time
from collections.abc import Callable
from pathlib import Path

import torch

import relampago as rl
from relampago import statistics
from relampago.cli.memory import growth, on_gpu

HEADS, DIM = 8, 64
HOPPER = "forward of gluon_sm90"


def inputs(length: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, length, HEADS, DIM, generator=g, device=device, dtype=dtype)
        for _ in range(3)
    ]


def contestants(q, k, v, causal: bool, backend: str) -> dict[str, Callable[[], object]]:
    options = {"causal": causal, "backend": backend}
    hopper = {**options, "backend": "gluon_sm90"}
    is_hopper = q.is_cuda and torch.cuda.get_device_capability() == (9, 0)
    _, lse = rl.attention(q, k, v, return_lse=True, **options)
    return {
        "forward": lambda: rl.attention(q, k, v, **options),
        "forward with max logits": lambda: rl.attention(q, k, v, return_max_logits=True, **options),
        "rows": lambda: statistics.rows(q, k, **options),
        "column sums": lambda: statistics.column_sums(q, k, **options),
        "column sums given LSE": lambda: statistics.column_sums(q, k, lse=lse, **options),
        "column sums, last 64": lambda: statistics.column_sums(q, k, last=64, **options),
        "top 16 keys of 64 rows": lambda: statistics.top_keys(
            q, k, range(-64, 0), 16, causal=causal
        ),
    } | (
        {
            HOPPER: lambda: rl.attention(q, k, v, **hopper),
            f"{HOPPER} with max logits": lambda: rl.attention(
                q, k, v, return_max_logits=True, **hopper
            ),
        }
        if is_hopper
        else {}
    )


def seconds(call: Callable[[], object], cuda: bool) -> float:
    if cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the host runs ahead: launches are not what is measured
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begun = time.process_time()
    call()
    return time.process_time() - begun


def measure(calls: dict[str, Callable[[], object]], repeats: int, cuda: bool) -> dict[str, float]:
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            times[name].append(seconds(calls[name], cuda))
    return {name: middle.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, backend = ("cuda", "triton") if cuda else ("cpu", "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    lengths = args.lengths or ([16384, 65536] if cuda else [4096])
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    result = {
        "device": name,
        "torch": torch.__version__,
        "backend": backend,
        "dtype": str(dtype),
        "rows": [],
    }
    for length in lengths:
        for causal in (False, True):
            calls = contestants(*inputs(length, device, dtype), causal, backend)
            times = measure(calls, args.repeats, cuda)
            row = {"length": length, "causal": causal, "seconds": times}
            own = {n: times[HOPPER if n.startswith(HOPPER) else "forward"] for n in times}
            row["of a forward"] = {n: t / own[n] for n, t in times.items()}
            result["rows"].append(row)
            print(f"{length} {'causal' if causal else 'full'}")
            for n, t in times.items():
                print(f"  {n:26} {t * 1e3:10.3f} ms  {t / own[n]:6.3f} of a forward")
    calls = contestants(*inputs(lengths[-1], device, dtype), True, backend)
    small = contestants(*inputs(64, device, dtype), True, backend)
    result["peak bytes"] = {
        n: on_gpu(call) if cuda else growth(small[n], call) for n, call in calls.items()
    }
    print(f"peak memory at {lengths[-1]}, beyond the inputs")
    for n, peak in result["peak bytes"].items():
        print(f"  {n:26} {peak / 2**20:10.1f} MiB")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
