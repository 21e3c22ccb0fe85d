"""The casts on a GPU, in one pass each: rotate, scale and cast rows; scale, cast and transpose values.

A program takes BLOCK tokens of a head, which share a scale. The Hadamard transform is a product with a matrix of ±1,
summed in fp32, on the tensor cores: a dim of 256 is two of 128 and one step of the fast transform between them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from relampago.quant.cast import BLOCK, E4M3, LARGEST, LEAST_SCALE, MOST_SCALE
from relampago.quant.columns import column_of, columns_in_all, first_column
from relampago.quant.rotation import parts, rotate, signs
from relampago.tape import note, supplied

_compiled = (lambda fn: fn) if os.environ.get("TRITON_INTERPRET") == "1" else triton.jit
first_column_of, place_of_key = _compiled(first_column), _compiled(column_of)
MOST: tl.constexpr = tl.constexpr(LARGEST)
LEAST_S: tl.constexpr = tl.constexpr(LEAST_SCALE)
MOST_S: tl.constexpr = tl.constexpr(MOST_SCALE)
ROWS: tl.constexpr = tl.constexpr(BLOCK)
WIDEST = 128  # of a Hadamard matrix


@triton.jit
def rows_of(cu, b, length):
    """(first row, rows) of a sequence; clamped to the tensor where packed."""
    if cu is None:
        return b * 0, length
    else:
        first = tl.minimum(tl.maximum(tl.load(cu + b), 0), length)
        end = tl.minimum(tl.maximum(tl.load(cu + b + 1), first), length)
        return first, end - first


@triton.jit
def hadamard(N: tl.constexpr):
    """The matrix [N, N] of 1 and -1: the parity of the bits that row and column share."""
    i = tl.arange(0, N)[:, None]
    x = i & tl.arange(0, N)[None, :]
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    return 1.0 - 2.0 * (x & 1).to(tl.float32)


@triton.jit
def load_part(
    x, sign, rows, inside, stride, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Columns COL to COL + WIDTH of a block [ROWS, WIDTH] in fp32, rotated."""
    col = COL + tl.arange(0, WIDTH)
    mask = inside[:, None] & (col < DIM)[None, :]
    tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + col[None, :], mask=mask, other=0.0)
    if ROTATE:
        turn = tl.load(sign + col)[:, None] * hadamard(WIDTH)
        tile = tl.dot(tile, turn.to(tile.dtype))
    return tile.to(tl.float32)


