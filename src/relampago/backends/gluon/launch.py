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
from relampago.masks.rules import Band
from relampago.plan import Plan
from relampago.problem import Arrays

LOG2E = 1.4426950408889634
L2_BYTES = 32 << 20  # of keys and values that heads in flight share, of the 50 MiB
SHARED = 227 * 1024  # bytes of a block of threads
ROWS = 64  # of a warpgroup
REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a thread of a consumer and of the producer, by consumers
STEP = 16  # bytes: TMA's unit of addresses and strides
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Masks(NamedTuple):
    """Which blocks of keys need a mask: compiled into the kernel."""

    peeled: bool  # the first block visited
    looped: bool  # the others
    ends: bool  # whether a mask must look at the last key


def forward(plan: Plan, x: Arrays, multiprocessors: int) -> tuple[Tensor, Tensor]:
    """Out (B, Lq, H, E) in the queries' dtype, and LSE (B, H, Lq)."""
    batch, len_q, heads, dim = x.q.shape
    len_k, kv_heads, dim_v = x.k.shape[1], x.k.shape[2], x.v.shape[-1]
    lse = torch.empty((batch, heads, len_q), dtype=torch.float32, device=x.q.device)
    if 0 in (batch, len_q, heads, len_k):
        out = torch.zeros((batch, len_q, heads, dim_v), dtype=x.q.dtype, device=x.q.device)
        return out, lse.fill_(float("-inf"))
    q, scale = positive(x.q, x.scale)
    q, k, v = addressable(q), addressable(x.k), addressable(x.v)
    out = torch.empty(
        (batch, len_q, heads, v.shape[-1]), dtype=q.dtype, device=q.device
    )  # a copy of v may be wider
    width, width_v = padded(dim), padded(dim_v)
    consumers = plan.block_q // ROWS
    tiles = -(-len_q // plan.block_q)
    count = tiles * batch * heads
    grid = count if plan.schedule == schedule.GRID else min(count, multiprocessors)
    masks = masks_of(x.band, len_q, len_k, plan.block_q, plan.block_k)
    together = 1
    if x.band.bounded:
        together = max(1, L2_BYTES // (len_k * (dim + dim_v) * q.element_size()))
    launch(
        attend, grid, plan,
        descriptor(q, ROWS, width), descriptor(k, plan.block_k, width),
        descriptor(v, plan.block_k, width_v), descriptor(out, ROWS, width_v),
        lse, counter(q.device) if plan.schedule == schedule.DYNAMIC else lse,
        scale * LOG2E, len_q, len_k, heads, heads // kv_heads, tiles,
        min(together * (heads // kv_heads), batch * heads), count,
        x.band.offset, x.band.left, x.band.right, x.band.prefix,
        consumers, plan.block_k, width, width_v, plan.stages, plan.schedule, *masks,
        bool(plan.pingpong), bool(plan.pin), shares(plan, width, width_v), *REGISTERS[consumers],
    )  # fmt: skip
    return out if out.shape[-1] == dim_v else out[..., :dim_v].contiguous(), lse


def launch(kernel: Any, grid: int, plan: Plan, *args: Any) -> None:
    """Start a kernel on the current device. Tests put a compiler in its place."""
    kernel.run(*args, grid=(grid, 1, 1), warmup=False, num_warps=plan.warps)


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and scale with the same scores, scale above 0: a row's maximum must stay one when it is scaled."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def addressable(t: Tensor) -> Tensor:
    """The tensor, or a copy that TMA can address: 16-byte steps from a 16-byte address, the last dimension contiguous."""
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
def _box(rows: int, width: int, dtype: torch.dtype) -> tuple[list[int], Any]:
    block = [1, rows, 1, width]
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


def masks_of(band: Band, len_q: int, len_k: int, block_q: int, block_k: int) -> Masks:
    """Which blocks need a mask. Under causal with an aligned diagonal only the first one visited does."""
    ends = len_k % block_k != 0
    if band.right is not None and band.prefix is None:
        ends = ends and len_q - 1 + band.offset + band.right >= len_k
    if band.left is None and band.right is None:
        return Masks(ends, False, ends)
    aligned = block_k % block_q == 0 and (band.offset + (band.right or 0)) % block_q == 0
    return Masks(True, band.left is not None or band.prefix is not None or not aligned, ends)


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
