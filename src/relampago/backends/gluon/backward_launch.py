"""The host's side of the backward: delta, then dK and dV by tiles of keys, and dQ with them or by tiles of rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from relampago.backends.gluon import schedule
from relampago.backends.gluon.boxes import (
    Box,
    addressable,
    dense_box,
    descriptor,
    packed_box,
    padded,
)
from relampago.backends.gluon.counter import counter
from relampago.backends.gluon.launch import LOG2E, launch, positive, softcap_of, tables_of
from relampago.backends.gluon.sizes import L2_BYTES, ROWS, SHARED, Sides
from relampago.backends.gluon.sm90_backward import by_keys
from relampago.backends.gluon.sm90_gradients import Size
from relampago.backends.gluon.sm90_queries import by_queries
from relampago.backends.gluon.sm90_rows import convert, prepare
from relampago.backends.gluon.sm90_tables import bound, reach
from relampago.backends.gluon.sm90_twins import by_products
from relampago.plan import Plan
from relampago.problem import Arrays, Device, Grads, Held, Saved, Wanted

REGISTERS = (240, 24)  # of a thread: two consumers' and the producer's
PLAIN = Plan(block_q=64, block_k=64, warps=4, stages=1)  # of the kernels before and after


class Strides(NamedTuple):
    """Elements from one to the next: sequence, row, head."""

    b: int
    l: int
    h: int


class Extra(NamedTuple):
    """What else a call may have; None compiles to nothing."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    cap: float | None  # what scores are multiplied by before tanh
    row_start: Tensor | None = None  # each row's run of keys, (B or 1, Lq)
    row_end: Tensor | None = None
    bounds: Tensor | None = None  # of runs, and the rows that keys are seen by: `sm90_tables`
    reached: Tensor | None = None


class Wide(NamedTuple):
    """A gradient that is written in fp32 without TMA; without a base, by TMA in the inputs' dtype."""

    base: Tensor | None = None
    b: int | None = None  # elements from one to the next: sequence, row, head
    l: int | None = None
    h: int | None = None
    adds: int | None = None  # 1: added to what stands there
    whole: int | None = None  # 1: rows have as many columns as a tile

    @classmethod
    def of(cls, t: Tensor, width: int, adds: bool) -> Wide:
        """A tensor shaped like the inputs, in tiles of a width."""
        return cls(t, *_strides(t), 1 if adds else None, 1 if t.shape[-1] == width else None)


class Work(NamedTuple):
    """What every kernel of a backward gets."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    top: Tensor
    delta: Tensor
    size: Size
    sides: Sides
    extra: Extra
    factor: float
    scale: float  # of dK; dQ's is the call's own
    widths: tuple[int, int]
    longest: tuple[int, int]


def backward(
    plan: Plan,
    by_query: Plan,
    x: Arrays,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    deterministic: bool,
) -> Grads:
    """The gradients by `wanted`, in the inputs' dtype or fp32 if `x.dtype` is; plan is of the kernel over keys."""
    if 0 in (*x.q.shape[:-1], x.len_q, x.batch, x.k.shape[-3]):
        return _nothing(x, saved, dlse)
    if is_held(x):
        return _of_held(plan, x, saved, dout)
    ordered = deterministic and in_order(plan, x)
    if ordered:
        plan = replace(plan, schedule=schedule.DYNAMIC)
    fused = bool(plan.fused) and (ordered or not deterministic)
    work = work_of(x, dout)
    sums = sums_of(work) if fused else None
    counts = counts_of(work, plan) if ordered else None
    _prepare(work, plan, saved, dlse, sums, counts)
    dq = dk = dv = None
    if wanted.k or wanted.v or fused:
        dk, dv = _by_keys(work, plan, x, sums, counts)
    if sums is not None:
        dq = _converted(work, plan, x, sums, None if x.sums is None else x.sums.q)
    elif wanted.q:
        dq = _by_queries(work, by_query, x)
    dsinks = None if x.sinks is None else _sink_gradient(work, x)
    return Grads(dq, dk, dv, None, dsinks)


