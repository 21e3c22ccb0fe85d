"""The host's side of the forward: descriptors, the shape of the launch, outputs. No step waits for the device."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from relampago.backends.gluon import schedule
from relampago.backends.gluon.sm90_forward import attend
from relampago.mods import rule_of
from relampago.plan import Plan
from relampago.problem import Arrays

LOG2E = 1.4426950408889634
L2_BYTES = 32 << 20  # of keys and values that heads in flight share, of the 50 MiB
SHARED = 227 * 1024  # bytes of a block of threads
ROWS = 64  # of a warpgroup
REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a thread: consumers' and producer's
STEP = 16  # bytes: TMA's unit of addresses and strides
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Size(NamedTuple):
    """Lengths and counts."""

    len_q: int  # of packed sequences, all together
    len_k: int
    heads: int
    group: int  # query heads per kv head
    tiles: int  # row tiles of a head
    places: int  # sequences times heads
    section: int  # of these, those in flight together
    count: int  # tiles in all
    shift: int  # rows that the first two tiles share, so that the last one is full


class Sides(NamedTuple):
    """A `Band`'s numbers."""

    offset: int
    left: int | None
    right: int | None
    prefix: int | None


class Extra(NamedTuple):
    """What else a call may have; None compiles to nothing."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    sinks: Tensor | None
    cap: float | None  # what scores are multiplied by before tanh


class Masks(NamedTuple):
    """Which blocks of keys need a mask: compiled into the kernel."""

    peeled: bool  # the first block visited
    looped: bool  # the others
    ends: bool  # whether a mask must look at the last key


class Box(NamedTuple):
    """TMA's view of a tensor, but for the address."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any


class Setting(NamedTuple):
    """All of a launch that its shapes decide."""

    grid: int
    schedule: int
    boxes: tuple[Box, ...]  # q, k, v, out
    size: Size
    sides: Sides
    cap: float | None
    constants: tuple[Any, ...]