@triton.jit
def in_units(x, scale):
    """x by its scale, bit for bit as `quantise` has it; what is beyond e4m3's range saturates, NaN stays NaN.

    Ties decide bits, and Triton's own division may be two units off: one of IEEE's for all, then a product for each.
    """
    x = x * tl.math.div_rn(1.0, scale)
    x = tl.maximum(x, -MOST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_part(y, rows, inside, width, tile, scale, COL: tl.constexpr):
    """The inverse of `load_part`, in e4m3."""
    tile = in_units(tile, scale).to(y.dtype.element_ty)
    col = COL + tl.arange(0, tile.shape[1])
    tl.store(y + rows.to(tl.int64)[:, None] * width + col[None, :], tile, mask=inside[:, None])


@triton.jit
def largest(tile):
    """Of a tile; NaN counts for nothing."""
    return tl.max(tl.max(tl.where(tile == tile, tl.abs(tile), 0.0), 1), 0)


@triton.jit
def scale_of(most):
    """The scale that brings the largest entry to e4m3's."""
    return tl.minimum(tl.maximum(most * (1.0 / MOST), LEAST_S), MOST_S)


@triton.jit(do_not_specialize=["length", "blocks"])
def cast_rows(
    x, y, scales, sign, cu, length, heads, blocks, stride_b, stride_l, stride_h,
    DIM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, ROTATE: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """A block of rows of a head: y (…, heads, D1 + D2) and its scale. JOIN: the parts are halves of one transform."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, n = rows_of(cu, b, length)  # pyright: ignore[reportGeneralTypeIssues]
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    x += tl.cast(b, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    a = load_part(x, sign, first + rows, inside, stride_l, DIM, 0, D1, ROTATE)
    norm = 1.0 if not ROTATE else D1**-0.5
    if D2 > 0:
        c = load_part(x, sign, first + rows, inside, stride_l, DIM, D1, D2, ROTATE)
        if JOIN:
            a, c = (a + c) * (2 * D1) ** -0.5, (a - c) * (2 * D1) ** -0.5
        else:
            a = a * norm
            c = c * (1.0 if not ROTATE else D2**-0.5)
        most = tl.maximum(largest(a), largest(c))
    else:
        a = a * norm
        most = largest(a)
    scale = scale_of(most)
    tl.store(scales + (b * heads + head) * blocks + block, scale)
    width = heads * (D1 + D2)
    y += head * (D1 + D2)
    if cu is None:
        y += tl.cast(b, tl.int64) * length * width
    store_part(y, first + rows, inside, width, a, scale, 0)
    if D2 > 0:
        store_part(y, first + rows, inside, width, c, scale, D1)


@triton.jit(do_not_specialize=["length", "blocks", "columns"])
def cast_columns(
    v, y, scales, cu, length, heads, blocks, columns, stride_b, stride_l, stride_h,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A block of values of a head, transposed as `columns` says, 0 beyond the sequence; with a scale if SCALED."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, n = rows_of(cu, b, length)  # pyright: ignore[reportGeneralTypeIssues]
    if block * ROWS >= tl.maximum(
        n, 1
    ):  # a sequence without keys has a block of zeros, which are read
        return
    keys = block * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    v += tl.cast(b, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    places = v + (first + keys).to(tl.int64)[:, None] * stride_l + col[None, :]
    tile = tl.load(places, mask=(keys < n)[:, None] & (col < DIM)[None, :], other=0.0)
    if SCALED:
        wide = tile.to(tl.float32)
        scale = scale_of(largest(wide))
        tl.store(scales + (b * heads + head) * blocks + block, scale)
        tile = in_units(wide, scale).to(y.dtype.element_ty)
    start = place_of_key(keys)
    if cu is None:
        y += tl.cast(b, tl.int64) * heads * DIM * columns
    else:
        start += first_column_of(first, b, ROWS)
    at = (head * DIM + col).to(tl.int64)[None, :] * columns + start[:, None]
    tl.store(y + at, tile, mask=(col < DIM)[None, :])


def launch(kernel: Any, grid: tuple[int, int, int], warps: int, *args: Any) -> None:
    """Start a kernel on the current device. Tests put a compiler in its place."""
    compiled = kernel.run(*args, grid=grid, warmup=False, num_warps=warps, enable_fp_fusion=True)
    note(compiled, grid, args)


def warps_for(width: int) -> int:
    """Of a program: a block of 256 columns would spill with 8."""
    return 16 if width > WIDEST else 8


def rows_in_e4m3(
    x: Tensor, cu: Tensor | None, longest: int, *, rotated: bool = True
) -> tuple[Tensor, Tensor]:
    """(values, scales per block) of (B, L, heads, D) or packed (T, heads, D), as `quantise(rotate(x))` has them.

    Values are padded with zeros to a width that is a multiple of 16 bytes.
    """
    dim, heads = x.shape[-1], x.shape[-2]
    pieces = parts(dim)
    fused = len(pieces) <= 2 and pieces[-1] >= 16 and dim <= 2 * WIDEST
    if rotated and not fused:
        x, rotated = rotate(x), False
    if dim == 2 * WIDEST:
        pieces = [WIDEST, WIDEST]
    if not fused:
        pieces = [_power(dim)]
    d1, d2 = (*pieces, 0)[:2]
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, strides = _lay(x, cu)
    blocks = max(1, -(-longest // BLOCK))
    y = torch.empty((*x.shape[:-1], d1 + d2), dtype=E4M3, device=x.device)
    scales = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
    launch(
        cast_rows, (blocks, heads, batch), warps_for(d1 + d2), x, y, scales,
        supplied(functools.partial(signs, dim, x.device)), cu, length, heads,
        blocks, *strides, dim, d1, d2, rotated, dim == 2 * WIDEST and rotated,
    )  # fmt: skip
    return y, scales


def columns_in_e4m3(
    v: Tensor, cu: Tensor | None, longest: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(values, scales) with keys as columns, see `quant.columns`; a v that is e4m3 keeps the scales it has."""
    dim, heads = v.shape[-1], v.shape[-2]
    v = v if v.stride(-1) == 1 else v.contiguous()
    batch, length, strides = _lay(v, cu)
    blocks = max(1, -(-longest // BLOCK))
    columns = blocks * BLOCK if cu is None else columns_in_all(length, batch, BLOCK)
    y = torch.empty((batch if cu is None else 1, heads, dim, columns), dtype=E4M3, device=v.device)
    given = scales is not None
    if scales is None:
        scales = torch.empty((batch, heads, blocks), dtype=torch.float32, device=v.device)
    launch(
        cast_columns, (blocks, heads, batch), warps_for(dim), v, y, scales, cu, length, heads, blocks, columns,
        *strides, dim, _power(dim), not given,
    )  # fmt: skip
    return y, scales


def _power(dim: int) -> int:
    """The next power of two, as tiles are wide."""
    return 1 << (max(16, dim) - 1).bit_length()


def _lay(x: Tensor, cu: Tensor | None) -> tuple[int, int, tuple[int, ...]]:
    """Sequences, rows (of one, or of all that are packed), strides of sequence, row and head."""
    if cu is None:
        return x.shape[0], x.shape[1], x.stride()[:3]
    return cu.shape[0] - 1, x.shape[0], (0, *x.stride()[:2])
