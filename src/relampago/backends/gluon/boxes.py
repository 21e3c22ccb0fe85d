"""Tensors as TMA sees them: tiles that it can address, what lies beyond them, and how a head dim is cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from relampago.backends.gluon import schedule

STEP = 16  # bytes: TMA's unit of addresses and strides
DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
CUTS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 160: (128, 32), 192: (128, 64), 256: (256, 0)}


class Box(NamedTuple):
    """TMA's view of a tensor, but for the address."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any


def addressable(t: Tensor) -> Tensor:
    """The tensor, or a copy that TMA can address: 16-byte steps, a 16-byte address, the last dimension contiguous."""
    step = STEP // t.element_size()
    if t.data_ptr() % STEP == 0 and steps_fit(t.shape, t.stride(), step):
        return t
    dim = t.shape[-1]
    copy = t.new_zeros((*t.shape[:-1], -(-dim // step) * step))
    copy[..., :dim] = t
    return copy


def steps_fit(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    """Whether TMA can step through a tensor."""
    *outer, (dim, inner) = zip(shape, strides, strict=True)
    return (inner == 1 or dim == 1) and all(s > 0 and s % step == 0 for n, s in outer if n > 1)


def padded(dim: int) -> int:
    """The width of a tile that is not cut: a power of two, at least what one swizzle pattern spans."""
    return max(64, 1 << (dim - 1).bit_length())


def cut(dim: int) -> tuple[int, int]:
    """A head dim as one power of two, or two: tiles are nothing else. 96 is 64 + 32, 192 is 128 + 64, 80 runs as 96."""
    return CUTS[min(n for n in CUTS if n >= dim)]


def descriptor(t: Tensor, box: Box) -> TensorDescriptor:
    """TMA's view of a tensor. `addressable` saw to what the constructor would check again."""
    found = object.__new__(TensorDescriptor)
    found.base, found.padding = t, "zero"
    found.shape, found.strides, found.block_shape, found.layout = box
    return found


def dense_box(
    shape: Any, strides: Any, rows: int, width: int, dtype: torch.dtype, heads: int = 1
) -> Box:
    """(B, L, H, D), in boxes [1, rows, heads, width]; what lies beyond the tensor reads as 0."""
    outer = [s if n > 1 else width for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    return _box([*shape], [*outer, 1], [1, rows, heads, width], dtype)


def packed_box(
    shape: Any, strides: Any, rows: int, width: int, dtype: torch.dtype, heads: int = 1
) -> Box:
    """(total, H, D) for `schedule.packed_rows`: FAR steps of the first stride, which come to FAR rows less modulo 2^64
    bytes, then rows twice, of which the second ends at FAR.
    """
    row, head = (s if n > 1 else width for n, s in zip(shape[:2], strides[:2], strict=True))
    back = (1 << 64) // dtype.itemsize // schedule.FAR - row
    most = (1 << 31) - (1 << 16)
    return _box(
        [most, most, schedule.FAR, *shape[1:]],
        [back, row, row, head, 1],
        [1, 1, rows, heads, width],
        dtype,
    )


def columns_box(shape: tuple[int, ...], rows: int, keys: int, dtype: torch.dtype) -> Box:
    """(B, G, E, columns) of `quant.columns`, contiguous, in boxes [1, 1, rows, keys]."""
    strides = [math.prod(shape[i + 1 :]) for i in range(4)]
    return _box([*shape], strides, [1, 1, rows, keys], dtype)


def _box(shape: list[int], strides: list[int], block: list[int], dtype: torch.dtype) -> Box:
    return Box(shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype]))
