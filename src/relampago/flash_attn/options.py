"""flash-attn's way to say things, as `relampago.attention` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.integrations.refusals import Refused, expect
from relampago.mods import ScoreMod, zero


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
    expect(
        softcap is None or isinstance(softcap, int | float),
        "softcap is {!r}; expected a number, 0 for none",
        softcap,
    )
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
    form = "window_size is {!r}; expected a pair of ints (left, right), -1 for unbounded"
    expect(isinstance(window_size, tuple | list) and len(window_size) == 2, form, window_size)
    try:
        left, right = (None if side is None or int(side) < 0 else int(side) for side in window_size)
    except (TypeError, ValueError):
        raise Refused(form.format(window_size)) from None
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
    expect(
        isinstance(chunk, int) and chunk > 0, "attention_chunk is {!r}; expected an int >= 0", chunk
    )
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


def sequence_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """The sequence to which each of a packed tensor's rows belongs; rows beyond the end count to the last."""
    row = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    found = torch.searchsorted(cu_seqlens, row, right=True) - 1
    return found.clamp(0, max(0, cu_seqlens.shape[0] - 2))
