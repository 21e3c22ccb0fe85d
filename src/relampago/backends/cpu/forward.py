"""The forward: FlashAttention-2, Algorithm 1 (arXiv 2307.08691), one tile of queries at a time.

The papers' letters: m running maximum, l running sum, acc unnormalised output, p weights, s scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.backends.cpu import threads
from relampago.backends.cpu.precision import fast_fp32
from relampago.backends.cpu.tile import FEW, HELD, LN2, SCORES, Heads, Slab, Tile, scratch
from relampago.plan import Plan
from relampago.problem import Arrays, accumulate_dtype
from relampago.quant.emulation import rounded

# Less than any sum of weights but 0: a row that sees no key gives 0 / TINY.
TINY = 2.0**-120


class Task(NamedTuple):
    """A tile of queries: positions p0..p1 of some heads."""

    heads: Heads
    p0: int
    p1: int


class Way(NamedTuple):
    """How tiles are worked on: `FREE`, or batch-invariant (see `invariant.py`)."""

    slab: Callable[[Arrays, Heads], Slab]
    tile: Callable[[Slab, int, int], Tile]
    attend: Callable[[Tile, Plan, Tensor, Tensor], Tensor | None]
    fixed: bool  # the way does not depend on what else the call holds, nor on the number of threads


def forward(x: Arrays, plan: Plan, way: Way) -> tuple[Tensor, Tensor]:
    """Out, shaped like q with the head dim of v, and LSE."""
    out, lse = unwritten(x, -math.inf)
    tops = over_tiles(x, plan, way, lambda tile: way.attend(tile, plan, out, lse))
    if x.max_logits is not None:
        raise_to(x.max_logits, tops, x.group)
    return out, lse


def unwritten(x: Arrays, nothing: float) -> tuple[Tensor, Tensor]:
    """Room for out and LSE; rows that belong to no sequence have 0 and `nothing`."""
    rows = x.q.shape[:-1]
    out = x.q.new_empty(*rows, x.v.shape[-1], dtype=x.out_dtype)
    heads_first = (x.batch, x.q.shape[2], x.q.shape[1]) if x.cu_q is None else rows[::-1]
    lse = x.q.new_empty(heads_first, dtype=accumulate_dtype(x.q.dtype))
    if x.cu_q is not None:
        out[int(x.cu_q[-1]) :] = 0
        lse[:, int(x.cu_q[-1]) :] = nothing
    return out, lse


def over_tiles(
    x: Arrays, plan: Plan, way: Way, work: Callable[[Tile], Tensor | None]
) -> list[tuple[Heads, Tensor]]:
    """Do the work on every tile, over threads; what it returns, with its heads, whose tiles share a slab."""
    # Head by head, since a thread keeps a head's keys; heaviest first, so that under causal a light one comes last.
    tasks = sorted(cut(x, plan, way), key=lambda task: (task.heads, -task.p1))
    slabs: dict[Heads, Slab] = {}
    found: list[tuple[Heads, Tensor]] = []

    def one(task: Task) -> None:
        slab = slabs.get(task.heads) or slabs.setdefault(task.heads, way.slab(x, task.heads))
        result = work(way.tile(slab, task.p0, task.p1))
        if result is not None:
            found.append((task.heads, result))

    with fast_fp32(worth_fast(x, way)):
        threads.run(one, tasks, pooled=way.fixed)
    return found


def attend(tile: Tile, plan: Plan, out: Tensor, lse: Tensor) -> Tensor | None:
    """One tile: Algorithm 1, lines 4 to 15. The largest score of each head [g, R], where it is asked for."""
    slab = tile.slab
    q = tile.queries()  # [g, l·R, D]
    m = l = acc = top = None
    asked = slab.x.max_logits is not None
    fp8 = slab.x.precision == "fp8"
    unshifted = not fp8 and tile.small(q)
    for panel in tile.panels(plan.block_k):  # line 6
        k, v = slab.take("k", slab.k, panel), slab.take("v", slab.v, panel)
        s = tile.scores(q, k, panel)  # line 8
        if not unshifted:
            m_new = s.amax(-1, keepdim=True)
            m_new = m_new if m is None else torch.maximum(m, m_new)
            shift = finite(m_new)
            s.sub_(shift)
            if m is not None:
                rescale(tile.power_(m - shift), l, acc)
            m = m_new
        elif asked:
            highest = s.amax(-1, keepdim=True)
            top = highest if top is None else torch.maximum(top, highest)
        p = tile.power_(s)
        total = p.sum(-1, keepdim=True)
        l = total if l is None else l.add_(total)  # line 9
        if (keep := tile.kept(panel)) is not None:
            p.mul_(keep)
        if fp8:
            p = rounded(p)
        acc = product(p, v) if acc is None else acc.baddbmm_(p, v)  # line 10
    top = top if m is None else m
    if (sink := tile.sink()) is not None:  # one more score, with no value
        m_new = sink if m is None else torch.maximum(m, sink)
        weight = tile.power_(sink - m_new)
        if m is not None:
            rescale(tile.power_(m - m_new), l, acc)
        l = weight if l is None else l.add_(weight)
        m = m_new
    if l is None:  # no key in reach
        l = q.new_zeros(*q.shape[:2], 1)
    if acc is None:
        acc = q.new_zeros(*q.shape[:2], slab.v.shape[-1])
    store(tile, acc, l, m, out, lse)
    return tile.natural(top.view(tile.shape).amax(1)) if asked and top is not None else None


FREE = Way(Slab, Tile, attend, False)


def store(tile: Tile, acc: Tensor, l: Tensor, m: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Algorithm 1, lines 12 and 13: out = acc / l, and LSE; l is used up."""
    slab = tile.slab
    tile.divide(acc, l.clamp(min=TINY), slab.queries_of(out))
    total = l.log2_() if slab.base2 else l.log_()
    total = total if m is None else total.add_(m)
    total = total.mul_(LN2) if slab.base2 else total
    target = slab.lse_of(lse)[:, :, tile.p0 : tile.p1]
    target.copy_(tile.grid(total).squeeze(-1).transpose(1, 2))


