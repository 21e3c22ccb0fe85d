"""attention_decode: few queries against a long cache, as generation needs it (flash decoding)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago import validate
from relampago.cache import KVCache
from relampago.lower import prepare
from relampago.op import forward, forward_op
from relampago.options import Options, Packing
from relampago.quant import E4M3
from relampago.warm import unwatched


def attention_decode(
    q: Tensor,
    cache: KVCache,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Append new keys and values to a cache, then attend to all that it holds. No gradient.

    The work is split over keys where there are too few queries to fill the machine, and GQA groups share a tile; how
    many splits is chosen from shapes, never from lengths, so that nothing waits for the device.

    Args:
        q: (B, Lq, H, D); row i of sequence b stands at position lengths[b] - Lq + i, after appending. Packed
            (Tq, H, D) with cu_seqlens_q: prompts and single tokens in one call.
        cache: a `KVCache`, `PagedKVCache` or `CacheView` of the same batch; its keys and values may be float8_e4m3fn.
        k_new: (B, n, G, D), appended in place first; or None.
        v_new: (B, n, G, E).
        counts: int32 (B,): how many of the n each sequence gets; all if None.
        cu_seqlens_q: int32 (B + 1,), where each sequence's rows begin in a packed q.
        max_seqlen_q: the longest sequence of queries, with cu_seqlens_q.
        causal: as in `attention`, aligned to each sequence's last key.
        return_lse: also return LSE (B, H, Lq), or (H, Tq).
        options: window, mask (Causal, Window, an int Prefix), scale, softcap, alibi_slopes, score_mod, sinks,
            batch_invariant, backend.

    Returns:
        out (B, Lq, H, E) or (Tq, H, E), or (out, lse).

    Raises:
        InvalidInput: an argument is wrong, or the cache is full; nothing was appended then.
        Unsupported: no backend can run the call.
    """
    validate.require(
        [
            ("cache", ("is a {}", type(cache).__name__), "a KVCache or PagedKVCache", isinstance(cache, KVCache)),
            ("v_new", "is given without k_new, or k_new without it", "both or neither",
             (k_new is None) == (v_new is None)),
            ("max_seqlen_q", "is given without cu_seqlens_q, or cu_seqlens_q without it", "both or neither",
             (cu_seqlens_q is None) == (max_seqlen_q is None)),
            ("options", "hold a bias, dropout or gradient", "none of them in decoding",
             not (set(options) & {"bias", "dropout_p", "dropout_seed", "deterministic"})),
            ("options", "hold precision or scales", "a cache of float8_e4m3fn, which has them",
             not (set(options) & {"precision", "q_descale", "k_descale", "v_descale"})),
            ("q", "has dtype torch.float8_e4m3fn", "fp16, bf16 or fp32 in decoding", q.dtype != E4M3),
        ]
    )  # fmt: skip
    packing = None
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        packing = Packing(cu_seqlens_q, None, max_seqlen_q)
    call = prepare(
        q, cache.k, cache.v, Options(causal=causal, **cache.descales, **options), packing=packing,
        cache=cache,
    )  # fmt: skip
    if k_new is not None and v_new is not None:
        cache.append(k_new, v_new, counts)
    with torch.no_grad():
        out, lse = forward(*call) if unwatched() else forward_op(*call)
    return (out, lse) if return_lse else out
