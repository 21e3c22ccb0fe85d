"""What higher derivatives cost: python benchmarks/derivatives.py [--device cuda] [--lengths 1024 ...] [--json PATH].

Against the forward: the jvp of all inputs. Against the backward: the double backward (a second backward with its graph
kept, as in a gradient penalty, without the first two walks). The same for materialised attention, where it fits: up to
8192 tokens on a CPU, on a GPU until its memory is full. In alternating order, medians. On a GPU also the peak memory
of each, from the inputs on. --device cuda --dtype bfloat16 --lengths 4096 16384 32768.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

import relampago as rl
from relampago.cli.machine import facts
from relampago.cli.memory import on_gpu
from relampago.cli.timing import alternate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MATERIALISED = 8192  # tokens up to which a CPU makes the matrices of 8 heads
MIB = 2**20


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rl.attention(q, k, v)


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, as a user without a tiled second derivative writes it."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2)


def forward(f: Attention, x: list[Tensor], t: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return f(*x)


def tangent(f: Attention, x: list[Tensor], t: list[Tensor]) -> object:
    with torch.no_grad(), forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(a, b) for a, b in zip(x, t, strict=True)))
        return forward_ad.unpack_dual(out)


def walks(f: Attention, x: list[Tensor], t: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The backward and the double backward, each on a graph that is kept."""
    x = [a.detach().requires_grad_() for a in x]
    dout = t[0].detach().requires_grad_()
    out = f(*x)
    grads = torch.autograd.grad(out, x, dout, create_graph=True)
    return {
        "backward": lambda: torch.autograd.grad(out, x, dout, retain_graph=True),
        "double backward": lambda: torch.autograd.grad(grads, (*x, dout), t, retain_graph=True),
    }


def peaks(f: Attention, x: list[Tensor], t: list[Tensor]) -> dict[str, float]:
    """MiB beyond the inputs at the peak of a jvp, and of a forward, a backward and a double backward, on a GPU."""
    calls = {
        "jvp": lambda: tangent(f, x, t),
        "double backward": lambda: walks(f, x, t)["double backward"](),
    }
    return {name: round(on_gpu(call) / MIB, 1) for name, call in calls.items()}


def contestants_of(
    length: int, args: argparse.Namespace, x: list[Tensor], t: list[Tensor]
) -> tuple[dict[str, Attention], dict[str, object]]:
    """Who takes part, and on a GPU the peak memory of each; materialised attention only where it fits."""
    if not args.device.startswith("cuda"):
        fits = length <= MATERIALISED
        return {"relampago": tiled} | ({"materialised": materialised} if fits else {}), {}
    found: dict[str, Attention] = {}
    memory: dict[str, object] = {}
    for name, f in (("relampago", tiled), ("materialised", materialised)):
        try:
            peaks(f, x, t)  # compiles, and finds out whether it fits
            memory[name] = peaks(f, x, t)
            found[name] = f
        except torch.OutOfMemoryError:
            if name == "relampago":
                raise
            memory[name] = "out of memory"
        torch.cuda.empty_cache()
    return found, memory


def measure(length: int, args: argparse.Namespace) -> dict[str, object]:
    """Medians in seconds, and the ratios, of one length."""
    g = torch.Generator().manual_seed(0)
    shape = (1, length, args.heads, args.dim)
    dtype = getattr(torch, args.dtype)
    x, t = (
        [torch.randn(shape, generator=g).to(args.device, dtype) for _ in range(3)] for _ in range(2)
    )
    calls: dict[str, Callable[[], object]] = {}
    contestants, memory = contestants_of(length, args, x, t)
    for name, f in contestants.items():
        calls[f"{name} forward"] = lambda f=f: forward(f, x, t)
        calls[f"{name} jvp"] = lambda f=f: tangent(f, x, t)
        for walk, call in walks(f, x, t).items():
            calls[f"{name} {walk}"] = call
    times = alternate(calls, device=args.device, repeats=args.repeats, budget=args.budget)
    seconds = {name: timing.median for name, timing in times.items()}
    ratios = {}
    for name in contestants:
        ratios[f"{name} jvp / forward"] = seconds[f"{name} jvp"] / seconds[f"{name} forward"]
        walk = f"{name} double backward"
        ratios[f"{walk} / backward"] = seconds[walk] / seconds[f"{name} backward"]
    if len(contestants) == 2:
        for what in ("jvp", "double backward"):
            gain = seconds[f"materialised {what}"] / seconds[f"relampago {what}"]
            ratios[f"materialised / relampago, {what}"] = gain
    return {
        "length": length,
        "peak MiB": memory,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "times": {name: timing.record() for name, timing in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds per length")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    setting = {n: getattr(args, n) for n in ("device", "dtype", "heads", "dim")}
    found: dict[str, object] = {"machine": facts(), "setting": setting, "rows": (rows := [])}
    for length in args.lengths:
        rows.append(row := measure(length, args))
        print(length, json.dumps(row["ratios"]), json.dumps(row["peak MiB"]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
