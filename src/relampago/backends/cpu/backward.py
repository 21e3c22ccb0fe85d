"""The backward: FlashAttention-2, Algorithm 2 (arXiv 2307.08691), recomputing the weights tile by tile.

The paper's outer loop runs over keys and adds dQ across blocks. Here one thread owns a kv head with its dK and dV,
so the outer loop runs over queries, as in the forward: dQ of a tile is finished at once, and nothing is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.backends.cpu import threads
from relampago.backends.cpu.forward import Way, head_ranges, rows_per_tile, worth_fast
from relampago.backends.cpu.precision import fast_fp32
from relampago.backends.cpu.tables import Tables, Task, through_mods
from relampago.backends.cpu.tile import LOG2E, Heads, Panel, Tile, scratch
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Saved, Wanted, accumulate_dtype

# Above this, an fp32 LSE has lost digits of log Σ that a weight needs; the row's weights are normalised anew.
HUGE_LSE = 1024.0


class Sums(NamedTuple):
    """What tasks add to."""

    dq: Tensor  # like q
    dk: Tensor  # (parts, *k)
    dv: Tensor
    dbias: Tensor | None  # like bias, in the accumulation dtype
    dsinks: Tensor | None  # (B, parts, H)
    dargs: Tables


Visit = Callable[[Tile, Task, Sums, Tensor, Tensor], None]  # the last two: dK and dV of the task


def backward(
    x: Arrays,
    plan: Plan,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    way: Way,
) -> Grads:
    """The gradients by `wanted`, in the inputs' dtypes or in x.out_dtype."""

    def visit(tile: Tile, task: Task, sums: Sums, dk: Tensor, dv: Tensor) -> None:
        tile_gradients(tile, plan, task, saved, dout, dlse, sums, dk, dv)

    return sweep(x, plan, wanted, way, visit)


