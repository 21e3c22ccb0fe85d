"""Cutting a block of queries against a block of keys into calls of `partial`, from positions alone.

Both blocks ascend in position, so the keys that a row sees are one run of the block's own indices too, whatever the
layout. Rows and keys with nothing to do fall off at the edges; what remains is everything, a band (which kernels
skip tiles by), or else a table of one run per row. No strategy and no layout appears here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relampago.distributed.sight import Sight
from relampago.masks.spec import Runs


@dataclass(frozen=True, eq=False)
class Piece:
    """One call: rows [rows.start, rows.stop) of the queries, keys [keys.start, keys.stop) of a block.

    Args:
        rows: which rows, as a slice.
        keys: which keys, as a slice.
        pairs: visible pairs, for one head of one sequence (a mean over sequences that differ).
        offset: position of the first row minus that of the first key, in the block's own indices.
        left: how many keys before its own position a row sees; None for all.
        causal: whether keys after its own position are hidden.
        table: (start, end), int32 (1 or B, rows): the run of keys each row sees; instead of the band.
        there: the table as a mask, on the devices it has been used on.
    """

    rows: slice
    keys: slice
    pairs: float
    offset: int = 0
    left: int | None = None
    causal: bool = False
    table: tuple[Tensor, Tensor] | None = None
    there: dict[torch.device, Runs] = field(default_factory=dict)

    def options(self, device: torch.device) -> dict[str, Any]:
        """What `partial` takes beside the tensors."""
        if self.table is not None:
            if device not in self.there:  # once: a copy to a device waits for it
                self.there[device] = Runs(self.table[0].to(device), self.table[1].to(device))
            return {"offset": 0, "mask": self.there[device]}
        window = None if self.left is None else (self.left, None)
        return {"offset": self.offset, "causal": self.causal, "window": window}


def cut(queries: Tensor, keys: Tensor, sight: Sight) -> tuple[Piece, ...]:
    """The calls for queries at some positions (ascending) against keys at others. They share no row."""
    if not queries.numel() or not keys.numel():
        return ()
    start, end = (torch.searchsorted(keys, edge) for edge in sight.runs(queries))
    whole = _piece(start, end, 0)
    if whole is None or whole.table is None:
        return () if whole is None else (whole,)
    runs = [
        _piece(start[:, a:b], end[:, a:b], a) for a, b in spans(queries) if _live(start, end, a, b)
    ]
    bands = [piece for piece in runs if piece is not None and piece.table is None]
    return tuple(bands) if len(bands) == len(runs) <= 4 else (whole,)


def reach(positions: Tensor, sight: Sight) -> Tensor:
    """Intervals (n, 2) of positions that hold all keys which rows at these positions see."""
    start, end = sight.runs(positions)
    start = torch.where(start < end, start, sight.length).amin(0)
    end = end.amax(0)
    # Rows whose runs touch or overlap are one interval: both ends mostly ascend along positions.
    new = torch.ones_like(start, dtype=torch.bool)
    new[1:] = start[1:] > torch.cummax(end, 0).values[:-1]
    group = new.cumsum(0) - 1
    count = int(group[-1]) + 1 if group.numel() else 0
    low = start.new_full((count,), sight.length).scatter_reduce(0, group, start, "amin")
    high = end.new_zeros(count).scatter_reduce(0, group, end, "amax")
    return torch.stack([low, high], 1)


def hull(intervals: Tensor, keys: Tensor) -> tuple[int, int] | None:
    """The smallest slice of a block of keys (ascending positions) that holds all that lies in the intervals."""
    edges = torch.searchsorted(keys, intervals)
    edges = edges[edges[:, 0] < edges[:, 1]]
    return (int(edges[:, 0].min()), int(edges[:, 1].max())) if edges.numel() else None


def spans(positions: Tensor) -> list[tuple[int, int]]:
    """Index ranges of equally spaced positions."""
    if positions.numel() < 3:
        return [(0, positions.numel())]
    step = positions.diff()
    breaks = (step != step.mode().values).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), positions.numel()]
    return list(itertools.pairwise(edges))


def _live(start: Tensor, end: Tensor, a: int, b: int) -> bool:
    return bool((start[:, a:b] < end[:, a:b]).any())


def _piece(start: Tensor, end: Tensor, first: int) -> Piece | None:
    """The call for rows that see keys [start, end), (B or 1, rows), trimmed; None if there is nothing to see."""
    seen = start < end
    rows = seen.any(0).nonzero().flatten()
    if not rows.numel():
        return None
    r0, r1 = int(rows[0]), int(rows[-1]) + 1
    k0, k1 = int(start[seen].min()), int(end[seen].max())
    start, end, seen = start[:, r0:r1], end[:, r0:r1], seen[:, r0:r1]
    pairs = float((end - start).clamp(min=0).sum()) / start.shape[0]
    start = torch.where(seen, start - k0, 0)
    end = torch.where(seen, end - k0, 0)
    rows, keys = slice(first + r0, first + r1), slice(k0, k1)
    band = _band(start[0], end[0], k1 - k0) if start.shape[0] == 1 else None
    if band is None:
        return Piece(rows, keys, pairs, table=(start.int(), end.int()))
    offset, left, causal = band
    return Piece(rows, keys, pairs, offset, left, causal)


def _band(start: Tensor, end: Tensor, n: int) -> tuple[int, int | None, bool] | None:
    """(offset, left, causal) if the rows' runs are a band, clipped to n keys."""
    row = torch.arange(start.numel())
    upper = _shift(end, row, n)
    lower = _shift(start, row, n)
    if upper is False or lower is False:
        return None
    if upper is None:
        return (0, None, False) if lower is None else (lower, 0, False)
    if lower is None:
        return upper - 1, None, True
    left = upper - 1 - lower
    return (upper - 1, left, True) if left >= 0 else None


def _shift(edge: Tensor, row: Tensor, n: int) -> int | bool | None:
    """c if edge = clamp(row + c, 0, n); None if it never cuts anything off; False if it is no such line."""
    first = int(edge[0])
    if bool((edge == first).all()) and first in (0, n):
        return None
    inner = ((edge > 0) & (edge < n)).nonzero().flatten()
    at = int(inner[0]) if inner.numel() else int((edge == n).nonzero().flatten()[0])
    c = int(edge[at]) - at
    return c if bool((edge == (row + c).clamp(0, n)).all()) else False
