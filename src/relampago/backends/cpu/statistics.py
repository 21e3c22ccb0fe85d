"""Statistics of the weights, tile by tile: what each row's softmax is like, and what each key receives.

Rows: the forward's loop without values. Columns: the weights again from LSE, as in the backward, summed over rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relampago.backends.cpu import threads
from relampago.backends.cpu.backward import ranges, renormalised
from relampago.backends.cpu.forward import finite, over_tiles, raise_to, rows_per_tile, worth_fast
from relampago.backends.cpu.precision import fast_fp32
from relampago.backends.cpu.tables import Task
from relampago.backends.cpu.tile import LOG2E, Slab, Tile, scratch
from relampago.plan import Plan
from relampago.problem import Arrays, RowStatistics, accumulate_dtype, empty_lse

LEAST = -1.0e4  # whose power is 0, and whose product with 0 is 0: stands for -inf in a weighted sum


def row_statistics(x: Arrays, plan: Plan, last: int) -> RowStatistics:
    """LSE and entropy of the last rows of each sequence, and each head's largest score, as softmax reads it."""
    lse = empty_lse(x)
    found = RowStatistics(
        lse, torch.zeros_like(lse), lse.new_full((x.batch, x.q.shape[-2]), -math.inf)
    )

    def describe(tile: Tile) -> Tensor | None:
        first = tile.slab.q.shape[0] - last
        if tile.p1 <= first:
            return None
        if x.block is None and tile.p0 < first:
            tile = Tile(tile.slab, first, tile.p1)
        return describe_rows(tile, plan, found)

    tops = over_tiles(x, plan, Slab, describe)
    raise_to(found.max_logits, tops, x.group)
    return found


def describe_rows(tile: Tile, plan: Plan, found: RowStatistics) -> Tensor | None:
    """One tile's LSE and entropy, written to `found`; its heads' largest scores [g, R] are returned.

    With u = s - m, l = Σ exp(u) and t = Σ exp(u) u, a row's entropy is log l - t / l: both terms are >= 0, and no
    digits cancel, however large the scores are.
    """
    slab = tile.slab
    q = tile.queries()
    m = l = t = None
    for panel in tile.panels(plan.block_k):
        s = tile.scores(q, slab.take("k", slab.k, panel), panel)
        m_new = s.amax(-1, keepdim=True)
        m_new = m_new if m is None else torch.maximum(m, m_new)
        u = s.sub_(finite(m_new)).clamp_(min=LEAST)
        p = tile.power_(scratch("weights", u.shape, u.dtype).copy_(u))
        if m is not None and l is not None and t is not None:
            moved(tile, m, m_new, l, t)
        total, weighted = p.sum(-1, keepdim=True), p.mul_(u).sum(-1, keepdim=True)
        l = total if l is None else l.add_(total)
        t = weighted if t is None else t.add_(weighted)
        m = m_new
    top = None if m is None else tile.natural(m.view(tile.shape).amax(1))
    if (sink := tile.sink()) is not None:
        m_new = sink if m is None else torch.maximum(m, sink)
        if m is None or l is None or t is None:
            l, t = torch.zeros_like(sink), torch.zeros_like(sink)
        else:
            moved(tile, m, m_new, l, t)
        u = (sink - finite(m_new)).clamp_(min=LEAST)
        weight = tile.power_(u.clone())
        l, t, m = l.add_(weight), t.add_(weight * u), m_new
    if m is None or l is None or t is None:
        return None  # no key in reach
    nothing = m == -math.inf
    l = l.masked_fill_(nothing, 1.0)
    for source, target in (
        (tile.natural(m) + l.log(), found.lse),
        (l.log() - tile.natural(t / l).masked_fill(nothing, 0.0), found.entropy),
    ):
        view = slab.lse_of(target)[:, :, tile.p0 : tile.p1]
        view.copy_(source.view(tile.shape).transpose(1, 2))
    return top


def moved(tile: Tile, m: Tensor, m_new: Tensor, l: Tensor, t: Tensor) -> None:
    """Bring l and t to a new maximum, in place: Σ exp(u + d) (u + d), with d = m - m_new."""
    d = (m - finite(m_new)).clamp_(min=LEAST)
    t.addcmul_(l, d)
    alpha = tile.power_(d)
    l.mul_(alpha)
    t.mul_(alpha)


def column_sums(x: Arrays, plan: Plan, lse: Tensor, last: int) -> Tensor:
    """The weights that each key receives from the last rows of its sequence, (B, H, Lk) or (H, Tk)."""
    dtype = accumulate_dtype(x.q.dtype)
    length, heads = x.k.shape[-3], x.q.shape[-2]
    shape = (x.batch, heads, length) if x.cu_k is None else (heads, length)
    whole = [h for b in range(x.batch) for h in ranges(x, b, plan)]
    parts = max(1, -(-torch.get_num_threads() // max(1, len(whole))))
    sums = x.q.new_zeros((parts, *shape), dtype=dtype)
    with fast_fp32(worth_fast(x)):
        threads.run(
            lambda share: receive(x, plan, share, parts, lse, last, sums[share.part]),
            [Task(h, part) for h in whole for part in range(parts)],
        )
    return sums.sum(0) if parts > 1 else sums[0]


def receive(
    x: Arrays, plan: Plan, share: Task, parts: int, lse: Tensor, last: int, sums: Tensor
) -> None:
    """Add the weights of a share's tiles to its heads' columns."""
    whole = share.heads
    per_head = x.blocks is not None and x.blocks.count.shape[1] > 1
    groups = [whole._replace(r0=r, r1=r + 1) for r in range(x.group)] if per_head else [whole]
    for heads in groups:
        slab = Slab(x, heads)
        columns = sums[heads.b] if x.cu_k is None else sums[(slice(None), *slab.cols)]
        columns = columns.unflatten(0, (-1, x.group))[heads.g0 : heads.g1, heads.r0 : heads.r1]
        rows, step = slab.q.shape[0], rows_per_tile(x, heads, plan)
        first = max(0, rows - last)
        # a tile of the BlockSparse begins where its list says: rows before `first` get no weight there
        begin = first if x.block is None else first // step * step
        for i, p0 in enumerate(range(begin, rows, step)):
            if i % parts == share.part:
                add_weights(Tile(slab, p0, min(p0 + step, rows)), plan, lse, first, columns)


def add_weights(tile: Tile, plan: Plan, lse: Tensor, first: int, columns: Tensor) -> None:
    """Add one tile's weights to columns [g, R, Lk]."""
    slab = tile.slab
    q = tile.queries()
    total = tile.pack_lse(slab.lse_of(lse))  # [g, l·R, 1]
    shift = torch.where(total == -math.inf, math.inf, total) * (LOG2E if slab.base2 else 1.0)
    normaliser = renormalised(tile, plan, q, shift)
    if first > tile.p0:
        shift.view(*tile.shape, 1)[:, : first - tile.p0] = math.inf
    for panel in tile.panels(plan.block_k):
        s = tile.scores(q, slab.take("k", slab.k, panel), panel)
        p = tile.power_(s.sub_(shift))
        if normaliser is not None:
            p.mul_(normaliser)
        received = p.view(*tile.shape, panel.size).sum(1)  # [g, R, n]
        if isinstance(panel.keys, slice):
            columns[..., panel.keys] += received
        else:
            columns.index_add_(2, panel.keys, received)
