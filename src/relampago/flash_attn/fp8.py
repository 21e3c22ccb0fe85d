"""FlashAttention-3's FP8 tensors, with a descale per sequence and kv head: who multiplies or reads them as they are.

`products`: e4m3 queries, keys and values multiplied in e4m3 (Hopper; a CPU emulates it). `readable`: e4m3 keys and
values in a cache, which kernels make bf16 of as they load them; or else all of it as bf16, which loses nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.flash_attn.options import sequence_of
from relampago.integrations.refusals import expect
from relampago.problem import Device
from relampago.quant import E4M3

FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
NAMES = ("q_descale", "k_descale", "v_descale")
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]


@torch.compiler.assume_constant_result
def machine(device: torch.device) -> Device:
    """What a device can, known where a graph is traced."""
    return Device.of(device)


def descales_of(
    q: Tensor, k: Tensor, v: Tensor, given: tuple[Any, Any, Any], batch: int
) -> Descales:
    """The scales of what is FP8; None is 1, and those of what is not FP8 count for nothing, as in FlashAttention-3.

    Args:
        q: (…, H, D).
        k: (…, G, D).
        v: (…, G, E).
        given: q_descale, k_descale and v_descale: fp32 (B, G), or None.
        batch: B.

    Raises:
        Refused: a scale is no fp32 tensor (B, G) on q's device.
    """
    want = (batch, k.shape[-2])
    for name, t, scale in zip(NAMES, (q, k, v), given, strict=True):
        if t.dtype not in FP8 or scale is None:
            continue
        expect(isinstance(scale, Tensor), "{} is {!r}; expected a tensor {}", name, scale, want)
        fits = (tuple(scale.shape), scale.dtype, scale.device) == (want, torch.float32, q.device)
        expect(
            fits, "{} is {} {} on {}; expected {} torch.float32 on {}",
            name, tuple(scale.shape), scale.dtype, scale.device, want, q.device,
        )  # fmt: skip
    of_q, of_k, of_v = (
        scale if t.dtype in FP8 else None for t, scale in zip((q, k, v), given, strict=True)
    )
    return of_q, of_k, of_v


def products(
    q: Tensor, k: Tensor, v: Tensor, descales: Descales, batch: int, simple: bool
) -> dict[str, Any] | None:
    """The options with which `attention` multiplies e4m3 as it is; None where `readable` is to make it bf16.

    Args:
        q: (…, H, D).
        k: (…, G, D).
        v: (…, G, E).
        descales: those of `descales_of`.
        batch: B.
        simple: whether the call has nothing that FP8's kernel does not know.
    """
    if not (simple and q.dtype == k.dtype == v.dtype == E4M3):
        return None
    device = machine(q.device)
    hopper = device.arch == "sm90" and q.shape[-1] <= 256 >= v.shape[-1]
    if not (hopper or device.kind == "cpu"):
        return None
    one = torch.ones(batch, k.shape[-2], dtype=torch.float32, device=q.device)
    return {name: one if t is None else t for name, t in zip(NAMES, descales, strict=True)}


class Readable(NamedTuple):
    """A call whose queries are not FP8."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None  # (B, G), of k and v that are e4m3 still
    v_scale: Tensor | None = None
    of_out: Tensor | None = None  # (B, G), what the output is to be multiplied by: `scaled`


def readable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: Descales,
    cu_seqlens_q: Tensor | None = None,
    *,
    cached: bool = False,
) -> Readable:
    """FP8 queries as bf16, keys and values as a kernel reads them, and `qv` folded in: q·kᵀ + qv·vᵀ is one product.

    A cast to bf16 loses nothing, and scales are linear. Those of q join those of keys in e4m3; where keys become bf16,
    the scales of both go to q, so that keys and values may lie in pages that sequences share.

    Args:
        q: (B, Lq, H, D), or packed (Tq, H, D) with cu_seqlens_q.
        k: keys, however they lie.
        v: values.
        qv: like q, of v's head dim; or None.
        descales: those of `descales_of`.
        cu_seqlens_q: where sequences begin in packed queries.
        cached: whether k and v lie in a cache, where they may stay e4m3 on machines that have it.
    """
    if qv is not None:
        want = (*q.shape[:-1], v.shape[-1])
        fits = tuple(qv.shape) == want and qv.device == q.device
        expect(
            fits, "qv is {} on {}; expected {} on {}", tuple(qv.shape), qv.device, want, q.device
        )
    of_q, of_k, of_v = descales
    eights = k.dtype == v.dtype == E4M3
    if cached and eights and qv is None and machine(q.device).has_e4m3:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        one = torch.ones(batch, k.shape[-2], dtype=torch.float32, device=q.device)
        of_keys = math.prod((t for t in (of_q, of_k) if t is not None), start=one)
        return Readable(_wide(q), k, v, of_keys, one if of_v is None else of_v)
    q = scaled(_wide(q), cu_seqlens_q, of_q, of_k)
    k, v = _wide(k), _wide(v)
    if qv is not None:
        qv = scaled(_wide(qv), cu_seqlens_q, of_q, of_v)
        q, k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    return Readable(q, k, v, of_out=of_v)


def scaled(tensor: Tensor, cu_seqlens: Tensor | None, *scales: Tensor | None) -> Tensor:
    """Queries or outputs times scales per sequence and kv head, rounded once."""
    given = [scale for scale in scales if scale is not None]
    if not given:
        return tensor
    factor = math.prod(given[1:], start=given[0])
    factor = factor.repeat_interleave(tensor.shape[-2] // factor.shape[-1], -1)  # [B, H]
    if cu_seqlens is None:
        factor = factor[:, None]
    else:
        factor = factor[sequence_of(cu_seqlens, tensor.shape[0])]
    return (tensor.float() * factor[..., None]).to(tensor.dtype)


def picked(tensor: Tensor, source: Tensor) -> Tensor:
    """`index_select` of rows, in FP8 too."""
    if tensor.dtype not in FP8:
        return tensor.index_select(0, source)
    return tensor.view(torch.uint8).index_select(0, source).view(tensor.dtype)


def put(target: Tensor, index: tuple[Tensor, ...], new: Tensor) -> None:
    """`target[index] = new`, in FP8 too."""
    if target.dtype in FP8:
        target, new = target.view(torch.uint8), new.view(torch.uint8)
    target[index] = new


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype in FP8 else tensor
