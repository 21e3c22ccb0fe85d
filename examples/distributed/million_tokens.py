"""Attention over a million tokens on one machine: P virtual ranks take turns, and no N × N matrix exists anywhere.

    python examples/distributed/million_tokens.py                         # causal, all of it: minutes
    python examples/distributed/million_tokens.py --window 4095           # the same with a window: seconds
    python examples/distributed/million_tokens.py --seq 65536 --ranks 8

Each virtual rank runs the program it would run on a cluster, with its messages. A few rows are checked against the
dense formula in fp64, which is affordable for single rows.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from relampago.distributed import ContextParallelPlan, Simulation


def dense_row(q: Tensor, k: Tensor, v: Tensor, row: int, window: int | None) -> Tensor:
    """The formula for one row (H, D), in fp64."""
    first = 0 if window is None else max(0, row - window)
    keys, values = (t[0, first : row + 1].double() for t in (k, v))
    scores = torch.einsum("hd,khd->hk", q[0, row].double(), keys) * q.shape[-1] ** -0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


def resident() -> float | None:
    """The greatest memory this process has had, in MiB, where Linux tells."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = status.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Compute, check, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=1 << 20)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--window", type=int, help="keys before its own that a row sees")
    parser.add_argument("--strategy", default="ring")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.seq, options.heads, options.dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    before = resident()
    plan = ContextParallelPlan(options.ranks, options.seq, strategy=options.strategy)
    run = Simulation(plan)
    window = None if options.window is None else (options.window, None)
    start = time.perf_counter()
    out = run.attention(q, k, v, causal=True, window=window)
    spent = time.perf_counter() - start
    rows = [0, 1, options.seq // 3, options.seq // 2, options.seq - 1]
    worst = max(
        (out[0, row].double() - dense_row(q, k, v, row, options.window)).abs().max().item()
        for row in rows
    )
    print(
        f"{options.seq:,} tokens, {options.ranks} virtual ranks, {options.strategy}: {spent:.1f} s"
    )
    print(f"largest error of {len(rows)} rows against fp64: {worst:.1e}")
    sent = [t.bytes / 2**20 for t in run.traffic]
    print(f"a rank sent {min(sent):.1f} to {max(sent):.1f} MiB in {run.traffic[0].calls} calls")
    matrix = 4 * options.seq**2 * options.heads / 2**20
    if before is not None:
        grown = (resident() or before) - before
        print(f"memory grew by {grown:.0f} MiB; the matrix of scores would take {matrix:,.0f} MiB")
        if grown > 64 * q.numel() * 4 / 2**20 + 200:
            raise SystemExit("memory is not bounded by a multiple of the inputs")
    if worst > 1e-5:
        raise SystemExit("the rows differ from the formula")


if __name__ == "__main__":
    main()
