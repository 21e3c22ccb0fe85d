"""FP8 attention's arithmetic without the hardware: what rounds to e4m3 on Hopper rounds here too, at the same places.

Q, K and V are cast with their scales, the weights with `PLACES`; products of e4m3 numbers are summed in fp32, which is
what the kernel's two-level accumulation comes to. `cpu` and `reference` run under `run` and round their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from relampago.problem import Arrays
from relampago.quant.cast import E4M3, dequantise, quantise, slots
from relampago.quant.rotation import rotate

PLACES = 8  # weights are at most 1 and are held times 2^8 (FlashAttention-3 does so): e4m3 reaches from 2^-9 to 448


def run(x: Arrays, attend: Callable[[Arrays], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Out and LSE of `attend`, which gets fp32 values of what is e4m3, or is to become it; no gradients.

    Scales of keys and values in a cache are linear: those of keys go to the queries, those of values to out.
    """
    if x.precision is None and x.k_scale is None:
        return attend(x)
    if x.precision is None:
        assert x.k_scale is not None
        assert x.v_scale is not None
        q = x.q.float() * _per_row(x, x.k_scale)
        wide = replace(x, q=q, dtype=torch.float32, k_scale=None, v_scale=None)
        out, lse = attend(wide)
        return (out * _per_row(x, x.v_scale)).to(x.out_dtype), lse
    of_q, of_k = (
        {"cu_seqlens": cu, "max_seqlen": n} for cu, n in ((x.cu_q, x.len_q), (x.cu_k, x.len_k))
    )
    q, k, v = (
        dequantise(*given, **packing)
        for given, packing in zip(operands(x), (of_q, of_k, of_k), strict=True)
    )
    return attend(
        replace(x, q=q, k=k, v=v, q_scale=None, k_scale=None, v_scale=None, dtype=x.out_dtype)
    )


def _per_row(x: Arrays, scales: Tensor) -> Tensor:
    """Scales (B, G, 1) for rows of q or out."""
    of_heads = scales[..., 0].repeat_interleave(x.group, 1)  # [B, H]
    if x.cu_q is None:
        return of_heads[:, None, :, None]
    where, _, blocks = slots(x.q, x.cu_q, x.len_q)
    return of_heads[where.clamp(min=0) // blocks][..., None]


def operands(x: Arrays) -> tuple[tuple[Tensor, Tensor], ...]:
    """(values, scales) of q, k and v: as they were given in e4m3, or q and k rotated and all three cast by blocks."""
    if x.q.dtype == E4M3:
        scales = (x.q_scale, x.k_scale, x.v_scale)
        given = zip((x.q, x.k, x.v), scales, strict=True)
        return tuple((t, scale) for t, scale in given if scale is not None)
    of_q = {"cu_seqlens": x.cu_q, "max_seqlen": x.len_q}
    of_k = {"cu_seqlens": x.cu_k, "max_seqlen": x.len_k}
    found = (
        quantise(rotate(x.q.float()), **of_q),
        quantise(rotate(x.k.float()), **of_k),
        quantise(x.v, **of_k),
    )
    return tuple((one.values, one.scales) for one in found)


def rounded(p: Tensor) -> Tensor:
    """Weights, of which a row's largest so far is 1, as the kernel multiplies them."""
    return (p * 2.0**PLACES).to(E4M3).to(torch.float32) * 2.0**-PLACES
