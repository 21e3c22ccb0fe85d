"""Which keys a query row sees: the only statement of every band mask.

`visible` decides one pair and uses operators only, so the same function masks torch tensors and, under
`triton.jit` or `gluon.jit`, tiles on a GPU. The ranges bound loops; tests compare them with `visible` by
brute force, so skipping and masking cannot disagree.

Row q stands at position q + offset among the keys. It sees key k when

    -left <= k - (q + offset) <= right,   or k < prefix instead of the right bound,
    and row_start[q] <= k < row_end[q]    where those tables exist.

None means unbounded (or absent).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """Every mask but the block-sparse one, as one run of keys per query row."""

    offset: Any = 0
    left: Any = None
    right: Any = None
    prefix: Any = None
    row_start: Tensor | None = None  # int32 (B or 1, Lq)
    row_end: Tensor | None = None

    @property
    def bounded(self) -> bool:
        """Whether any row may see fewer than all keys."""
        sides = (self.left, self.right, self.row_start, self.row_end)
        return any(side is not None for side in sides)


def visible(q, k, offset, left, right, prefix):
    """Whether row q sees key k, tables aside (they are one more comparison on k)."""
    seen = k >= 0
    if (
        right is not None
    ):  # bounds are added to q, which is small; a causal tile costs one comparison
        seen = k <= q + (offset + right)
        if prefix is not None:
            seen = seen | (k < prefix)
    if left is not None:
        near = k >= q + (offset - left)
        seen = near if right is None else seen & near
    return seen


def run_of(q, len_k, offset, left, right, prefix):
    """Keys [start, end) that row q sees, tables aside: `visible` as a run; a start below 0 is one of 0."""
    start = q * 0
    end = start + len_k
    if left is not None:
        start = q + (offset - left)
    if right is not None:
        stop = q + (offset + right + 1)
        if prefix is not None:
            stop = stop + (prefix - stop) * (stop < prefix)
        end = end + (stop - end) * (stop < end)
    return start, end


def key_range(q_first, q_last, len_k, offset, left, right, prefix):
    """Keys [start, end) outside of which no row in q_first..q_last sees anything."""
    start = 0
    end = len_k
    if left is not None:
        start = max(start, q_first + offset - left)
    if right is not None:
        stop = q_last + offset + right + 1
        if prefix is not None:
            stop = max(stop, prefix)
        end = min(end, stop)
    return start, end


def full_range(q_first, q_last, len_k, offset, left, right, prefix):
    """Keys [start, end) that every row in q_first..q_last sees: no mask is needed there."""
    start = 0
    end = len_k
    if left is not None:
        start = max(start, q_last + offset - left)
    if right is not None:
        stop = q_first + offset + right + 1
        if prefix is not None:
            stop = max(stop, prefix)
        end = min(end, stop)
    return start, end


def query_range(k_first, k_last, len_q, offset, left, right, prefix):
    """Rows [start, end) outside of which no row sees any of the keys k_first..k_last."""
    start = 0
    end = len_q
    if left is not None:
        end = min(end, k_last - offset + left + 1)
    if right is not None:
        first = k_first - offset - right
        if prefix is not None:  # noqa: SIM102 - a constant in kernels, the inner test is not
            if k_first < prefix:
                first = first * 0
        start = max(start, first)
    return start, end
