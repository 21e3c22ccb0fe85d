"""The host's side of the forward: descriptors, the shape of the launch, outputs. No step waits for the device."""

from __future__ import annotations

import functools
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


def forward(plan: Plan, x: Arrays, multiprocessors: int) -> tuple[Tensor, Tensor]:
    """Out in the queries' dtype, shaped like q with the head dim of v, and LSE, (B, H, Lq) or (H, total)."""
    if 0 in (*x.q.shape[:-1], x.len_q, x.batch, x.k.shape[-3]):
        return _nothing(x)
    q, scale = positive(x.q, x.scale)
    q, k, v = addressable(q), addressable(x.k), addressable(x.v)
    packed = x.cu_q is not None
    # rows of no sequence stay as they are: 0 and -inf; a copy of v may be wider than v
    make, value = (torch.zeros, float("-inf")) if packed else (torch.empty, None)
    out = make((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = _lse(x, value)
    width, width_v = padded(x.q.shape[-1]), padded(x.v.shape[-1])
    consumers = plan.block_q // ROWS
    size = size_of(x, plan)
    by = schedule.DYNAMIC if packed else plan.schedule
    grid = size.count if by == schedule.GRID else min(size.count, multiprocessors)
    box = packed_descriptor if packed else descriptor
    cap = softcap_of(x.mods)
    launch(
        attend, grid, plan, box(q, ROWS, width), box(k, plan.block_k, width),
        box(v, plan.block_k, width_v), box(out, ROWS, width_v), lse,
        counter(q.device) if by == schedule.DYNAMIC else lse,
        (scale if cap is None else cap) * LOG2E, size, Sides(*x.band[:4]),
        Extra(x.cu_q, x.cu_k, x.sinks, None if cap is None else scale / cap),
        consumers, plan.block_k, width, width_v, plan.stages, by,
        *masks_of(x, plan.block_q, plan.block_k), bool(plan.pingpong), bool(plan.pin),
        shares(plan, width, width_v), *REGISTERS[consumers],
    )  # fmt: skip
    dim_v = x.v.shape[-1]
    return out if out.shape[-1] == dim_v else out[..., :dim_v].contiguous(), lse


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


def size_of(x: Arrays, plan: Plan) -> Size:
    """Lengths, tiles, and how many heads are in flight together."""
    heads, kv_heads, width = x.q.shape[-2], x.k.shape[-2], x.q.shape[-1] + x.v.shape[-1]
    group, places = heads // kv_heads, x.batch * heads
    tiles = -(-x.len_q // plan.block_q)
    together = 1
    if x.band.bounded or x.cu_q is not None:
        together = max(1, L2_BYTES // max(1, x.len_k * width * x.q.element_size()))
    section = min(together * group, places)
    len_q, len_k = x.q.shape[-3], x.k.shape[-3]
    return Size(len_q, len_k, heads, group, tiles, places, section, tiles * places)


@functools.lru_cache(maxsize=1024)
def softcap_of(mods: tuple[str, ...]) -> float | None:
    """The cap, if there is one; `why_not` lets no other mod pass."""
    return rule_of(mods[0]).slots[0] if mods else None


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
    steps = zip(t.shape, t.stride(), strict=True)
    *outer, inner = ((n, s) for n, s in steps)
    fits = all(s > 0 and s % step == 0 for n, s in outer if n > 1)
    if t.data_ptr() % STEP == 0 and fits and (inner[1] == 1 or inner[0] == 1):
        return t
    dim = t.shape[-1]
    copy = t.new_zeros((*t.shape[:-1], -(-dim // step) * step))
    copy[..., :dim] = t
    return copy


def padded(dim: int) -> int:
    """The width of a tile: a power of two, at least what one swizzle pattern spans."""
    return max(64, 1 << (dim - 1).bit_length())


def descriptor(t: Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA's view of (B, L, H, D), in boxes [1, rows, 1, width]; what lies beyond the tensor reads as 0."""
    block, layout = _box(rows, width, t.dtype)
    strides = [s if n > 1 else width for n, s in zip(t.shape[:-1], t.stride(), strict=False)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], block, layout)


@functools.lru_cache(maxsize=256)
def _box(rows: int, width: int, dtype: torch.dtype, outer: int = 1) -> tuple[list[int], Any]:
    block = [1] * outer + [rows, 1, width]
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


def packed_descriptor(t: Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA's view of (total, H, D) for `schedule.packed_rows`: FAR steps of the first stride, which come to FAR rows less
    modulo 2^64 bytes, then rows twice, of which the second ends at FAR.
    """
    block, layout = _box(rows, width, t.dtype, 2)
    row, head = t.stride(0), t.stride(1) if t.shape[1] > 1 else width
    strides = [(1 << 64) // t.element_size() // schedule.FAR - row, row, row, head, 1]
    most = (1 << 31) - (1 << 16)
    shape = [most, most, schedule.FAR, *t.shape[1:]]
    return TensorDescriptor(t, shape, strides, block, layout)


def masks_of(x: Arrays, block_q: int, block_k: int) -> Masks:
    """Which blocks need a mask. Under causal with an aligned diagonal only the first one visited does."""
    band, packed = x.band, x.cu_q is not None
    ends = packed or x.len_k % block_k != 0
    if band.right is not None and band.prefix is None:
        last = x.len_q - 1 + band.offset + band.right - x.len_k
        ends = ends and (band.offset + band.right > 0 if packed else last >= 0)
    if band.left is None and band.right is None:
        return Masks(ends, False, ends)
    aligned = block_k % block_q == 0 and (band.offset + (band.right or 0)) % block_q == 0
    simple = aligned and not packed and band.left is None and band.prefix is None
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
