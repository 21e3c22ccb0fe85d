"""FlashAttention-3's own module, `flash_attn_interface`: the same functions with its order of arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.flash_attn import functions, kvcache, varlen
from relampago.flash_attn.functions import unpacked
from relampago.integrations.refusals import expect, refuses
from relampago.merge import merge


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_interface.flash_attn_func`: see `relampago.flash_attn.flash_attn_func`.

    Returns:
        out (B, Lq, H, E), or (out, softmax_lse).
    """
    found = functions.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs,
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    return found[:2] if return_attn_probs else found


@refuses
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_interface.flash_attn_qkvpacked_func`; qkv (B, L, 3, H, D), or (B, L, H + 2·G, D) with num_heads_q.

    Returns:
        out (B, L, H, E), or (out, softmax_lse).

    Raises:
        Refused: an argument is wrong.
    """
    if qkv.ndim == 5:
        q, k, v = unpacked(qkv, "qkv", 3, -3)
    else:
        expect(
            num_heads_q is not None,
            "num_heads_q is None; expected an int, with qkv of 4 dimensions",
        )
        assert num_heads_q is not None
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_interface.flash_attn_varlen_func`: see `relampago.flash_attn.flash_attn_varlen_func`.

    Returns:
        out (Tq, H, E), or (out, softmax_lse).
    """
    found = varlen.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
        window_size, softcap, None, deterministic, return_attn_probs, seqused_q=seqused_q, seqused_k=seqused_k,
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    return found[:2] if return_attn_probs else found


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn_interface.flash_attn_with_kvcache`: see `relampago.flash_attn.flash_attn_with_kvcache`."""
    return kvcache.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, None,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse,
        qv=qv, page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attentions over disjoint parts of the keys.

    Args:
        out_partial: (parts, B, L, H, E), or packed (parts, T, H, E).
        lse_partial: (parts, B, L, H), or (parts, T, H).
        out: where to write the result.
        out_dtype: its dtype; that of out_partial if None.

    Returns:
        (out (B, L, H, E), LSE (B, L, H)).
    """
    rows_last = lse_partial.transpose(-1, -2)
    merged, lse = merge(*zip(out_partial, rows_last, strict=True))
    merged = merged.to(out_dtype or out_partial.dtype)
    return merged if out is None else out.copy_(merged), lse.transpose(-1, -2)
