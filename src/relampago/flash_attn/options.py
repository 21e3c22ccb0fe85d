"""flash-attn's way to say things, as `relampago.attention` takes them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.integrations.refusals import expect
from relampago.mods import ScoreMod, zero
from relampago.problem import Device

FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)


def options_of(
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    """What all functions share: -1 is an unbounded side, a softcap of 0 is none."""
    return {
        "scale": softmax_scale,
        "causal": bool(causal),
        "window": window_of(window_size),
        "softcap": softcap if softcap and softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
        "sinks": s_aux,
    }


def window_of(window_size: Any) -> tuple[int | None, int | None] | None:
    """(left, right), where a negative side is unbounded."""
    expect(
        isinstance(window_size, tuple | list) and len(window_size) == 2,
        "window_size is {!r}; expected a pair (left, right), -1 for unbounded",
        window_size,
    )
    left, right = (None if side is None or int(side) < 0 else int(side) for side in window_size)
    return None if left is None and right is None else (left, right)


def chunked(options: dict[str, Any], chunk: int, starts: Tensor) -> dict[str, Any]:
    """Options that add attention in chunks of so many keys (Llama 4; FlashAttention-3's `attention_chunk`).

    The window bounds the tiles that are visited, the mod cuts at the chunk's ends.

    Args:
        options: those of the call.
        chunk: keys per chunk.
        starts: (Lq,) or (B, H, Lq), the first key of each row's chunk.
    """
    left, right = options["window"] or (None, None)
    bound = chunk - 1
    mod = ScoreMod(_inside, _slope, args=[("q", starts), chunk, -torch.inf], ddfn=zero)
    sides = tuple(bound if side is None else min(side, bound) for side in (left, right))
    return {**options, "window": sides, "score_mod": mod}


def chunk_starts(rows: int, offset: Tensor | int, chunk: int, like: Tensor) -> Tensor:
    """The first key of each row's chunk, where row i stands at i + offset: (rows,), or (B, heads, rows) for (B,)."""
    row = torch.arange(rows, device=like.device)
    if isinstance(offset, int):
        return (row + offset).div(chunk, rounding_mode="floor") * chunk
    place = row + offset.long()[:, None]
    starts = place.div(chunk, rounding_mode="floor") * chunk
    return starts[:, None].expand(-1, like.shape[-2], -1)


def _inside(score, q, k, head, args, math):
    return math.where((k >= args[0]) & (k < args[0] + args[1]), score, args[2])


def _slope(score, q, k, head, args, math):
    return math.where((k >= args[0]) & (k < args[0] + args[1]), 1.0, 0.0)


def fp8_scales(
    q: Tensor, k: Tensor, v: Tensor, descales: tuple[Any, Any, Any], simple: bool
) -> dict[str, Any] | None:
    """The scales with which a Hopper card multiplies e4m3 as it is; None where `dequantised` is to make it bf16.

    Args:
        q: (…, H, D).
        k: (…, G, D).
        v: (…, G, E).
        descales: of q, k and v: (B, G) each, or None for 1.
        simple: whether the call has nothing that FP8's kernel does not know.
    """
    eights = all(t.dtype == torch.float8_e4m3fn for t in (q, k, v))
    if not (
        simple
        and eights
        and Device.of(q.device).arch == "sm90"
        and q.shape[-1] <= 256 >= v.shape[-1]
    ):
        return None
    given = [scale for scale in descales if scale is not None]
    batch = given[0].shape[0] if given else q.shape[0]
    ones = torch.ones(batch, k.shape[-2], dtype=torch.float32, device=q.device)
    names = ("q_descale", "k_descale", "v_descale")
    return {name: ones if t is None else t for name, t in zip(names, descales, strict=True)}


class Plain(NamedTuple):
    """A call without FP8: the scales of q and k are in q, that of v waits for the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    v_descale: Tensor | None


def dequantised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    cu_seqlens_q: Tensor | None = None,
) -> Plain:
    """FP8 as bf16, and `qv` folded in: scores q·kᵀ + qv·vᵀ are one product of wider heads.

    A cast loses nothing, and scales are linear: those of q and k go to q, so keys and values may lie in pages that
    sequences share. As in FlashAttention-3, scales of what is not FP8 count for nothing.

    Args:
        q: (B, Lq, H, D), or packed (Tq, H, D) with cu_seqlens_q.
        k: keys, however they lie.
        v: values.
        qv: like q, of v's head dim; or None.
        descales: of q, k and v: (B, G) each, or None for 1.
        cu_seqlens_q: where sequences begin in packed queries.
    """
    of_q, of_k, of_v = (
        scale if t.dtype in FP8 else None for t, scale in zip((q, k, v), descales, strict=True)
    )
    q = scaled(_wide(q), cu_seqlens_q, of_q, of_k)
    k, v = _wide(k), _wide(v)
    if qv is not None:
        qv = scaled(_wide(qv), cu_seqlens_q, of_q, of_v)
        q, k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    return Plain(q, k, v, of_v)


def scaled(tensor: Tensor, cu_seqlens: Tensor | None, *scales: Tensor | None) -> Tensor:
    """Queries or outputs times scales per sequence and kv head, rounded once."""
    given = [scale.float() for scale in scales if scale is not None]
    if not given:
        return tensor
    factor = math.prod(given[1:], start=given[0])
    factor = factor.repeat_interleave(tensor.shape[-2] // factor.shape[-1], -1)  # [B, H]
    if cu_seqlens is None:
        factor = factor[:, None]
    else:
        factor = factor[sequence_of(cu_seqlens, tensor.shape[0])]
    return (tensor.float() * factor[..., None]).to(tensor.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype in FP8 else tensor


def sequence_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """The sequence to which each of a packed tensor's rows belongs; rows beyond the end count to the last."""
    row = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    found = torch.searchsorted(cu_seqlens, row, right=True) - 1
    return found.clamp(0, max(0, cu_seqlens.shape[0] - 2))
