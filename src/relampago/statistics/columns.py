"""What each key receives: the sums of the weights over rows, as caches that keep heavy hitters need them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago import measure
from relampago.derivatives import run
from relampago.errors import InvalidInput
from relampago.statistics.call import lower


def column_sums(
    q: Tensor,
    k: Tensor,
    *,
    last: int | None = None,
    lse: Tensor | None = None,
    offset: int | None = None,
    **options: Any,
) -> Tensor:
    """The attention that each key receives: Σ of its weights over all rows, or over each sequence's last ones.

    Over all rows it is the score of H2O (arXiv 2306.14048), over the last w that of SnapKV (arXiv 2404.14469) before
    its pooling. O(N) memory: the weights are computed again from LSE, tile by tile. No gradient.

    Args:
        q: queries (B, Lq, H, D), or packed (Tq, H, D) with cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
        k: keys (B, Lk, G, D) or (Tk, G, D); may be a part of all keys.
        last: how many rows count, from each sequence's end; all if None.
        lse: LSE of these rows over all keys, (B, H, Lq) or (H, Tq), as `attention(return_lse=True)` gives it; spares a
            pass, and is needed where k is a part. None: from k alone.
        offset: as in `partial`.
        options: as in `rows`. A sink takes its share and is no key.

    Returns:
        (B, H, Lk), or (H, Tk); fp32 (fp64 for fp64 input). Sums over parts of the rows add up; over all rows and keys
        of a head they come to Lq, less what sinks take and rows that see nothing.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
        Unsupported: no backend can run the call.
    """
    call = lower(q, k, options, offset=offset, lse=lse)
    whole = call.sizes[1]
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
        raise InvalidInput(f"last is {last!r}; expected an int of at least 1, or None")
    last = whole if last is None else last
    if lse is None and last < whole:
        lse = measure.row_statistics(last, *call).lse
    elif lse is None:
        with torch.no_grad():
            _, lse = run(*call)  # one column of values costs less than an entropy
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return measure.column_sums(lse.to(wide), last, *call)
