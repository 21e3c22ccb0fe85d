"""The host's side of the forward: descriptors, the shape of the launch, outputs. No step waits for the device."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.backends.gluon import schedule
from relampago.backends.gluon.boxes import (
    STEP,
    Box,
    addressable,
    cut,
    dense_box,
    descriptor,
    packed_box,
    padded,
    steps_fit,
)
from relampago.backends.gluon.combine import LINES, combine
from relampago.backends.gluon.counter import counter
from relampago.backends.gluon.sizes import (
    ROWS,
    Kind,
    Result,
    Sides,
    Size,
    chained,
    masks_of,
    pack_of,
    shares,
    size_of,
)
from relampago.backends.gluon.sm90_forward import attend
from relampago.mods import rule_of
from relampago.plan import Plan
from relampago.problem import Arrays
from relampago.tape import note

LOG2E = 1.4426950408889634
REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a thread: consumers' and producer's
COMBINING = Plan(block_q=1, block_k=1, warps=4)


class Target(NamedTuple):
    """Rows of out, (B, Lq, H, E), and of LSE, (B, H, Lq), that are written in fp32 and may be part of longer ones."""

    out: Tensor
    lse: Tensor
    before: Tensor | None  # out itself, if what stands there is to be folded in
    out_b: int  # steps
    out_l: int | None
    out_h: int
    lse_b: int
    lse_h: int
    held: int | None  # 1: out is (B, H, rows · E) in blocks of 64 rows, see `held`
    whole: int | None  # 1: out has as many columns as a tile

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, folds: bool, width: int) -> Target:
        """Out as it comes, or held."""
        held = out.dim() == 3
        b, l, h = (out.stride(0), None, out.stride(1)) if held else out.stride()[:3]
        marks = (1 if held else None, 1 if out.shape[-1] == width else None)
        return cls(out, lse, out if folds else None, b, l, h, *lse.stride()[:2], *marks)


class Extra(NamedTuple):
    """What else a call may have; None compiles to nothing."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    sinks: Tensor | None
    cap: float | None  # what scores are multiplied by before tanh
    row_start: Tensor | None  # each row's run of keys, (B or 1, Lq)
    row_end: Tensor | None
    top: Tensor | None = None  # each head's largest score, (B, H), to be raised
    # Target's fields: a tuple in a tuple may not be None
    wide: Tensor | None = None
    wide_lse: Tensor | None = None
    before: Tensor | None = None
    out_b: int | None = None
    out_l: int | None = None
    out_h: int | None = None
    lse_b: int | None = None
    lse_h: int | None = None
    held: int | None = None
    whole: int | None = None


class Setting(NamedTuple):
    """All of a launch that its shapes decide."""

    grid: int
    schedule: int
    boxes: tuple[Box | None, ...]  # of q, k, v and out, each in two parts
    size: Size
    sides: Sides
    cap: float | None
    constants: tuple[Any, ...]
    shape_out: tuple[int, ...]