def forward(plan: Plan, x: Arrays, multiprocessors: int) -> tuple[Tensor, Tensor]:
    """Out in the queries' dtype, shaped like q with the head dim of v, and LSE, (B, H, Lq) or (H, total)."""
    if 0 in (*x.q.shape[:-1], x.len_q, x.batch, x.k.shape[-3]):
        return _nothing(x)
    q, scale = positive(x.q, x.scale)
    q, k, v = addressable(q), addressable(x.k), addressable(x.v)
    setting = setting_of(
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, plan, multiprocessors,
        x.batch, x.len_q, x.len_k, Sides(*x.band[:4]), x.mods, x.cu_q is not None,
    )  # fmt: skip
    # rows of no sequence stay as they are: 0 and -inf; a copy of v may be wider than v
    make, value = (torch.empty, None) if x.cu_q is None else (torch.zeros, float("-inf"))
    out = make((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = _lse(x, value)
    cap = setting.cap
    launch(
        attend, setting.grid, plan, *map(descriptor, (q, k, v, out), setting.boxes), lse,
        counter(q.device) if setting.schedule == schedule.DYNAMIC else lse,
        (scale if cap is None else cap) * LOG2E, setting.size, setting.sides,
        Extra(x.cu_q, x.cu_k, x.sinks, None if cap is None else scale / cap), *setting.constants,
    )  # fmt: skip
    dim_v = x.v.shape[-1]
    return out if out.shape[-1] == dim_v else out[..., :dim_v].contiguous(), lse


@functools.lru_cache(maxsize=4096)
def setting_of(
    shape_q: tuple[int, ...], strides_q: tuple[int, ...], shape_k: tuple[int, ...],
    strides_k: tuple[int, ...], shape_v: tuple[int, ...], strides_v: tuple[int, ...],
    dtype: torch.dtype, plan: Plan, multiprocessors: int, batch: int, len_q: int, len_k: int,
    sides: Sides, mods: tuple[str, ...], packed: bool,
) -> Setting:  # fmt: skip
    """The launch for these shapes; a warm call finds it here."""
    width, width_v = padded(shape_q[-1]), padded(shape_v[-1])
    size = size_of(shape_q, shape_k, shape_v[-1], batch, len_q, len_k, sides, packed, plan)
    by = schedule.DYNAMIC if packed else plan.schedule
    shape_out = (*shape_q[:-1], shape_v[-1])
    strides_out = [math.prod(shape_out[i + 1 :]) for i in range(len(shape_out))]
    parts = (
        (shape_q, strides_q, ROWS, width), (shape_k, strides_k, plan.block_k, width),
        (shape_v, strides_v, plan.block_k, width_v), (shape_out, strides_out, ROWS, width_v),
    )  # fmt: skip
    view = packed_box if packed else dense_box
    consumers = plan.block_q // ROWS
    constants = (
        consumers, plan.block_k, width, width_v, plan.stages, by,
        *masks_of(sides, len_q, len_k, packed, plan), bool(plan.pingpong), bool(plan.pin),
        shares(plan, width, width_v), *REGISTERS[consumers],
    )  # fmt: skip
    grid = size.count if by == schedule.GRID else min(size.count, multiprocessors)
    boxes = tuple(view(*part, dtype) for part in parts)
    return Setting(grid, by, boxes, size, sides, softcap_of(mods), constants)


def _lse(x: Arrays, value: float | None) -> Tensor:
    s = x.q.shape
    shape = (s[0], s[2], s[1]) if x.cu_q is None else (s[1], s[0])
    lse = torch.empty(shape, dtype=torch.float32, device=x.q.device)
    return lse if value is None else lse.fill_(value)


def _nothing(x: Arrays) -> tuple[Tensor, Tensor]:
    """Without keys: 0, and the LSE of nothing or of the sinks."""
    out = x.q.new_zeros((*x.q.shape[:-1], x.v.shape[-1]))
    lse = _lse(x, float("-inf"))
    return out, lse if x.sinks is None else lse.copy_(x.sinks[:, None].expand(lse.shape))


def size_of(
    shape_q: tuple[int, ...], shape_k: tuple[int, ...], dim_v: int, batch: int, len_q: int,
    len_k: int, sides: Sides, packed: bool, plan: Plan,
) -> Size:  # fmt: skip
    """Lengths, tiles, and how many heads are in flight together."""
    heads, width = shape_q[-2], shape_q[-1] + dim_v
    group, places = heads // shape_k[-2], batch * heads
    tiles = -(-len_q // plan.block_q)
    together = 1
    if packed or sides.left is not None or sides.right is not None:
        together = max(1, L2_BYTES // max(1, len_k * width * 2))
    section = min(together * group, places)
    # under causal a tile that is not full had better be the first one, which sees few keys
    shift = tiles * plan.block_q - len_q if sides.right is not None and not packed else 0
    return Size(
        shape_q[-3], shape_k[-3], heads, group, tiles, places, section, tiles * places, shift
    )


def softcap_of(mods: tuple[str, ...]) -> float | None:
    """The cap, if there is one; `why_not` lets no other mod pass."""
    return float(rule_of(mods[0]).slots[0]) if mods else None


def launch(kernel: Any, grid: int, plan: Plan, *args: Any) -> None:
    """Start a kernel on the current device. Tests put a compiler in its place."""
    kernel.run(*args, grid=(grid, 1, 1), warmup=False, num_warps=plan.warps)


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and scale with the same scores, scale above 0: a row's maximum must stay one when it is scaled."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def addressable(t: Tensor) -> Tensor:
    """The tensor, or a copy that TMA can address: 16-byte steps, a 16-byte address, the last dimension contiguous."""
    step = STEP // t.element_size()
    if t.data_ptr() % STEP == 0 and _steps_fit(t.shape, t.stride(), step):
        return t
    dim = t.shape[-1]
    copy = t.new_zeros((*t.shape[:-1], -(-dim // step) * step))
    copy[..., :dim] = t
    return copy


@functools.lru_cache(maxsize=4096)
def _steps_fit(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    *outer, (dim, inner) = zip(shape, strides, strict=True)
    return (inner == 1 or dim == 1) and all(s > 0 and s % step == 0 for n, s in outer if n > 1)


def padded(dim: int) -> int:
    """The width of a tile: a power of two, at least what one swizzle pattern spans."""
    return max(64, 1 << (dim - 1).bit_length())


def descriptor(t: Tensor, box: Box) -> TensorDescriptor:
    """TMA's view of a tensor. `addressable` saw to what the constructor would check again."""
    found = object.__new__(TensorDescriptor)
    found.base, found.padding = t, "zero"
    found.shape, found.strides, found.block_shape, found.layout = box
    return found


def dense_box(shape: Any, strides: Any, rows: int, width: int, dtype: torch.dtype) -> Box:
    """(B, L, H, D), in boxes [1, rows, 1, width]; what lies beyond the tensor reads as 0."""
    outer = [s if n > 1 else width for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    return _box([*shape], [*outer, 1], [1, rows, 1, width], dtype)


def packed_box(shape: Any, strides: Any, rows: int, width: int, dtype: torch.dtype) -> Box:
    """(total, H, D) for `schedule.packed_rows`: FAR steps of the first stride, which come to FAR rows less modulo 2^64
    bytes, then rows twice, of which the second ends at FAR.
    """
    row, head = (s if n > 1 else width for n, s in zip(shape[:2], strides[:2], strict=True))
    back = (1 << 64) // dtype.itemsize // schedule.FAR - row
    most = (1 << 31) - (1 << 16)
    return _box(
        [most, most, schedule.FAR, *shape[1:]],
        [back, row, row, head, 1],
        [1, 1, rows, 1, width],
        dtype,
    )


def _box(shape: list[int], strides: list[int], block: list[int], dtype: torch.dtype) -> Box:
    return Box(shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype]))


def masks_of(sides: Sides, len_q: int, len_k: int, packed: bool, plan: Plan) -> Masks:
    """Which blocks need a mask. Under causal with an aligned diagonal only the first one visited does."""
    offset, left, right, prefix = sides
    ends = packed or len_k % plan.block_k != 0
    if right is not None and prefix is None:
        ends = ends and (offset + right > 0 if packed else len_q - 1 + offset + right >= len_k)
    if left is None and right is None:
        return Masks(ends, False, ends)
    # the last row of a tile is the last that sees a block
    ends_there = len_q % plan.block_q == 0 and (offset + (right or 0)) % plan.block_q == 0
    diagonal = ends_there and plan.block_k % plan.block_q == 0
    simple = diagonal and not packed and left is None and prefix is None
    return Masks(True, not simple, ends)


def shares(plan: Plan, width: int, width_v: int) -> bool:
    """Whether O's tile must lie where Q's was, for want of room."""
    rings = plan.block_q * width + plan.stages * plan.block_k * (width + width_v)
    return width == width_v and (rings + plan.block_q * width_v) * 2 + 1024 > SHARED


class Counters:
    """Counters of a device that stand at 0; every launch leaves its own so.

    Launches of a stream never overlap and share one. A CUDA graph may be replayed on any stream, so that each launch in
    it takes one for good.
    """

    def __init__(self, device: torch.device) -> None:
        self.cells = torch.zeros((1 << 12, STEP // 4), dtype=torch.int32, device=device)
        self.used = 0  # rows of cells: pointers that are not aligned would be compiled for apart
        self.of_stream: dict[int, Tensor] = {}

    def take(self) -> Tensor | None:
        """One that nobody has; None when all are taken."""
        if self.used == self.cells.shape[0]:
            return None
        self.used += 1
        return self.cells[self.used - 1]


_COUNTERS: dict[int, Counters] = {}


def counter(device: torch.device) -> Tensor:
    """A counter at 0 for one launch on the current stream."""
    index = device.index or 0
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if index not in _COUNTERS and not capturing:
        _COUNTERS[index] = Counters(device)
    counters = _COUNTERS.get(index)
    found = None
    if counters is not None and capturing:
        found = counters.take()
    elif counters is not None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if stream not in counters.of_stream and (taken := counters.take()) is not None:
            counters.of_stream[stream] = taken
        found = counters.of_stream.get(stream)
    return torch.zeros(STEP // 4, dtype=torch.int32, device=device) if found is None else found
