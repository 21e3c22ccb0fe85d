"""attention_decode: few queries against a long cache, as generation needs it (flash decoding)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relampago import validate, warm
from relampago.cache import KVCache
from relampago.lower import Call, autocast, prepare
from relampago.op import forward, forward_op
from relampago.options import Options, Packing, plain
from relampago.quant import E4M3


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

    def validated() -> Call:
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
                ("q", "has dtype torch.float8_e4m3fn", "fp16, bf16 or fp32 in decoding",
                 getattr(q, "dtype", None) != E4M3),
            ]
        )  # fmt: skip
        packing = None
        if cu_seqlens_q is not None and max_seqlen_q is not None:
            packing = Packing(cu_seqlens_q, None, max_seqlen_q)
        said = Options(causal=causal, **cache.descales, **options)
        return prepare(q, cache.k, cache.v, said, packing=packing, cache=cache)

    attend = _short(
        q, cache, cu_seqlens_q, causal, options,
        (k_new is None, v_new is None, max_seqlen_q, type(max_seqlen_q)), validated,
    ) or _long(validated())  # fmt: skip
    if k_new is not None and v_new is not None:
        if cache.k.dtype not in (getattr(k_new, "dtype", None), E4M3):
            _, k_new, v_new = autocast(q, k_new, v_new)
        cache.append(k_new, v_new, counts)
    out, lse = attend()
    return (out, lse) if return_lse else out


Attend = Callable[[], tuple[Tensor, Tensor]]


def _long(call: Call) -> Attend:
    """What attends by the op."""

    def attend() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return forward(*call) if warm.unwatched() else forward_op(*call)

    return attend


def _short(
    q: Tensor, cache: KVCache, cu_q: Tensor | None, causal: bool, options: dict[str, Any],
    more: tuple[Any, ...], validated: Callable[[], Call],
) -> Attend | None:  # fmt: skip
    """What attends as a like call did, see `warm`; None if the call must go the long way.

    The names of the options and `more` are what the call is known by beside its tensors, so that what was validated
    once holds for all that are alike.
    """
    if torch.compiler.is_compiling() or not isinstance(cache, KVCache):
        return None
    o = Options(causal=causal, **options)
    said = plain(o)
    if said is None:
        return None
    given = (
        q, cache.k, cache.v, o.sinks, cu_q, None, cache.lengths, cache.page_table,
        *(None if t is None else t.expand(cache.batch, -1)[..., None] for t in (cache.k_scale, cache.v_scale)),
    )  # fmt: skip
    key = warm.key_of(given, (cache.longest, *more, *options, *said))
    if key is None:
        return None
    known = warm.known_of(key, given, validated)
    tensors = [t for t in given if t is not None]

    def attend() -> tuple[Tensor, Tensor]:
        if not warm.recorded(tensors):
            return known(tensors)
        with torch.no_grad():
            return known(tensors)

    return attend
