"""Errors of ring attention against fp64 by ranks, on a CPU: `python benchmarks/ring_errors.py [--out FILE]`.

Virtual ranks, bf16, causal, zigzag. Beside it the same ring whose gradients of keys and values are rounded to bf16 at
each hop, which is what they would be if they travelled so. In fp64: the difference from one device; and that of the
loss, where examples/distributed/train_llama.py trains on four gloo processes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import relampago as rl
from relampago.cli import machine
from relampago.distributed import ContextParallelPlan, Simulation
from relampago.distributed.simulator import World

HERE = Path(__file__).resolve().parent
TARGET = HERE / "results" / "cpu" / "ring-errors.json"
EXAMPLE = HERE.parent / "examples" / "distributed" / "train_llama.py"
NAMES = ("out", "dq", "dk", "dv")
RANKS = (2, 8, 32)


class Narrow(World):
    """Wires that carry no more than bf16: of a ring's messages only gradients are wider."""

    def send(self, channel: str, source: int, target: int, tensor: Tensor) -> None:
        """As `World.send`."""
        super().send(channel, source, target, tensor.bfloat16().to(tensor.dtype))


def tensors(length: int, dim: int) -> list[Tensor]:
    """q, k, v and dout in fp64, of digits that bf16 has too."""
    g = torch.Generator().manual_seed(0)
    shapes = [(1, length, heads, dim) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=g).bfloat16().double() for shape in shapes]


def results(call: Any, given: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Out and gradients."""
    *qkv, dout = (t.to(dtype) for t in given)
    qkv = [t.requires_grad_() for t in qkv]
    out = call(*qkv)
    found = (out, *torch.autograd.grad(out, qkv, dout))
    return {name: t.detach().double() for name, t in zip(NAMES, found, strict=True)}


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula."""
    return rl.attention(q, k, v, causal=True, backend="reference")


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One device."""
    return rl.attention(q, k, v, causal=True)


def ring(ranks: int, length: int, narrow: bool = False) -> Any:
    """Virtual ranks."""
    run = Simulation(ContextParallelPlan(ranks, length, strategy="ring"))
    if narrow:
        run.world = Narrow(ranks)
    return lambda q, k, v: run.attention(q, k, v, causal=True)


def errors(length: int, dim: int) -> list[dict[str, Any]]:
    """Relative RMS errors in bf16, one device's first."""
    given = tensors(length, dim)
    truth = results(dense, given, torch.float64)
    calls = [(1, "fp32", alone)]
    calls += [(n, "fp32", ring(n, length)) for n in RANKS]
    calls += [(n, "bf16", ring(n, length, narrow=True)) for n in RANKS]
    rows = []
    for ranks, travel, call in calls:
        got = results(call, given, torch.bfloat16)
        found = {n: ((got[n] - truth[n]).norm() / truth[n].norm()).item() for n in NAMES}
        rows.append({"ranks": ranks, "travel": travel, "errors": found})
        print(rows[-1], flush=True)
    return rows


def differences(length: int, dim: int) -> dict[int, float]:
    """The largest of ring and one device in fp64, relative to the largest value, by ranks."""
    given = tensors(length, dim)
    want = results(alone, given, torch.float64)
    found = {}
    for ranks in RANKS:
        got = results(ring(ranks, length), given, torch.float64)
        found[ranks] = max(
            ((got[n] - want[n]).abs().max() / want[n].abs().max()).item() for n in NAMES
        )
    return found


def trained(steps: int) -> dict[str, Any]:
    """What the example says of its loss curves."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", str(steps)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (worst,) = re.findall(r"fp64: (\S+)", done.stdout)
    return {"processes": 4, "steps": steps, "difference": float(worst)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30, help="of the example; 0 leaves it out")
    options = parser.parse_args()
    report = {
        "machine": machine.facts(), "length": options.length, "dim": options.dim, "heads": [4, 2],
        "rows": errors(options.length, options.dim), "fp64": differences(options.length, options.dim),
    }  # fmt: skip
    if options.steps:
        report["example"] = trained(options.steps)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