def sweep(x: Arrays, plan: Plan, wanted: Wanted, way: Way, visit: Visit) -> Grads:
    """Call visit on every tile of queries; it writes the tile's dQ and adds to dK, dV and the other sums."""
    heads = [h for b in range(x.batch) for h in ranges(x, b, plan, way)]
    parts = 1 if way.fixed else max(1, -(-torch.get_num_threads() // max(1, len(heads))))
    dtype = accumulate_dtype(x.q.dtype)
    kv_dtype = dtype if parts > 1 else x.out_dtype
    blank = torch.empty if x.cu_q is None else torch.zeros  # rows of no sequence have gradient 0
    sums = Sums(
        blank(x.q.shape, dtype=x.out_dtype),
        blank(parts, *x.k.shape, dtype=kv_dtype),
        blank(parts, *x.v.shape, dtype=kv_dtype),
        torch.zeros_like(x.bias, dtype=dtype) if x.bias is not None and wanted.bias else None,
        x.q.new_zeros(x.batch, parts, x.q.shape[-2], dtype=dtype) if x.sinks is not None else None,
        Tables(x, wanted, dtype),
    )
    tasks = [Task(h, part) for h in heads for part in range(parts)]
    in_turn = sums.dbias is not None and shared(x)
    with fast_fp32(worth_fast(x, way)):
        threads.run(
            lambda task: differentiate(x, plan, way, task, parts, visit, sums),
            tasks,
            serial=in_turn,
            pooled=way.fixed,
        )
    return Grads(
        sums.dq,
        sums.dk.sum(0) if parts > 1 else sums.dk[0],
        sums.dv.sum(0) if parts > 1 else sums.dv[0],
        sums.dbias,
        None if sums.dsinks is None else sums.dsinks.sum((0, 1)),
        sums.dargs.whole(),
    )


def ranges(x: Arrays, b: int, plan: Plan, way: Way) -> list[Heads]:
    """The kv heads of a sequence, in tasks that own their dK and dV: always with their whole group."""
    found = head_ranges(x, b, *x.lengths(b), plan, way)
    return sorted({h._replace(r0=0, r1=x.group) for h in found})


def shared(x: Arrays) -> bool:
    """Whether several tasks add to the same element of dbias: then they take turns, in a fixed order."""
    assert x.bias is not None
    few_batches = x.bias.shape[0] < x.batch
    return few_batches or x.bias.shape[1] < x.q.shape[-2] or x.bias.shape[2] == 1


def differentiate(
    x: Arrays,
    plan: Plan,
    way: Way,
    task: Task,
    parts: int,
    visit: Visit,
    sums: Sums,
) -> None:
    """All tiles of a task."""
    per_head = x.blocks is not None and x.blocks.count.shape[1] > 1
    whole = task.heads
    groups = [whole._replace(r0=r, r1=r + 1) for r in range(x.group)] if per_head else [whole]
    slab = way.slab(x, whole)
    g, len_k = slab.k.shape[:2]
    room = slab.room()
    dk = scratch("dk", (g, room, slab.k.shape[2]), slab.dtype).zero_()
    dv = scratch("dv", (g, room, slab.v.shape[2]), slab.dtype).zero_()
    for heads in groups:
        slab = way.slab(x, heads)
        step = rows_per_tile(x, heads, plan)
        for i, p0 in enumerate(range(0, slab.q.shape[0], step)):
            if i % parts == task.part:
                tile = way.tile(slab, p0, min(p0 + step, slab.q.shape[0]))
                visit(tile, task, sums, dk, dv)
    dk.mul_(x.scale)
    for gradient, target in ((dk, sums.dk), (dv, sums.dv)):
        view = target[task.part][slab.cols][:, whole.g0 : whole.g1]
        view.copy_(gradient[:, :len_k].transpose(0, 1))


def tile_gradients(
    tile: Tile,
    plan: Plan,
    task: Task,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    sums: Sums,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Algorithm 2, lines 7 to 17, for one tile of queries against all of its keys."""
    slab = tile.slab
    q = tile.queries()  # [g, l·R, D]
    do = tile.pack(slab.queries_of(dout))  # [g, l·R, E]
    lse = tile.pack_lse(slab.lse_of(saved.lse), -math.inf)  # [g, l·R, 1]
    if saved.delta is not None:
        delta = tile.pack_lse(slab.lse_of(saved.delta))
    else:  # line 4
        delta = (do * tile.pack(slab.queries_of(saved.out))).sum(-1, keepdim=True)
        delta = delta if dlse is None else delta - tile.pack_lse(slab.lse_of(dlse))
    shift = torch.where(lse == -math.inf, math.inf, lse) * (LOG2E if slab.base2 else 1.0)
    normaliser = renormalised(tile, plan, q, shift)
    # Products that only add up may take bf16 operands, at twice the rate: q, k and dO are bf16 already.
    narrow = slab.narrow
    q_narrow, do_narrow = tile.pack(slab.q).to(narrow), do.to(narrow)
    dq = torch.zeros_like(q)
    for panel in tile.panels(plan.block_k):
        k, v = slab.take("k", slab.k, panel), slab.take("v", slab.v, panel)
        steps: list[Tensor] = []
        s = tile.scores(q, k, panel, steps)  # line 11
        p = tile.power_(s.sub_(shift))  # line 12
        if normaliser is not None:
            p.mul_(normaliser)
        keep = tile.kept(panel)
        weights = rounded(p if keep is None else p * keep, narrow)
        tile.add_keys(dv, panel, weights, do_narrow)  # line 13
        dp = tile.products("dp", do, v)  # line 14
        if keep is not None:
            dp.mul_(keep)
        ds = dp.sub_(delta).mul_(p)  # line 15
        if sums.dbias is not None:
            target = tile.part(sums.dbias, panel)
            addition = tile.grid(ds)[..., : panel.size].sum_to_size(target.shape)
            add_to_part(tile, sums.dbias, panel, addition)
        if steps:
            through_mods(tile, steps, tile.wide(panel), ds, sums.dargs, task)
        ds = rounded(ds, narrow)
        k = slab.take("k narrow", slab.k, panel, narrow) if k.dtype != narrow else k
        tile.add_rows(dq, ds, k)  # line 16
        tile.add_keys(dk, panel, ds, q_narrow)  # line 17
    tile.unpack(dq.mul_(slab.x.scale), slab.queries_of(sums.dq))
    take_from_sinks(tile, task, sums, shift, normaliser, delta)


def take_from_sinks(
    tile: Tile, task: Task, sums: Sums, shift: Tensor, normaliser: Tensor | None, change: Tensor
) -> None:
    """Subtract Σ weight of the sink · change from dsinks; change is [g, l·R, 1]."""
    if sums.dsinks is None or (sink := tile.sink()) is None:
        return
    weight = tile.power_(sink - shift)
    if normaliser is not None:
        weight.mul_(normaliser)
    h = tile.slab.heads
    target = sums.dsinks[h.b, task.part].unflatten(0, (-1, tile.slab.x.group))
    target[h.g0 : h.g1, h.r0 : h.r1] -= tile.grid(weight * change).sum((1, 3))  # [g, R]


def renormalised(tile: Tile, plan: Plan, q: Tensor, shift: Tensor) -> Tensor | None:
    """1 / Σ weights for rows whose LSE is too large to carry it, [g, l·R, 1]; None if there is no such row.

    A row whose every key has a bias of finfo.min, say, has that as its LSE too: log Σ is lost in rounding.
    """
    huge = (shift.abs() > HUGE_LSE) & (shift.abs() < math.inf)
    if tile.slab.x.shard or not bool(huge.any()):
        return None
    total = torch.zeros_like(shift)
    for panel in tile.panels(plan.block_k):
        s = tile.scores(q, tile.slab.take("k", tile.slab.k, panel), panel)
        total += tile.sums(tile.power_(s.sub_(shift)))
    if (sink := tile.sink()) is not None:
        total += tile.power_(sink - shift)
    return torch.where(huge & (total > 0), 1 / total, 1.0)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in dtype."""
    return t if t.dtype == dtype else scratch("rounded", t.shape, dtype).copy_(t)


def add_to_part(tile: Tile, dbias: Tensor, panel: Panel, addition: Tensor) -> None:
    """Add to a tile's part of dbias; a gathered panel's part is a copy, so it is written back."""
    part = tile.part(dbias, panel)
    if isinstance(panel.keys, slice) or dbias.shape[3] == 1:
        part += addition
    else:
        rows = tile.slab.heads_of(dbias).transpose(1, 2)
        rows = rows if rows.shape[1] == 1 else rows[:, tile.p0 : tile.p1]
        rows.index_add_(3, panel.keys, addition)
