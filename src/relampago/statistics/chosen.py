"""Chosen rows: their weights, and the keys they weigh most. Dense, but for these rows only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from relampago.backends import reference
from relampago.errors import InvalidInput, Unsupported
from relampago.op import arrays_of
from relampago.problem import Arrays, accumulate_dtype
from relampago.statistics.call import lower

CELLS = 2**23  # scores held at a time


def weights(
    q: Tensor,
    k: Tensor,
    rows: Tensor | Sequence[int],
    *,
    lse: Tensor | None = None,
    offset: int | None = None,
    **options: Any,
) -> Tensor:
    """The weights of some rows over all keys: those rows of the N×N matrix. No gradient.

    Args:
        q: queries (B, Lq, H, D), or packed (Tq, H, D) with cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
        k: keys (B, Lk, G, D) or (Tk, G, D); may be a part of all keys.
        rows: which: ints (R,), or (B, R) where sequences differ; negative ones count from the end. Packed: rows of the
            packed q, (R,), not negative.
        lse: as in `column_sums`.
        offset: as in `partial`.
        options: as in `rows`. The backend is not asked: a few rows are plain products, the same on every device.

    Returns:
        (B, H, R, Lk); packed (H, R, max_seqlen_k), 0 beyond a sequence's own keys. fp32 (fp64 for fp64 input).

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    x, rows, found = _open(q, k, rows, lse, offset, options)
    with torch.no_grad():
        p = q.new_zeros((*_lead(x, rows), x.len_k), dtype=accumulate_dtype(q.dtype))
        for b, at, part, _ in _parts(x, rows, found):
            (p if x.cu_q is not None else p[b])[:, at, : part.shape[-1]] = part
    return p


def top_keys(
    q: Tensor,
    k: Tensor,
    rows: Tensor | Sequence[int],
    n: int,
    *,
    lse: Tensor | None = None,
    offset: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The n keys that some rows weigh most, heaviest first, in O(N) memory. No gradient.

    Args:
        q: as in `weights`.
        k: as in `weights`; may be a part of all keys: shards' answers join by a top n of their own.
        rows: as in `weights`.
        n: how many keys.
        lse: as in `column_sums`; with it, shards' weights compare.
        offset: as in `partial`.
        options: as in `weights`.

    Returns:
        (weights, keys), each (B, H, R, n), packed (H, R, n). Keys count within their sequence; where a row sees fewer
        than n keys the rest have weight 0 and key -1.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInput(f"n is {n!r}; expected an int of at least 1")
    x, rows, found = _open(q, k, rows, lse, offset, options)
    with torch.no_grad():
        shape = (*_lead(x, rows), n)
        heaviest = q.new_zeros(shape, dtype=accumulate_dtype(q.dtype))
        keys = torch.full(shape, -1, device=q.device)
        for b, at, part, scores in _parts(x, rows, found):
            most = min(n, part.shape[-1])
            best, index = scores.topk(most, -1)
            to_weights, to_keys = (t if x.cu_q is not None else t[b] for t in (heaviest, keys))
            to_weights[:, at, :most] = part.gather(-1, index)
            to_keys[:, at, :most] = torch.where(best == -torch.inf, -1, index)
    return heaviest, keys


def _open(
    q: Tensor, k: Tensor, rows: Any, lse: Tensor | None, offset: int | None, options: dict[str, Any]
) -> tuple[Arrays, Tensor, Tensor | None]:
    """The call's arrays, and its rows as checked int64."""
    if torch.compiler.is_compiling():
        raise Unsupported("chosen rows inside a graph of torch.compile; their values are read")
    x = arrays_of(lower(q, k, options, offset=offset, lse=lse))
    packed = x.cu_q is not None
    rows = torch.as_tensor(rows, device=q.device)
    limit = q.shape[0] if packed else q.shape[1]
    shapes = "(R,)" if packed else f"(R,) or ({q.shape[0]}, R)"
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise InvalidInput(f"rows has dtype {rows.dtype}; expected ints")
    if rows.ndim != 1 and (packed or rows.ndim != 2 or rows.shape[0] != q.shape[0]):
        raise InvalidInput(f"rows has shape {tuple(rows.shape)}; expected {shapes}")
    least = 0 if packed else -limit
    if rows.numel() and not (least <= int(rows.min()) and int(rows.max()) < limit):
        raise InvalidInput(
            f"rows reaches from {int(rows.min())} to {int(rows.max())}; expected {least} to {limit - 1}"
        )
    rows = rows.long()
    return x, torch.where(rows < 0, rows + limit, rows), lse


def _lead(x: Arrays, rows: Tensor) -> tuple[int, ...]:
    heads = x.q.shape[-2]
    return (heads, rows.shape[0]) if x.cu_q is not None else (x.batch, heads, rows.shape[-1])


def _parts(
    x: Arrays, rows: Tensor, lse: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Some chosen rows at a time: their sequence, places among all [r], weights and scores [H, r, keys]."""
    dtype = accumulate_dtype(x.q.dtype)
    for b in range(x.batch):
        if x.cu_q is None:
            chosen = rows if rows.ndim == 1 else rows[b]
            places = torch.arange(chosen.shape[0], device=rows.device)
        else:
            first, end = int(x.cu_q[b]), int(x.cu_q[b + 1])
            places = ((rows >= first) & (rows < end)).nonzero().flatten()
            chosen = rows[places] - first
        step = max(1, CELLS // max(1, x.q.shape[-2] * x.lengths(b)[1]))
        for at, part in zip(places.split(step), chosen.split(step), strict=True):
            one = reference.Sequence(x, b, dtype, part)
            scores = one.scores()[-1]
            if lse is None:
                total = one.lse(scores)
            else:
                whole = lse[b] if x.cu_q is None else lse[:, x.rows(b)]
                total = whole[:, part].to(dtype)
            yield b, at, one.shares(scores, total), scores
