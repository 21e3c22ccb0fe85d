"""The host's side of the FP8 forward: casts, descriptors, the shape of the launch. No step waits for the device."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from relampago.backends.gluon import launch as host
from relampago.backends.gluon import schedule
from relampago.backends.gluon.boxes import (
    STEP,
    addressable,
    columns_box,
    dense_box,
    descriptor,
    packed_box,
    padded,
    steps_fit,
)
from relampago.backends.gluon.combine import LINES, combine
from relampago.backends.gluon.sizes import (
    ROWS,
    SHARED,
    Kind,
    Sides,
    masks_of,
    pack_of,
    size_of,
)
from relampago.backends.gluon.sm90_fp8 import attend_fp8
from relampago.plan import Plan
from relampago.problem import Arrays
from relampago.quant.cast import E4M3
from relampago.quant.kernels import columns_in_e4m3, rows_in_e4m3


def forward(plan: Plan, x: Arrays, multiprocessors: int) -> tuple[Tensor, Tensor]:
    """Out, bf16 or fp16, shaped like q with the head dim of v, and LSE, (B, H, Lq) or (H, total)."""
    if 0 in (*x.q.shape[:-1], x.len_q, x.batch, x.k.shape[-3]):
        return host.nothing(x)
    given, scale = host.positive(x.q.bfloat16(), x.scale) if x.scale <= 0 else (x.q, x.scale)
    (q, of_q), (k, of_k), (v, of_v) = operands(
        replace(x, q=given if x.q.dtype != E4M3 else given.to(E4M3))
    )
    dim, dim_v = x.q.shape[-1], x.v.shape[-1]
    start, end, stride = host.tables_of(x)
    setting = setting_of(
        q.shape, q.stride(), k.shape, k.stride(), v.shape, dim, dim_v, plan, x.batch, x.len_q, x.len_k,
        x.mods, x.band[:4], x.cu_q is not None, stride, multiprocessors, x.out_dtype,
    )  # fmt: skip
    out = (torch.empty if x.cu_q is None else torch.zeros)(
        setting.shape_out, dtype=x.out_dtype, device=q.device
    )
    lse = host.lse_of(x, None if x.cu_q is None else -math.inf)
    size, cap = setting.size, setting.cap
    is_split = size.splits > 1
    part, found = host.parts_of(size, x) if is_split else (None, lse)
    sinks = None if is_split else x.sinks
    extra = host.Extra(x.cu_q, x.cu_k, sinks, cap, start, end)
    views = [
        None if box is None else descriptor(t, box)
        for t, box in zip((q, k, v, out), setting.boxes, strict=True)
    ]
    host.launch(
        attend_fp8, setting.grid, plan, *views, part, found,
        host.counter(q.device) if setting.schedule == schedule.DYNAMIC else lse,
        scale * host.LOG2E if cap is None else scale / cap, of_q, of_k, of_v,
        of_q.shape[2], of_k.shape[2], of_v.shape[2], *size, *setting.sides, extra, *setting.constants,
    )  # fmt: skip
    if is_split:
        host.launch(
            combine, -(-size.rows // LINES), host.COMBINING, part, found, out, lse, x.sinks, size.splits, size.rows,
            size.heads, x.len_q if x.cu_q is None else size.len_q, size.dim_v, padded(size.dim_v),
        )  # fmt: skip
    return out, lse


def operands(x: Arrays) -> tuple[tuple[Tensor, Tensor], ...]:
    """(values, scales) of q, k and v, as TMA can address them; v transposed."""
    if x.q.dtype != E4M3:
        return (
            rows_in_e4m3(x.q, x.cu_q, x.len_q),
            rows_in_e4m3(x.k, x.cu_k, x.len_k),
            columns_in_e4m3(x.v, x.cu_k, x.len_k),
        )
    scales = [s.contiguous() for s in (x.q_scale, x.k_scale, x.v_scale) if s is not None]
    v = columns_in_e4m3(x.v, x.cu_k, x.len_k, scales[2])[0]
    return (addressable(x.q), scales[0]), (addressable(x.k), scales[1]), (v, scales[2])


@functools.lru_cache(maxsize=4096)
def setting_of(
    shape_q: tuple[int, ...], strides_q: tuple[int, ...], shape_k: tuple[int, ...],
    strides_k: tuple[int, ...], shape_v: tuple[int, ...], dim: int, dim_v: int,
    plan: Plan, batch: int, len_q: int, len_k: int, mods: tuple[str, ...], band: tuple[Any, ...], packed: bool,
    table_stride: int | None, multiprocessors: int, out_dtype: torch.dtype,
) -> host.Setting:  # fmt: skip
    """The launch for these shapes, which a warm call finds here."""
    assert steps_fit(shape_q, strides_q, STEP)
    assert steps_fit(shape_k, strides_k, STEP)
    kind = Kind(Sides(*band), packed, table_stride, multiprocessors)
    d, e = padded(dim), padded(dim_v)
    pack = pack_of(len_q, shape_q[-2] // shape_k[-2], plan.block_q)
    size = size_of(shape_q, shape_k, dim_v, batch, len_q, len_k, kind, plan, pack)
    is_split = size.splits > 1
    by = schedule.DYNAMIC if packed or kind.tables or is_split else plan.schedule
    shape_out = (*shape_q[:-1], dim_v)
    strides_out = [math.prod(shape_out[i + 1 :]) for i in range(len(shape_out))]
    width = e // max(1, plan.promote)
    view = packed_box if packed else dense_box
    boxes = (
        view(shape_q, strides_q, ROWS // pack, d, E4M3, pack),
        view(shape_k, strides_k, plan.block_k, d, E4M3),
        columns_box(shape_v, e, plan.block_k, E4M3),
        None if is_split else view(shape_out, strides_out, ROWS // pack, width, out_dtype, pack),
    )  # fmt: skip
    consumers = plan.block_q // ROWS
    masks = masks_of(len_q, len_k, kind, plan, pack, is_split)
    chained = bool(plan.chain) and not is_split and room(plan, d, e) <= SHARED
    constants = (
        consumers, plan.block_k, d, e, pack, plan.stages, by, *masks, plan.pingpong, plan.pin,
        is_split, plan.promote, chained, *host.REGISTERS[consumers],
    )  # fmt: skip
    grid = size.count if by == schedule.GRID else min(size.count, multiprocessors)
    return host.Setting(
        grid, by, boxes, size, kind.sides, host.softcap_of(mods), constants, shape_out
    )


def room(plan: Plan, width: int, width_v: int) -> int:
    """Bytes of shared memory, where there are queries of two tiles."""
    rings = plan.stages * plan.block_k * (width + width_v)
    return plan.block_q * (2 * width + 2 * width_v) + rings + 1024
