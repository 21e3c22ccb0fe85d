"""attention_decode: few queries against a long cache, as generation needs it (flash decoding)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago import validate
from relampago.api import Options, prepare
from relampago.cache import KVCache
from relampago.op import forward_op


def attention_decode(
    q: Tensor,
    cache: KVCache,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Append new keys and values to a cache, then attend to all that it holds. No gradient.

    The work is split over keys where there are too few queries to fill the machine, and GQA groups share a tile; how
    many splits is chosen from shapes, never from lengths, so that nothing waits for the device.

    Args:
        q: (B, Lq, H, D); row i of sequence b stands at position lengths[b] - Lq + i, after appending.
        cache: a `KVCache` or `PagedKVCache` of the same batch.
        k_new: (B, n, G, D), appended in place first; or None.
        v_new: (B, n, G, E).
        counts: int32 (B,): how many of the n each sequence gets; all if None.
        causal: as in `attention`, aligned to each sequence's last key.
        return_lse: also return LSE (B, H, Lq).
        options: window, mask (Causal, Window, an int Prefix), scale, softcap, alibi_slopes, score_mod, sinks, backend.

    Returns:
        out (B, Lq, H, E), or (out, lse).

    Raises:
        InvalidInput: an argument is wrong, or the cache is full; nothing was appended then.
        Unsupported: no backend can run the call.
    """
    validate.require(
        [
            ("cache", ("is a {}", type(cache).__name__), "a KVCache or PagedKVCache", isinstance(cache, KVCache)),
            ("v_new", "is given without k_new, or k_new without it", "both or neither",
             (k_new is None) == (v_new is None)),
            ("options", "hold a bias, dropout or gradient", "none of them in decoding",
             not (set(options) & {"bias", "dropout_p", "dropout_seed", "deterministic"})),
        ]
    )  # fmt: skip
    call = prepare(q, cache.k, cache.v, Options(causal=causal, **options), cache=cache)
    if k_new is not None and v_new is not None:
        cache.append(k_new, v_new, counts)
    with torch.no_grad():
        out, lse = forward_op(*call)
    return (out, lse) if return_lse else out
