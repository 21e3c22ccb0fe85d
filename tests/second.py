"""Tangents and second derivatives of a call, for fixed random directions, as `oracle.run` gives out and gradients."""

from __future__ import annotations

from typing import Any

import torch
from oracle import leaves
from torch import Tensor
from torch.autograd import forward_ad

Named = dict[str, Tensor]


def _draw(like: Tensor, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random numbers that dtype can hold, so that every precision gets the same."""
    return torch.randn(like.shape, generator=g).to(dtype).to(like)


def _ready(tensors: tuple[Tensor, ...], options: dict[str, Any], dtype: torch.dtype):
    inputs = leaves(tensors, options, dtype)
    options = {**options, **{name: inputs[name] for name in ("bias", "sinks") if name in inputs}}
    return inputs, options


def tangents(
    call: Any, tensors: tuple[Tensor, ...], options: dict[str, Any], dtype: torch.dtype
) -> Named:
    """Tangents of out and LSE, by forward-mode AD along a direction of every input."""
    inputs, options = _ready(tensors, options, dtype)
    g = torch.Generator().manual_seed(2)
    narrow = tensors[0].dtype
    with forward_ad.dual_level():
        dual = {
            name: forward_ad.make_dual(t.detach(), _draw(t, g, narrow))
            for name, t in inputs.items()
        }
        options = {**options, **{n: dual[n] for n in ("bias", "sinks") if n in dual}}
        out, lse = call(tuple(dual[n] for n in ("q", "k", "v")), options)
        pairs = {"out": forward_ad.unpack_dual(out), "lse": forward_ad.unpack_dual(lse)}
        return {
            name: torch.zeros_like(p.primal) if p.tangent is None else p.tangent.clone()
            for name, p in pairs.items()
        }


def seconds(
    call: Any, tensors: tuple[Tensor, ...], options: dict[str, Any], dtype: torch.dtype
) -> Named:
    """Double backward: gradients of ⟨u, gradients of ⟨dout, out⟩ + ⟨dlse, LSE⟩⟩ by every input and by dout and dlse."""
    inputs, options = _ready(tensors, options, dtype)
    g = torch.Generator().manual_seed(3)
    narrow = tensors[0].dtype
    out, lse = call(tuple(inputs[name] for name in ("q", "k", "v")), options)
    dout = _draw(out, g, narrow).requires_grad_()
    dlse = (_draw(lse, g, narrow) * lse.isfinite()).requires_grad_()
    safe = torch.where(lse.isfinite(), lse, 0.0)
    found = {f"d{name}": torch.zeros_like(t) for name, t in inputs.items()}
    if not out.requires_grad or not lse.requires_grad or not out.numel():
        return found  # nothing was computed
    first = torch.autograd.grad(
        (out, safe), tuple(inputs.values()), (dout, dlse), create_graph=True, allow_unused=True
    )
    pairs = [(t, _draw(t, g, narrow)) for t in first if t is not None and t.requires_grad]
    if not pairs:
        return found
    by = {**inputs, "out": dout, "lse": dlse}
    grads = torch.autograd.grad(
        [t for t, _ in pairs], tuple(by.values()), [u for _, u in pairs], allow_unused=True
    )
    return {
        f"d{name}": torch.zeros_like(t) if grad is None else grad
        for (name, t), grad in zip(by.items(), grads, strict=True)
    }