def forward(plan: Plan, x: Arrays, multiprocessors: int) -> tuple[Tensor, Tensor]:
    """Out in the queries' dtype, shaped like q with the head dim of v, and LSE, (B, H, Lq) or (H, total)."""
    if 0 in (*x.q.shape[:-1], x.len_q, x.batch, x.k.shape[-3]):
        return nothing(x)
    q, scale = positive(x.q, x.scale)
    k, v = x.k, x.v
    if x.max_logits is not None and plan.lazy == 1:
        plan = replace(plan, lazy=2)  # maxima to the last bit
    start, end, stride = tables_of(x)
    result = Result(x.out_dtype == torch.float32, x.into is not None, is_held(x))
    setting = setting_of(
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, plan, x.batch,
        x.len_q, x.len_k, x.mods, x.band[:4], x.cu_q is not None, stride, result, multiprocessors,
    )  # fmt: skip
    if setting is None or q.data_ptr() % STEP or k.data_ptr() % STEP or v.data_ptr() % STEP:
        return _forward_of_copies(plan, replace(x, q=q, scale=scale), multiprocessors)
    # rows of no sequence stay as they are: 0 and -inf
    size, cap = setting.size, setting.cap
    is_split = size.splits > 1
    target = None
    if x.into is not None and not is_split:
        out, lse = x.into
    else:
        made = {"dtype": x.out_dtype, "device": q.device}
        out = (torch.empty if x.cu_q is None else torch.zeros)(setting.shape_out, **made)
        lse = lse_of(x, None if x.cu_q is None else float("-inf"))
    if result.wide and not is_split:
        target = Target.of(out, lse, x.into is not None and not x.anew, sum(cut(x.v.shape[-1])))
    part, found = parts_of(size, x) if is_split else (None, lse)
    sinks = None if is_split else x.sinks
    extra = Extra(
        x.cu_q,
        x.cu_k,
        sinks,
        None if cap is None else scale / cap,
        start,
        end,
        x.max_logits,
        *(target or ()),
    )
    views = [
        None if box is None else descriptor(t, box)
        for t, box in zip((q, q, k, k, v, v, out, out), setting.boxes, strict=True)
    ]
    launch(
        attend, setting.grid, plan, *views, part, found,
        counter(q.device) if setting.schedule == schedule.DYNAMIC else lse,
        (scale if cap is None else cap) * LOG2E, *size, *setting.sides, extra, *setting.constants,
    )  # fmt: skip
    if is_split:
        launch(
            combine, -(-size.rows // LINES), COMBINING, part, found, out, lse, x.sinks, size.splits, size.rows,
            size.heads, x.len_q if x.cu_q is None else size.len_q, size.dim_v, padded(size.dim_v),
        )  # fmt: skip
    return out, lse


def _forward_of_copies(plan: Plan, x: Arrays, multiprocessors: int) -> tuple[Tensor, Tensor]:
    """Where TMA cannot address the tensors; a copy of v may be wider than v."""
    dim_v = x.v.shape[-1]
    into = x.into if is_held(x) else None
    x = replace(x, q=addressable(x.q), k=addressable(x.k), v=addressable(x.v), into=into)
    out, lse = forward(plan, x, multiprocessors)
    if into is not None:
        return into
    return out[..., :dim_v].contiguous(), lse


def is_held(x: Arrays) -> bool:
    """Whether out goes to what `held_launch.hold` gave."""
    return x.into is not None and x.into[0].dim() != x.q.dim()


def tables_of(x: Arrays) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Each row's run of keys, and the step from one sequence's to the next's; None where there are none."""
    start, end = x.band.row_start, x.band.row_end
    if start is None or end is None:
        return None, None, None
    return start.contiguous(), end.contiguous(), start.shape[1] if start.shape[0] > 1 else 0


def parts_of(size: Size, x: Arrays) -> tuple[Tensor, Tensor]:
    """Room for what the splits find: out (splits, rows, dim_v) and LSE (splits, rows), fp32."""
    made = {"dtype": torch.float32, "device": x.q.device}
    lse = torch.empty(size.splits * size.rows, **made)
    if x.cu_q is not None:
        lse.fill_(math.inf)  # no sequence, see `combine`
    return torch.empty(size.splits * size.rows * size.dim_v, **made), lse


@functools.lru_cache(maxsize=4096)
def setting_of(
    shape_q: tuple[int, ...], strides_q: tuple[int, ...], shape_k: tuple[int, ...],
    strides_k: tuple[int, ...], shape_v: tuple[int, ...], strides_v: tuple[int, ...],
    dtype: torch.dtype, plan: Plan, batch: int, len_q: int, len_k: int, mods: tuple[str, ...],
    band: tuple[Any, ...], packed: bool, table_stride: int | None, result: Result, multiprocessors: int,
) -> Setting | None:  # fmt: skip
    """The launch for these shapes, which a warm call finds here; None where TMA cannot step through them."""
    step = STEP // dtype.itemsize
    given = ((shape_q, strides_q), (shape_k, strides_k), (shape_v, strides_v))
    if not all(steps_fit(*tensor, step) for tensor in given):
        return None
    kind = Kind(Sides(*band), packed, table_stride, multiprocessors, result)
    wide = result.wide
    (d, d2), (e, e2) = parts = cut(shape_q[-1]), cut(shape_v[-1])
    pack = 1 if result.held else pack_of(len_q, shape_q[-2] // shape_k[-2], plan.block_q)
    size = size_of(shape_q, shape_k, shape_v[-1], batch, len_q, len_k, kind, plan, pack)
    is_split = size.splits > 1
    by = schedule.DYNAMIC if kind.packed or kind.tables or is_split else plan.schedule
    shape_out = (*shape_q[:-1], shape_v[-1])
    strides_out = [math.prod(shape_out[i + 1 :]) for i in range(len(shape_out))]
    whole = not is_split and not wide
    queue = chained(plan, *parts) if whole else 0
    widths_out = (0, 0) if not whole else (e // 2, 0) if queue == 1 else (e, e2)
    sides = (
        (shape_q, strides_q, ROWS // pack, (d, d2), pack), (shape_k, strides_k, plan.block_k, (d, d2), 1),
        (shape_v, strides_v, plan.block_k // 2 if plan.halves else plan.block_k, (e, e2), 1),
        (shape_out, strides_out, ROWS // pack, widths_out, pack),
    )  # fmt: skip
    view = packed_box if kind.packed else dense_box
    boxes = tuple(
        view(shape, strides, rows, width, dtype, heads) if width else None
        for shape, strides, rows, widths, heads in sides
        for width in widths
    )
    consumers = plan.block_q // ROWS
    masks = masks_of(len_q, len_k, kind, plan, pack, is_split)
    turns = bool(plan.rotate) and not (
        masks.peeled or masks.looped
    )  # else a mask knows where each block lies
    constants = (
        consumers, plan.block_k, d, d2, e, e2, pack, plan.stages, by, *masks, plan.pingpong,
        plan.pin, plan.lazy, bool(plan.hold), whole and shares(plan, *parts), is_split, turns,
        queue, *REGISTERS[consumers],
    )  # fmt: skip
    grid = size.count if by == schedule.GRID else min(size.count, kind.multiprocessors)
    return Setting(grid, by, boxes, size, kind.sides, softcap_of(mods), constants, shape_out)


def lse_of(x: Arrays, value: float | None) -> Tensor:
    """Room for LSE, filled with a value if there is one."""
    s = x.q.shape
    shape = (s[0], s[2], s[1]) if x.cu_q is None else (s[1], s[0])
    lse = torch.empty(shape, dtype=torch.float32, device=x.q.device)
    return lse if value is None else lse.fill_(value)


def nothing(x: Arrays) -> tuple[Tensor, Tensor]:
    """Without keys: 0, and the LSE of nothing or of the sinks."""
    out = x.q.new_zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.out_dtype)
    lse = lse_of(x, float("-inf"))
    return out, lse if x.sinks is None else lse.copy_(x.sinks[:, None].expand(lse.shape))


def softcap_of(mods: tuple[str, ...]) -> float | None:
    """The cap, if there is one; `why_not` lets no other mod pass."""
    return float(rule_of(mods[0]).slots[0]) if mods else None


def launch(kernel: Any, grid: int, plan: Plan, *args: Any) -> None:
    """Start a kernel on the current device. Tests put a compiler in its place."""
    compiled = kernel.run(
        *args, grid=(grid, 1, 1), warmup=False, num_warps=plan.warps, enable_fp_fusion=True
    )
    note(compiled, (grid, 1, 1), args)


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and scale with the same scores, scale above 0: a row's maximum must stay one when it is scaled."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)
