"""The derivative of the backward along tangents: forward over reverse, and by symmetry double backward.

The walk of `backward.py`, with every quantity of Algorithm 2 beside its own tangent (docs/derivatives.md):

    gap = dP - delta           tgap = dṖ - tdelta        rate = ṡ - tlse, so that ṗ = p · rate
    ds  = p · gap              tds  = ds · rate + p · tgap

LSE and delta of a row and the tangents of both come from what `tangent.py` returned, so one pass is enough.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.backends.cpu.backward import (
    Sums,
    Task,
    add_to_part,
    renormalised,
    rounded,
    sweep,
    take_from_sinks,
)
from relampago.backends.cpu.forward import FREE
from relampago.backends.cpu.tangent import MovingSlab
from relampago.backends.cpu.tile import LOG2E, Panel, Tile, scratch
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Moving, Saved, Wanted


class Rows(NamedTuple):
    """What a tile's rows bring to every panel: [g, l·R, …], in the accumulation dtype."""

    q: Tensor  # scaled, in the slab's base
    left: Tensor | None  # of `rate`
    do: Tensor  # dO
    dos: Tensor | None  # the factor of dṖ: dO where v moves, tdO where dO moves, or both
    shift: Tensor
    normaliser: Tensor | None
    tlse: Tensor
    delta: Tensor
    tdelta: Tensor
    q_narrow: Tensor  # for products that only add up
    tq_narrow: Tensor | None
    do_narrow: Tensor
    tdo_narrow: Tensor | None


def backward_tangent(
    x: Arrays,
    plan: Plan,
    moving: Moving,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Grads:
    """The tangents of the gradients by `wanted`, along those of the inputs, of dout and of dlse."""

    def visit(tile: Tile, task: Task, sums: Sums, dk: Tensor, dv: Tensor) -> None:
        rows = rows_of(tile, plan, moving, saved, dout, dlse)
        tile_gradients(tile, plan, task, rows, sums, dk, dv)

    way = FREE._replace(slab=lambda x, heads: MovingSlab(x, heads, moving.inputs))
    return sweep(x, plan, wanted, way, visit)


def rows_of(
    tile: Tile, plan: Plan, moving: Moving, saved: Saved, dout: Tensor, dlse: Tensor | None
) -> Rows:
    """Pack a tile's rows; delta = rowsum(dO · O) - dLSE, and its tangent by the product rule."""
    slab = tile.slab
    assert isinstance(slab, MovingSlab)
    q = tile.queries()
    do, out, tout = (tile.pack(slab.queries_of(t)) for t in (dout, saved.out, moving.out))
    tdo = None if moving.dout is None else tile.pack(slab.queries_of(moving.dout))
    lse, tlse = (tile.pack_lse(slab.lse_of(t)) for t in (saved.lse, moving.lse))
    delta = (do * out).sum(-1, keepdim=True)
    tdelta = (do * tout).sum(-1, keepdim=True)
    if tdo is not None:
        tdelta.add_((tdo * out).sum(-1, keepdim=True))
    for total, own in ((delta, dlse), (tdelta, moving.dlse)):
        if own is not None:
            total.sub_(tile.pack_lse(slab.lse_of(own)))
    shift = torch.where(lse == -math.inf, math.inf, lse) * (LOG2E if slab.base2 else 1.0)
    factors = [t for t in (do if slab.tv is not None else None, tdo) if t is not None]
    narrow = torch.bfloat16 if slab.x.q.dtype == torch.bfloat16 else slab.dtype
    return Rows(
        q,
        slab.left(tile),
        do,
        torch.cat(factors, -1) if factors else None,
        shift,
        renormalised(tile, plan, q, shift),
        tlse,
        delta,
        tdelta,
        tile.pack(slab.q).to(narrow),
        None if slab.tq is None else tile.pack(slab.tq).to(narrow),
        do.to(narrow),
        None if tdo is None else tdo.to(narrow),
    )


def tile_gradients(
    tile: Tile, plan: Plan, task: Task, rows: Rows, sums: Sums, dk: Tensor, dv: Tensor
) -> None:
    """Algorithm 2, lines 7 to 17, and the tangents, for one tile of queries against all of its keys."""
    slab = tile.slab
    assert isinstance(slab, MovingSlab)
    narrow = rows.q_narrow.dtype
    dq = torch.zeros_like(rows.q)
    for panel in tile.panels(plan.block_k):
        grid = (*tile.shape, panel.size)
        k = slab.take("k", slab.k, panel)
        steps: list[Tensor] = []
        s = tile.scores(rows.q, k, panel, steps)  # line 11
        moved = slab.rate(tile, rows.left, panel)
        if steps:
            slope, bend = tile.slope(steps, panel), tile.bend(steps, panel, moved.view(grid))
            moved.view(grid).mul_(slope)
        slab.add_bias(tile, moved, panel)
        moved.sub_(rows.tlse)
        p = tile.power_(s.sub_(rows.shift))  # line 12
        if rows.normaliser is not None:
            p.mul_(rows.normaliser)
        keep = tile.kept(panel)
        gap, tgap = gaps(slab, rows, panel, keep)
        ds = gap.mul_(p)  # line 15
        tds = tgap.mul_(p).addcmul_(ds, moved)
        tp = moved.mul_(p)
        tile.add_keys(dv, panel, dropped(tp, keep, narrow), rows.do_narrow)  # line 13
        if rows.tdo_narrow is not None:
            tile.add_keys(dv, panel, dropped(p, keep, narrow), rows.tdo_narrow)
        if sums.dbias is not None:
            target = tile.part(sums.dbias, panel)
            add_to_part(tile, sums.dbias, panel, tds.view(grid).sum_to_size(target.shape))
        if steps:
            tds.view(grid).mul_(slope).add_(ds.view(grid) * bend)
            ds.view(grid).mul_(slope)
        for factor, of, keys, queries in (
            (tds, "k", slab.k, rows.q_narrow),
            (ds, "tk", slab.tk, rows.tq_narrow),
        ):
            if keys is None and queries is None:
                continue
            factor = rounded(factor, narrow)
            if keys is not None:
                tile.add_rows(dq, factor, slab.take(f"{of} narrow", keys, panel, narrow))  # line 16
            if queries is not None:
                tile.add_keys(dk, panel, factor, queries)  # line 17
    tile.unpack(dq.mul_(slab.x.scale), slab.queries_of(sums.dq))
    own = 0.0 if slab.t.sinks is None else tile.per_head(slab.t.sinks)
    change = (own - rows.tlse) * rows.delta + rows.tdelta
    take_from_sinks(tile, task, sums, rows.shift, rows.normaliser, change)


def gaps(slab: MovingSlab, rows: Rows, panel: Panel, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """dP - delta and its tangent (line 14 and a part of 15), in buffers of this thread."""
    shape = (*rows.do.shape[:2], panel.size)
    gap, tgap = scratch("gap", shape, slab.dtype), scratch("tgap", shape, slab.dtype)
    torch.bmm(rows.do, slab.take("v", slab.v, panel).transpose(1, 2), out=gap)
    if rows.dos is None:
        tgap.zero_()
    else:
        moving = slab.v if rows.tdo_narrow is not None else None
        values = slab.side("tv, v", (slab.tv, moving), panel)
        torch.bmm(rows.dos, values.transpose(1, 2), out=tgap)
    if keep is not None:
        gap.mul_(keep)
        tgap.mul_(keep)
    return gap.sub_(rows.delta), tgap.sub_(rows.tdelta)


def dropped(p: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights after dropout, in dtype."""
    return rounded(p if keep is None else p * keep, dtype)