def raise_to(max_logits: Tensor, tops: list[tuple[Heads, Tensor]], group: int) -> None:
    """Raise the heads' maxima (B, H) to those found by tasks, each [g, R]."""
    for heads, top in tops:
        target = max_logits[heads.b].unflatten(0, (-1, group))
        target = target[heads.g0 : heads.g1, heads.r0 : heads.r1]
        torch.maximum(target, top, out=target)


def rescale(alpha: Tensor, *sums: Tensor | None) -> None:
    """Bring sums and outputs to a new maximum."""
    for t in sums:
        if t is not None:
            t.mul_(alpha)


def product(p: Tensor, v: Tensor) -> Tensor:
    """The product p·v in a buffer of this thread."""
    return torch.bmm(p, v, out=scratch("acc", (*p.shape[:2], v.shape[2]), p.dtype))


def finite(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 for a row that has seen nothing, so that -inf minus it stays -inf."""
    return torch.where(m == -math.inf, 0.0, m)


def worth_fast(x: Arrays, way: Way) -> bool:
    """The fast fp32 product loses on few rows, as in decoding, unless keys are first put in order."""
    return (way.fixed or x.len_q * x.group >= FEW) and x.q.dtype != torch.float64


def cut(x: Arrays, plan: Plan, way: Way) -> list[Task]:
    """All tiles of queries. Short sequences put several kv heads in one task, so that its products are not tiny."""
    tasks = []
    for b in range(x.batch):
        len_q, len_k = x.lengths(b)
        for heads in head_ranges(x, b, len_q, len_k, plan, way):
            step = rows_per_tile(x, heads, plan)
            tasks += [Task(heads, p, min(p + step, len_q)) for p in range(0, len_q, step)]
    return tasks


def rows_per_tile(x: Arrays, heads: Heads, plan: Plan) -> int:
    """Positions in a tile: block_q packed rows, or a tile of the BlockSparse."""
    if x.block is not None:
        return x.block[0]
    return max(1, plan.block_q // (heads.r1 - heads.r0))


def head_ranges(x: Arrays, b: int, len_q: int, len_k: int, plan: Plan, way: Way) -> list[Heads]:
    """The kv heads of a sequence, in tasks; a BlockSparse with lists per head takes query heads one by one."""
    kv_heads = x.k.shape[-2]
    if x.blocks is not None and x.blocks.count.shape[1] > 1:
        return [Heads(b, g, g + 1, r, r + 1) for g in range(kv_heads) for r in range(x.group)]
    workers = torch.get_num_threads()
    cells = min(len_q * x.group, plan.block_q) * min(len_k, plan.block_k)
    fit = max(SCORES, plan.block_q * plan.block_k) // max(1, cells)
    # Leave every thread something to do; but few rows make few large operators, whose work torch's own threads share.
    few = len_q * x.group < FEW
    share = kv_heads if few and not way.fixed else -(-kv_heads * x.batch // workers)
    reach = len_k if x.band_of(b).left is None else min(len_k, plan.block_k)
    hold = kv_heads if few else HELD // max(1, reach * max(x.k.shape[-1], x.v.shape[-1]))
    step = max(1, min(fit, share, hold, kv_heads))
    return [Heads(b, g, min(g + step, kv_heads), 0, x.group) for g in range(0, kv_heads, step)]