def in_order(plan: Plan, x: Arrays) -> bool:
    """Whether tiles of keys can add to dQ in their order; not where rows have runs of keys of their own."""
    return bool(plan.fused and plan.ordered) and x.band.row_start is None


def is_held(x: Arrays) -> bool:
    """Whether rows are as `hold` gives them."""
    return x.sums is not None and x.sums.q.dim() != x.q.dim()


def hold(plan: Plan, x: Arrays, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Held:
    """What `prepare` fills, for all shards of the keys: numbers of rows, and sums of dQ in the order of `as_held`."""
    work = work_of(x, dout)
    sums = sums_of(work)
    _prepare(work, plan, saved, dlse, sums)
    rows = x.batch, work.size.heads, -1
    return Held(sums.view(rows), work.top.view(rows), work.delta.view(rows), schedule.UNIT)


def release(plan: Plan, x: Arrays, held: Held) -> Tensor:
    """dQ in the inputs' dtype."""
    x = replace(x, dtype=None)
    top, delta = (t.view(1, -1) for t in (held.lse, held.delta))
    return _converted(work_of(x, x.q, (top, delta)), plan, x, held.dq, None)


def _of_held(plan: Plan, x: Arrays, saved: Saved, dout: Tensor) -> Grads:
    """A shard's dK and dV, and its part of a dQ that is held: one launch."""
    assert x.sums is not None
    assert saved.delta is not None
    rows = _line(saved.lse), _line(saved.delta)
    work = work_of(x, dout, rows)
    work = work._replace(size=work.size._replace(padded=saved.lse.stride(1)))
    dk, dv = _by_keys(work, plan, x, x.sums.q)
    return Grads(x.sums.q, dk, dv)


def _line(t: Tensor) -> Tensor:
    """Numbers of rows (B, H, n) of longer ones, as far as blocks of rows reach, as TMA sees them."""
    batch, heads, n = t.shape
    last = (batch * heads - 1) * t.stride(1) + -(-n // ROWS) * ROWS
    return t.as_strided((1, last), (last, 1))


def sums_of(work: Work) -> Tensor:
    """Room for dQ."""
    rows = work.top.shape[1]
    return torch.empty(rows * work.widths[0], dtype=torch.float32, device=work.q.device)


def counts_of(work: Work, plan: Plan) -> Tensor:
    """Room for how many tiles of keys have added to each block of rows."""
    blocks = work.top.shape[1] // plan.block_q
    return torch.empty(blocks, dtype=torch.int32, device=work.q.device)


def work_of(x: Arrays, dout: Tensor, filled: tuple[Tensor, Tensor] | None = None) -> Work:
    """Tensors that TMA can address, and the numbers of rows: those that `prepare` is to fill, or has filled."""
    q, scale = positive(x.q, x.scale)  # a hidden score stays -inf when it is scaled
    q, k, v = addressable(q), addressable(x.k), addressable(x.v)
    dout = addressable(dout.to(q.dtype))
    heads, kv_heads = q.shape[-2], k.shape[-2]
    unit = schedule.UNIT
    if x.cu_q is None:
        room = -(-x.len_q // unit) * unit
        rows = room * heads * x.batch
    else:
        room = (-(-q.shape[0] // unit) + x.batch + 1) * unit
        rows = room * heads
    top, delta = filled or (
        torch.empty(1, rows, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    if filled is None and (x.sinks is not None or x.cu_q is not None):
        top.fill_(float("inf"))  # rows of no sequence must have no weight
        delta.zero_()
    start, end, stride = tables_of(x)
    size = Size(
        q.shape[-3], k.shape[-3], heads, heads // kv_heads, 0, 0, 0, room, x.q.shape[-1],
        x.v.shape[-1], stride or 0,
    )  # fmt: skip
    cap = softcap_of(x.mods)
    extra = Extra(x.cu_q, x.cu_k, None if cap is None else scale / cap, start, end)
    if start is not None:
        bounds, reached = _tables(extra, size, x.batch)
        extra = extra._replace(bounds=bounds, reached=reached)
    factor = (scale if cap is None else cap) * LOG2E
    widths = padded(q.shape[-1]), padded(v.shape[-1])
    return Work(
        q, k, v, dout, top, delta, size, Sides(*x.band[:4]), extra, factor, scale, widths,
        (x.len_q, x.len_k),
    )  # fmt: skip


def _tables(extra: Extra, size: Size, batch: int) -> tuple[Tensor, Tensor]:
    """What `sm90_tables` finds of the rows' runs of keys."""
    made = {"dtype": torch.int32, "device": extra.row_start.device}
    rows, keys = batch * -(-size.len_q // ROWS), batch * -(-size.len_k // ROWS)
    bounds, reached = torch.empty(rows, 4, **made), torch.empty(keys, 2, **made)
    launch(
        bound, rows, PLAIN, extra.row_start, extra.row_end, bounds, size.len_q, size.table_stride
    )
    launch(reach, keys, PLAIN, bounds, reached, size.len_q, size.len_k)
    return bounds, reached


def _prepare(
    work: Work, plan: Plan, saved: Saved, dlse: Tensor | None, sums: Tensor | None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    width, width_v = work.widths
    if saved.delta is None:
        known = None
        out, dout = (t if t.stride(-1) == 1 else t.contiguous() for t in (saved.out, work.dout))
        strides = _strides(out), _strides(dout)
    else:
        out, dout, dlse, known = None, None, None, saved.delta.contiguous()
        strides = (Strides(0, 0, 0),) * 2
    rows = min(64, 8192 // width_v)
    tiles = -(-work.longest[0] // plan.block_q) * (plan.block_q // rows)
    batch = _batch(work)
    launch(
        prepare, tiles * work.size.heads * batch, PLAIN, out, dout, saved.lse.contiguous(),
        None if dlse is None else dlse.contiguous(), known, work.top, work.delta, sums, counts, *strides,
        *work.size._replace(tiles=tiles), *work.sides, work.extra, rows, plan.block_q, width,
        width_v, saved.out.shape[-1],
    )  # fmt: skip


def _by_keys(
    work: Work, plan: Plan, x: Arrays, sums: Tensor | None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dK and dV; the sums of dQ too, if there are, in order if blocks of rows have counters."""
    width, width_v = work.widths
    size, (_, longest) = work.size, work.longest
    batch, kv_heads = _batch(work), size.heads // size.group
    tiles = -(-longest // plan.block_k)
    rows = size.len_q if work.extra.cu_q is None else work.longest[0]
    together = L2_BYTES // (rows * size.group * (width + width_v) * (2 if sums is None else 4))
    section = min(max(1, together if work.sides.right is not None else 1), batch * kv_heads)
    size = size._replace(tiles=tiles, places=batch * kv_heads, section=section)
    _, into_k, into_v, anew = x.sums or (None, None, None, True)
    dk, dk_wide, dk_desc = _result(work.k, x.k, x, ROWS, width, into_k, not anew)
    dv, dv_wide, dv_desc = _result(work.v, x.v, x, ROWS, width_v, into_v, not anew)
    boxed = functools.partial(_described, packed=work.extra.cu_q is not None)
    q, dout = boxed(work.q, plan.block_q, width), boxed(work.dout, plan.block_q, width_v)
    k, v = boxed(work.k, ROWS, width), boxed(work.v, ROWS, width_v)
    masks = masks_of(work, plan.block_k)
    facts = [_facts(t, plan.block_q) for t in (work.top, work.delta)]
    grid = tiles * batch * kv_heads
    if plan.block_k == ROWS:
        launch(
            by_products, grid, plan, q, dout, k, v, dk_desc, dv_desc, dk_wide, dv_wide, *facts,
            work.factor, work.scale, *size, *work.sides, work.extra, plan.block_q, width, width_v,
            plan.stages, *masks, *REGISTERS,
        )  # fmt: skip
    else:
        tiles = tiles_of_keys(plan, width, width_v, sums is not None)
        drawn = plan.schedule == schedule.DYNAMIC
        if drawn:
            grid = min(grid, Device.of(work.q.device).multiprocessors)
        launch(
            by_keys, grid, plan, q, dout, k, v, dk_desc, dv_desc, dk_wide, dv_wide, *facts, sums,
            counter(work.q.device) if drawn else work.top, counts, work.factor, work.scale, *size, *work.sides,
            work.extra, plan.block_q, width, width_v, plan.stages, tiles, plan.schedule, sums is not None, plan.ahead,
            bool(plan.pingpong), *masks, *REGISTERS,
        )  # fmt: skip
    return _narrowed(dk, x.k), _narrowed(dv, x.v)


def _converted(work: Work, plan: Plan, x: Arrays, sums: Tensor, into: Tensor | None) -> Tensor:
    """dQ out of its sums, added to what there is."""
    make = torch.empty if x.cu_q is None else torch.zeros
    dq = make(x.q.shape, dtype=x.out_dtype, device=x.q.device) if into is None else into
    tiles = -(-work.longest[0] // plan.block_q)
    launch(
        convert, tiles * work.size.heads * _batch(work), PLAIN, sums, dq, _strides(dq), x.scale,
        *work.size._replace(tiles=tiles), *work.sides, work.extra, plan.block_q, work.widths[0],
        work.widths[0] // 2 if plan.block_q == ROWS else work.widths[0],
        dq.shape[-1], into is not None,
    )  # fmt: skip
    return dq


def _by_queries(work: Work, plan: Plan, x: Arrays) -> Tensor:
    """dQ by tiles of rows."""
    width, width_v = work.widths
    size, batch = work.size, _batch(work)
    tiles = -(-work.longest[0] // plan.block_q)
    together = max(1, L2_BYTES // max(1, work.longest[1] * (width + width_v) * 2))
    bounded = work.sides.left is not None or work.sides.right is not None
    section = min((together if bounded else 1) * size.group, batch * size.heads)
    size = size._replace(tiles=tiles, places=batch * size.heads, section=section)
    into = None if x.sums is None else x.sums.q
    dq, wide, dq_desc = _result(work.q, x.q, x, ROWS, width, into, into is not None)
    boxed = functools.partial(_described, packed=work.extra.cu_q is not None)
    launch(
        by_queries, tiles * batch * size.heads, plan, boxed(work.q, ROWS, width),
        boxed(work.dout, ROWS, width_v), boxed(work.k, plan.block_k, width),
        boxed(work.v, plan.block_k, width_v), dq_desc, wide, work.top, work.delta, work.factor,
        x.scale, *size, *work.sides, work.extra, plan.block_k, width, width_v, plan.stages,
        stages_of_values(plan, width, width_v), bool(plan.pin), masks_of(work, plan.block_k)[0],
        *REGISTERS,
    )  # fmt: skip
    return _narrowed(dq, x.q)


def tiles_of_keys(plan: Plan, width: int, width_v: int, fused: bool) -> int:
    """Two, if tiles are drawn and there is room for the next one's keys and values."""
    if plan.schedule != schedule.DYNAMIC:
        return 1
    buffers = (4 if plan.ahead >= 2 else 2) * plan.block_k * plan.block_q if fused else 0
    rows = plan.stages * plan.block_q
    ring = (rows + 2 * plan.block_k) * (width + width_v)
    return 2 if (ring + buffers) * 2 + rows * 8 + 1024 <= SHARED else 1


def stages_of_values(plan: Plan, width: int, width_v: int) -> int:
    """As many as of keys, or as there is room for."""
    tiles = (2 * ROWS * (width + width_v) + plan.stages * plan.block_k * width) * 2
    return max(1, min(plan.stages, (SHARED - 1024 - tiles) // (plan.block_k * width_v * 2)))


def masks_of(work: Work, block_k: int) -> tuple[bool, bool]:
    """(whether blocks may need a mask, whether it must look at the last key)."""
    packed = work.extra.cu_q is not None
    ends = packed or work.longest[1] % block_k != 0
    tables = work.extra.row_start is not None
    return ends or tables or work.sides.left is not None or work.sides.right is not None, ends


def _batch(work: Work) -> int:
    cu = work.extra.cu_q
    return work.q.shape[0] if cu is None else cu.shape[0] - 1


def _described(t: Tensor, rows: int, width: int, *, packed: bool) -> Any:
    return descriptor(t, _box(tuple(t.shape), t.stride(), rows, width, t.dtype, packed))


@functools.lru_cache(maxsize=4096)
def _box(
    shape: tuple[int, ...], strides: tuple[int, ...], rows: int, width: int, dtype: torch.dtype,
    packed: bool,
) -> Box:  # fmt: skip
    return (packed_box if packed else dense_box)(shape, strides, rows, width, dtype)


def _facts(t: Tensor, rows: int) -> Any:
    """TMA's view of numbers of rows."""
    block = [1, rows]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    return descriptor(t, Box([*t.shape], [t.shape[1], 1], block, layout))


def _result(
    like: Tensor, source: Tensor, x: Arrays, rows: int, width: int, into: Tensor | None, adds: bool
) -> tuple[Any, ...]:
    """(a gradient's tensor, which may be given, how the kernel writes it without TMA, TMA's view).

    Rows of no sequence stay 0.
    """
    packed = x.cu_q is not None
    make = torch.zeros if packed else torch.empty
    if x.out_dtype == torch.float32:
        grad = into
        if grad is None:
            grad = make(source.shape, dtype=torch.float32, device=source.device)
        return grad, Wide.of(grad, width, adds), _described(like, rows, width, packed=packed)
    grad = make(like.shape, dtype=like.dtype, device=like.device)
    return grad, Wide(), _described(grad, rows, width, packed=packed)


def _narrowed(grad: Tensor, source: Tensor) -> Tensor:
    dim = source.shape[-1]
    return grad if grad.shape[-1] == dim else grad[..., :dim].contiguous()


def _strides(t: Tensor) -> Strides:
    return Strides(*t.stride()[:3]) if t.dim() == 4 else Strides(0, *t.stride()[:2])


def _sink_gradient(work: Work, x: Arrays) -> Tensor:
    """-Σ weight of the sink · delta over all rows, (H,)."""
    heads = work.size.heads
    shape = (-1, heads, work.size.padded)
    top, delta = work.top.view(shape), work.delta.view(shape)
    weight = torch.exp2(x.sinks.float()[:, None] * LOG2E - top)
    return -(weight * delta).sum((0, 2))


def _nothing(x: Arrays, saved: Saved, dlse: Tensor | None) -> Grads:
    """Without keys or rows: 0; only LSE depends on a sink, which has all the weight then."""
    dq, dk, dv = (torch.zeros_like(t, dtype=x.out_dtype) for t in (x.q, x.k, x.v))
    if x.sinks is None:
        return Grads(dq, dk, dv)
    dsinks = torch.zeros(x.sinks.shape, dtype=torch.float32, device=x.q.device)
    if dlse is not None and saved.lse.numel():
        lost = dlse.float().masked_fill(saved.lse == float("-inf"), 0.0).sum(-1)
        dsinks = lost if x.cu_q is not None else lost.sum(0)
    return Grads(dq, dk, dv, None, dsinks)
