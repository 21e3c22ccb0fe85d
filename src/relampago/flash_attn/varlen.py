"""The packed ("varlen") functions of flash-attn 2.8, with what FlashAttention-3 adds: `seqused_q` and `seqused_k`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.api import attention_varlen
from relampago.cache import CacheView
from relampago.decode import attention_decode
from relampago.flash_attn.fp8 import descales_of, picked, products, readable, scaled
from relampago.flash_attn.functions import unpacked
from relampago.flash_attn.options import chunk_starts, chunked, options_of, sequence_of
from relampago.flash_attn.probabilities import signed_probabilities_packed
from relampago.integrations.refusals import expect, refuses


@refuses
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
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
    """`flash_attn.flash_attn_varlen_func`.

    Args:
        q: (Tq, H, D).
        k: (Tk, G, D), or pages (pages, page, G, D) with a block_table; any page size.
        v: (Tk, G, E), or pages.
        cu_seqlens_q: int32 (B + 1,).
        cu_seqlens_k: int32 (B + 1,); with a block_table only its differences count.
        max_seqlen_q: the longest sequence of queries.
        max_seqlen_k: the longest sequence of keys.
        dropout_p: as in `flash_attn_func`, like all that follow to return_attn_probs.
        softmax_scale: likewise.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise; LSE is (H, Tq), S_dmask (B, H, max_seqlen_q, max_seqlen_k).
        block_table: int32 (B, most), the pages of each sequence; no gradient then.
        seqused_q: int32 (B,), how many of each sequence's rows count; the others give 0.
        seqused_k: int32 (B,), likewise for keys.
        qv: as in `flash_attn_func`, like all that follow.
        q_descale: likewise.
        k_descale: likewise.
        v_descale: likewise.
        attention_chunk: likewise.
        num_splits: likewise.
        pack_gqa: likewise.
        sm_margin: likewise.
        s_aux: likewise.

    Returns:
        out (Tq, H, E), or (out, softmax_lse, S_dmask).

    Raises:
        Refused: an argument is wrong; a RuntimeError, as flash-attn's.
    """
    paged = block_table is not None
    longest = (_int(max_seqlen_q), _int(max_seqlen_k))
    batch, scales, of_out = cu_seqlens_q.shape[0] - 1, (), None
    descales = descales_of(q, k, v, (q_descale, k_descale, v_descale), batch)
    simple = qv is alibi_slopes is None and not (paged or dropout_p or attention_chunk)
    eights = products(q, k, v, descales, batch, simple)
    if eights is None:
        q, k, v, *scales, of_out = readable(q, k, v, qv, descales, cu_seqlens_q, cached=paged)
    options = options_of(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip
    place = None
    if seqused_q is not None:
        source, cu_seqlens_q, place = compaction(cu_seqlens_q, seqused_q, q.shape[0])
        q = picked(q, source)
    if seqused_k is not None and not paged:
        source, cu_seqlens_k, _ = compaction(cu_seqlens_k, seqused_k, k.shape[0])
        k, v = picked(k, source), picked(v, source)
    lengths = seqused_k if paged and seqused_k is not None else cu_seqlens_k.diff()
    if attention_chunk:
        starts = chunk_starts(longest[0], lengths - cu_seqlens_q.diff(), attention_chunk, q)
        options = chunked(options, attention_chunk, starts)
    dropped = None
    if block_table is not None:
        expect(not dropout_p, "dropout_p is {}; expected 0 with a block_table", dropout_p)
        view = CacheView(k, v, lengths.to(torch.int32), block_table, *scales)
        out, lse = attention_decode(
            q, view, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest[0], return_lse=True, **options
        )
    else:
        dropped = torch.randint(2**62, (), device=q.device) if dropout_p else None
        out, lse = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p=dropout_p, dropout_seed=dropped,
            deterministic=deterministic or None, return_lse=True, **options, **(eights or {}),
        )  # fmt: skip
    out = scaled(out, cu_seqlens_q, of_out)
    if place is not None:
        out, lse = spread(out, lse, place)
    if not return_attn_probs:
        return out
    if dropped is None:
        return out, lse, q.new_empty(0)
    cu = (cu_seqlens_q, cu_seqlens_k)
    return out, lse, signed_probabilities_packed(q, k, cu, longest, options, dropout_p, dropped)


@refuses
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn.flash_attn_varlen_kvpacked_func`.

    Args:
        q: (Tq, H, D).
        kv: (Tk, 2, G, D).
        cu_seqlens_q: as in `flash_attn_varlen_func`, like all that follow.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise.
        dropout_p: likewise.
        softmax_scale: likewise.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        Refused: as `flash_attn_varlen_func`.
    """
    k, v = unpacked(kv, "kv", 2, -3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@refuses
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn.flash_attn_varlen_qkvpacked_func`.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: int32 (B + 1,).
        max_seqlen: the longest sequence.
        dropout_p: as in `flash_attn_varlen_func`, like all that follow.
        softmax_scale: likewise.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        Refused: as `flash_attn_varlen_func`.
    """
    q, k, v = unpacked(qkv, "qkv", 3, -3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def compaction(cu: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """How to pack the first `counts` rows of each sequence anew: where each new row comes from, the new cu_seqlens,
    and the new place of each old row (`total` for one that is not used).

    There are as many new rows as old ones, so that nothing waits for the device; those beyond the new cu_seqlens count
    for nothing.
    """
    expect(
        counts.dtype == torch.int32 and counts.shape == cu[1:].shape,
        "seqused is {} {}; expected ({},) torch.int32",
        tuple(counts.shape),
        counts.dtype,
        cu.shape[0] - 1,
    )
    new_cu = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    row = torch.arange(total, device=cu.device)
    new_of, old_of = sequence_of(new_cu, total), sequence_of(cu, total)
    source = (cu[new_of] + row - new_cu[new_of]).clamp(0, max(0, total - 1))
    within = row - cu[old_of]
    place = torch.where(within < counts[old_of], new_cu[old_of] + within, total)
    return source, new_cu, place


def spread(out: Tensor, lse: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Results of rows packed by `compaction`, where the rows were: those that were not used get 0 and LSE -inf."""
    out = torch.cat([out, out.new_zeros(1, *out.shape[1:])]).index_select(0, place)
    nothing = lse.new_full((lse.shape[0], 1), -torch.inf)
    return out, torch.cat([lse, nothing], 1).index_select(1, place)


def _int(value: Any) -> Any:
    return int(value) if isinstance(value, Tensor) else value
