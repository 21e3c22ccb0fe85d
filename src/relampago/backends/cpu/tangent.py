"""The forward and its tangent in one pass: forward-mode AD, tile by tile (docs/derivatives.md).

The loop of `forward.py` with two more sums per row, rescaled with the others: lt = Σ p·ṡ and acct = Σ p·ṡ·v, where ṡ is
the tangent of the scores. With them, LSE's tangent is lt / l and the output's (acct + Σ p·v̇) / l - lt / l · out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relampago.backends.cpu.forward import FREE, TINY, finite, over_tiles, rescale, unwritten
from relampago.backends.cpu.tile import LN2, Heads, Panel, Slab, Tile, scratch
from relampago.plan import Plan
from relampago.problem import Arrays, Tangents

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, lse and their tangents


class MovingSlab(Slab):
    """A slab whose tensors move."""

    def __init__(self, x: Arrays, heads: Heads, t: Tangents) -> None:
        super().__init__(x, heads)
        self.t = t
        self.tq = None if t.q is None else self.queries_of(t.q)  # [Lq, g, R, D]
        self.tk = None if t.k is None else self.keys_of(t.k)  # [g, Lk, D]
        self.tv = None if t.v is None else self.keys_of(t.v)  # [g, Lk, E]

    def left(self, tile: Tile) -> Tensor | None:
        """The factor of a tile's rows in ṡ, scaled: [g, l·R, D] or [g, l·R, 2D]; None if neither q nor k moves."""
        q = tile.pack(self.q) if self.tk is not None else None
        tq = None if self.tq is None else tile.pack(self.tq)
        both = [part for part in (q, tq) if part is not None]
        return torch.cat(both, -1).mul_(self.x.scale) if both else None

    def right(self, panel: Panel) -> Tensor:
        """The keys' factor in ṡ, in the order of `left`."""
        return self.side("tk, k", (self.tk, self.k if self.tq is not None else None), panel)

    def side(self, name: str, parts: tuple[Tensor | None, ...], panel: Panel) -> Tensor:
        """Keys or values of a panel [g, n, …], several tensors' side by side in a buffer of this thread."""
        given = [part for part in parts if part is not None]
        g, n, width = given[0].shape[0], panel.size, given[0].shape[2]
        joined = scratch(name, (g, n, width * len(given)), self.dtype)
        for i, part in enumerate(given):
            joined[..., i * width : (i + 1) * width].copy_(part[:, panel.keys])
        return joined

    def rate(self, tile: Tile, left: Tensor | None, panel: Panel) -> Tensor:
        """ṡ before mods and bias [g, l·R, n], in natural units, in a buffer of this thread."""
        g, rows, group = tile.shape
        moved = scratch("rate", (g, rows * group, panel.size), self.dtype)
        if left is None:
            return moved.zero_()
        return torch.bmm(left, self.right(panel).transpose(1, 2), out=moved)

    def add_bias(self, tile: Tile, moved: Tensor, panel: Panel) -> None:
        """Add the bias's tangent to ṡ."""
        if self.t.bias is not None:
            moved.view(*tile.shape, panel.size).add_(tile.part(self.t.bias, panel))


def tangent(x: Arrays, plan: Plan, t: Tangents) -> Results:
    """Out, LSE, and the tangents of both along t."""
    results = (*unwritten(x, -math.inf), *unwritten(x, 0.0))
    way = FREE._replace(slab=lambda x, heads: MovingSlab(x, heads, t))
    over_tiles(x, plan, way, lambda tile: attend(tile, plan, results))
    return results


def attend(tile: Tile, plan: Plan, results: Results) -> None:
    """One tile: Algorithm 1, lines 4 to 15, and the tangents of what it computes."""
    slab = tile.slab
    assert isinstance(slab, MovingSlab)
    q = tile.queries()  # [g, l·R, D]
    left = slab.left(tile)
    m = l = None
    lt = q.new_zeros(*q.shape[:2], 1)
    width = slab.v.shape[-1]
    acc = scratch("acc", (*q.shape[:2], width * (1 if slab.tv is None else 2)), slab.dtype).zero_()
    acct = scratch("acct", (*q.shape[:2], width), slab.dtype).zero_()
    unshifted = tile.small(q)
    for panel in tile.panels(plan.block_k):
        k = slab.take("k", slab.k, panel)
        values = slab.side("v, tv", (slab.v, slab.tv), panel)
        steps: list[Tensor] = []
        s = tile.scores(q, k, panel, steps)
        moved = slab.rate(tile, left, panel)
        if steps:
            moved.view(*tile.shape, panel.size).mul_(tile.slope(steps, panel))
        slab.add_bias(tile, moved, panel)
        if not unshifted:
            m_new = s.amax(-1, keepdim=True)
            m_new = m_new if m is None else torch.maximum(m, m_new)
            shift = finite(m_new)
            s.sub_(shift)
            if m is not None:
                rescale(tile.power_(m - shift), l, lt, acc, acct)
            m = m_new
        p = tile.power_(s)
        moved.mul_(p)
        total = p.sum(-1, keepdim=True)
        l = total if l is None else l.add_(total)
        lt.add_(moved.sum(-1, keepdim=True))
        if (keep := tile.kept(panel)) is not None:
            p.mul_(keep)
            moved.mul_(keep)
        acc.baddbmm_(p, values)
        acct.baddbmm_(moved, values[..., :width])
    if (sink := tile.sink()) is not None:
        m_new = sink if m is None else torch.maximum(m, sink)
        weight = tile.power_(sink - m_new)
        if m is not None:
            rescale(tile.power_(m - m_new), l, lt, acc, acct)
        l = weight if l is None else l.add_(weight)
        if slab.t.sinks is not None:
            lt.add_(weight * tile.per_head(slab.t.sinks))
        m = m_new
    write(tile, results, m, q.new_zeros(*q.shape[:2], 1) if l is None else l, lt, acc, acct)


def write(
    tile: Tile, results: Results, m: Tensor | None, l: Tensor, lt: Tensor, acc: Tensor, acct: Tensor
) -> None:
    """Divide by l and write a tile's rows of the results."""
    slab = tile.slab
    out, lse, tout, tlse = results
    width = acct.shape[-1]
    safe = l.clamp(min=TINY)
    lt.div_(safe)
    acc.div_(safe)
    acct.div_(safe).sub_(acc[..., :width] * lt)
    if acc.shape[-1] > width:
        acct.add_(acc[..., width:])
    tile.unpack(acc[..., :width], slab.queries_of(out))
    tile.unpack(acct, slab.queries_of(tout))
    if m is None:
        total = l.log()
    else:
        total = l.log2().add_(m).mul_(LN2) if slab.base2 else l.log().add_(m)
    for rows, target in ((total, lse), (lt, tlse)):
        part = slab.lse_of(target)[:, :, tile.p0 : tile.p1]
        part.copy_(rows.view(tile.shape).transpose(1, 2))
