"""Masks and shapes that every strategy must get right, and the dense fp64 answer to them."""

from __future__ import annotations

import torch

import relampago as rl

LENGTH = 101  # odd: no layout divides it
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (13, None)},
    "window both ways": {"window": (5, 9)},
    "prefix": {"mask": rl.Prefix(17)},
    "prefixes": {"mask": rl.Prefix(torch.tensor([3, 60]))},
    "documents": {"mask": rl.Causal() & rl.Document(torch.tensor([0, 5, 40, 41]))},
    "two packings": {"mask": rl.Document(torch.tensor([[3, 50, 101], [0, 2, 70]]))},
    "softcap and sinks": {"causal": True, "softcap": 2.0, "sinks": True},
    "window and sinks": {"mask": rl.Document(torch.tensor([7])) & rl.Window(2, 1), "sinks": True},
}


def tensors(dtype=torch.float64, length=LENGTH, heads=4, kv_heads=2, dim=8, dim_v=6, batch=2):
    g = torch.Generator().manual_seed(3)
    shapes = (
        (batch, length, heads, dim),
        (batch, length, kv_heads, dim),
        (batch, length, kv_heads, dim_v),
    )
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)


def with_sinks(options: dict, heads: int) -> dict:
    if not options.get("sinks"):
        return options
    return {**options, "sinks": torch.linspace(-1, 2, heads, dtype=torch.float64)}
