"""Standard attention and the fp64 oracle: the same dense formula, differentiated by autograd, in any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.api import Options, Packing, prepare
from relampago.backends.reference import attend
from relampago.op import arrays_of


def dense(
    tensors: tuple[Tensor, ...], options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) with products, softmax and weights held in dtype; differentiable."""
    options = dict(options)
    packing = None
    if "cu_seqlens_q" in options:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        packing = Packing(*(options.pop(name) for name in names))
    call = prepare(*tensors, Options(**options), packing=packing)
    return attend(arrays_of(call), dtype)


LEAVES = ("q", "k", "v", "bias", "sinks")


def leaves(
    tensors: tuple[Tensor, ...], options: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Copies of all that gets a gradient: q, k, v in dtype; bias and sinks at least in fp32."""
    named = dict(zip(LEAVES, (*tensors, options.get("bias"), options.get("sinks")), strict=True))
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: t.detach().to(dtype if name in ("q", "k", "v") else wide).requires_grad_()
        for name, t in named.items()
        if t is not None
    }


def run(
    call: Any,
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    seed: int = 1,
) -> dict[str, Tensor]:
    """out, lse and every gradient of `call(tensors, options)`, for fixed random gradients of out and lse."""
    inputs = leaves(tensors, options, dtype)
    options = {**options, **{name: inputs[name] for name in ("bias", "sinks") if name in inputs}}
    out, lse = call(tuple(inputs[name] for name in ("q", "k", "v")), options)
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=g).to(tensors[0].dtype).to(out)
    dlse = torch.randn(lse.shape, generator=g).to(lse) * lse.isfinite()
    safe = torch.where(lse.isfinite(), lse, 0.0)
    results = [
        (t, d) for t, d in ((out, dout), (safe, dlse)) if t.requires_grad
    ]  # none where nothing was computed
    grads: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if results:
        grads = torch.autograd.grad(
            [t for t, _ in results],
            tuple(inputs.values()),
            [d for _, d in results],
            allow_unused=True,
        )
    found = {f"d{name}": torch.zeros_like(t) if grad is None else grad
             for (name, t), grad in zip(inputs.items(), grads, strict=True)}  # fmt: skip
    return {"out": out, "lse": lse, **found}
