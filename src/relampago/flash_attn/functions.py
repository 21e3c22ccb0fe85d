"""The dense functions of flash-attn 2.8: same names, order of arguments, defaults and returns.

What FlashAttention-3's interface adds follows as keywords. `num_splits`, `pack_gqa` and `sm_margin` tune kernels and
change no result: they are accepted, and relampago plans for itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.api import attention
from relampago.flash_attn.fp8 import descales_of, products, readable, scaled
from relampago.flash_attn.options import chunk_starts, chunked, options_of
from relampago.flash_attn.probabilities import signed_probabilities
from relampago.integrations.refusals import expect, refuses


@refuses
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
) -> Any:
    """`flash_attn.flash_attn_func`; causal and windows align to the bottom right.

    Args:
        q: (B, Lq, H, D).
        k: (B, Lk, G, D).
        v: (B, Lk, G, E).
        dropout_p: probability of dropping a weight.
        softmax_scale: D ** -0.5 if None.
        causal: no key after the row's own position.
        window_size: (left, right); -1 is unbounded.
        softcap: 0 is none.
        alibi_slopes: (H,) or (B, H), subtracts slope · distance.
        deterministic: bit-for-bit the same gradients in each run.
        return_attn_probs: also return LSE (B, H, Lq) and S_dmask: the weights with the sign of dropout, O(N²), or an
            empty tensor without dropout.
        qv: (B, Lq, H, E), adds qv·vᵀ to the scores.
        q_descale: fp32 (B, G), the scale of FP8 queries; 1 if None.
        k_descale: likewise of keys.
        v_descale: likewise of values.
        attention_chunk: rows see keys of their own chunk of this size only; 0 is off.
        num_splits: accepted.
        pack_gqa: accepted.
        sm_margin: accepted.
        s_aux: (H,), attention sinks.

    Returns:
        out (B, Lq, H, E), or (out, softmax_lse, S_dmask).

    Raises:
        Refused: an argument is wrong; a RuntimeError, as flash-attn's.
    """
    expect(
        q.ndim == 4 and k.ndim == 4,
        "q has {} and k {} dimensions; expected 4: (batch, length, heads, dim)",
        q.ndim,
        k.ndim,
    )
    batch, of_out = q.shape[0], None
    descales = descales_of(q, k, v, (q_descale, k_descale, v_descale), batch)
    simple = qv is alibi_slopes is None and not (dropout_p or attention_chunk)
    eights = products(q, k, v, descales, batch, simple)
    if eights is None:
        q, k, v, *_, of_out = readable(q, k, v, qv, descales)
    options = options_of(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
    )
    if attention_chunk:
        offset = k.shape[1] - q.shape[1]
        starts = chunk_starts(q.shape[1], offset, attention_chunk, q)
        options = chunked(options, attention_chunk, starts)
    shown = return_attn_probs and dropout_p > 0
    seed = torch.randint(2**62, (), device=q.device) if shown else None
    out, lse = attention(
        q, k, v, dropout_p=dropout_p, dropout_seed=seed, deterministic=deterministic or None,
        return_lse=True, **options, **(eights or {}),
    )  # fmt: skip
    out = scaled(out, None, of_out)
    if not return_attn_probs:
        return out
    if seed is None:
        return out, lse, q.new_empty(0)
    return out, lse, signed_probabilities(q, k, options, dropout_p, seed)


@refuses
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn.flash_attn_kvpacked_func`: keys and values in one tensor; gradients come back in one.

    Args:
        q: (B, Lq, H, D).
        kv: (B, Lk, 2, G, D).
        dropout_p: as in `flash_attn_func`, like all that follow.
        softmax_scale: likewise.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise.

    Returns:
        As `flash_attn_func`.

    Raises:
        Refused: as `flash_attn_func`.
    """
    k, v = unpacked(kv, "kv", 2, -3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@refuses
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn.flash_attn_qkvpacked_func`: queries, keys and values in one tensor.

    Args:
        qkv: (B, L, 3, H, D).
        dropout_p: as in `flash_attn_func`, like all that follow.
        softmax_scale: likewise.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise.

    Returns:
        As `flash_attn_func`.

    Raises:
        Refused: as `flash_attn_func`.
    """
    q, k, v = unpacked(qkv, "qkv", 3, -3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def unpacked(tensor: Tensor, name: str, parts: int, axis: int) -> tuple[Tensor, ...]:
    """The parts of a packed tensor, as views."""
    shape = tuple(tensor.shape)
    expect(
        tensor.ndim >= 4 and shape[axis] == parts,
        "{} has shape {}; expected {} before (heads, dim)",
        name,
        shape,
        parts,
    )
    return tensor.unbind(axis)
