"""Flash decoding from keys and values in e4m3 for up to eight rows: the loop of `decode.py` on its side.

Half of the bytes leave half of the time, so that here instructions count. Scores stand as [keys, rows] and sums as
[columns, rows]: converted keys are the operand of a product as they come from shared memory, queries need no moves to
be the other, and eight rows fill an instruction that sixteen would. A value's bytes lie beside those of other columns,
and products want them beside those of other keys. So values are read as int16, two columns each: the load that
transposes words of 16 bits brings two columns of two keys, one permutation sorts their bytes, and even and odd columns
have a product each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from relampago.backends.triton.decode import (
    finish,
    foresee,
    load_keys,
    load_rows,
    pages_of,
    rows_of,
    tiles_of,
    weighed,
    work_of,
)
from relampago.backends.triton.tile import in_fp16, key_origin, keys_of, offset_of, scores
from relampago.problem import Arrays, Device

ROWS = 8  # of a tile: the narrow side of a product
WIDEST = 256  # head dim: a tile of more would not fit the registers
LEAST = 32  # columns: even and odd ones fill an instruction each
LOW = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, 0, 0x3120; mov.b32 {low, high}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, low; }"
)
HIGH = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, 0, 0x3120; mov.b32 {low, high}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, high; }"
)


@triton.jit
def _columns_interpreted(x):
    low = x.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    high = (x >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def _columns_compiled(x):  # LLVM takes the words of two apart, with five instructions for one
    low = tl.inline_asm_elementwise(LOW, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    high = tl.inline_asm_elementwise(HIGH, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    return low, high


# The e4m3 in the low bytes of int16, and those in the high ones, as fp16.
columns_of = _columns_interpreted if triton.knobs.runtime.interpret else _columns_compiled


@triton.jit
def load_columns(
    base, page, lay, k0, limit, stride, DIM: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
    PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_keys` as [WIDTH, BK]: a tile that is transposed later would go through shared memory once more."""
    key = tl.arange(0, BK)
    col = tl.arange(0, WIDTH)[:, None]
    if lay.page_table is None:
        row = tl.cast(k0, tl.int64) * stride.l + key.to(tl.int64) * stride.l
    elif PAGE % BK == 0:
        base += tl.cast(page, tl.int64) * stride.b + tl.cast(k0 % PAGE, tl.int64) * stride.l
        row = key.to(tl.int64) * stride.l
    else:
        row = page.to(tl.int64) * stride.b + ((k0 + key) % PAGE).to(tl.int64) * stride.l
    at = base + row[None, :] + col
    inside = (key < limit - k0)[None, :]
    if WIDTH > DIM:
        return tl.load(at, mask=inside & (col < DIM), other=0)
    elif MASKED:
        return tl.load(at, mask=inside, other=0)
    else:
        return tl.load(at)


@triton.jit(do_not_specialize=["size", "band", "splits"])
def attend_bytes(
    q, k, v, out, lse, part, k_scale, v_scale, factor, splits, size, lay, sq, sk, sv, so, band, extra,
    D: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, PAGE: tl.constexpr, NATURAL: tl.constexpr, MASKED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """`attend_part` for keys in e4m3 and values in pairs of them."""
    b, g, tile, split = work_of(size, splits)
    row, head, inside = rows_of(size, g, tile, BQ)
    rows, heads = row[None, :], head[None, :]
    at = row.to(tl.int64) * sq.l + head.to(tl.int64) * sq.h
    q += tl.cast(b, tl.int64) * sq.b
    if CHAINED:
        foresee(lay, size, b, splits)
        gdc_launch_dependents()
        gdc_wait()
    _, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, size.len_q, len_k)
    start, first, last = tiles_of(size, band, offset, b, tile, len_k, split, splits, BQ, BK)
    page = pages_of(lay, b, start + first * BK, PAGE, BK)  # before the queries: keys wait for it
    q1 = load_rows(q, at, D, 0, D1)  # [BQ, D1]
    scale = b * (size.heads // size.group) + g
    factor *= tl.load(k_scale + scale)
    scale_v = tl.load(v_scale + scale)
    if q.dtype.element_ty == tl.bfloat16:
        q1, _, factor = in_fp16(q1, q1, factor)
    q1 = tl.trans(q1)
    k += key_origin(lay, sk, b, 0, g)
    v += key_origin(lay, sv, b, 0, g)
    m = tl.full([BQ], float("-inf"), tl.float32)
    sums = tl.zeros([BK, BQ], tl.float32)
    even = tl.zeros([E1 // 2, BQ], tl.float32)
    odd = tl.zeros([E1 // 2, BQ], tl.float32)
    for i in tl.range(first, last):
        k0 = start + i * BK
        keys = k0 + tl.arange(0, BK)[:, None]
        k1 = load_keys(k, page, lay, k0, len_k, sk, D, 0, D1, BK, PAGE, MASKED)  # [BK, D1]
        s = tl.dot(k1.to(tl.float16), q1)
        s = scores(
            s, factor, band, extra, offset, b, heads, rows, keys, size.len_q, len_k, NATURAL, MASKED
        )
        p, m, alpha = weighed(s, m, factor, 0, NATURAL)
        sums = sums * alpha[None, :] + p
        p = p.to(tl.float16)
        v1 = load_columns(v, page, lay, k0, len_k, sv, E // 2, E1 // 2, BK, PAGE, MASKED)
        low, high = columns_of(v1)  # [E1 / 2, BK]
        even = tl.dot(low, p, even * alpha[None, :])
        odd = tl.dot(high, p, odd * alpha[None, :])
        page = pages_of(lay, b, k0 + BK, PAGE, BK)  # early: the next tile's loads depend on it
    l = tl.sum(sums, 0)
    acc = tl.trans(tl.join(even, odd).permute(0, 2, 1).reshape([E1, BQ]))
    finish(
        acc, m, m, l, scale_v, out, lse, part, so, size, extra.sinks, b, split, splits, row, head, inside,
        E, E1, 0, NATURAL,
    )  # fmt: skip


def applies(x: Arrays, rows: int, device: Device) -> bool:
    """Whether this loop has what is asked: few rows of 16 bits, and values that can be read in pairs by PTX."""
    dims = x.q.shape[-1], x.v.shape[-1]
    half = x.q.element_size() == 2
    few = x.k_scale is not None and half and rows <= ROWS and max(dims) <= WIDEST
    return few and device.kind != "hip" and _even(x.v)


def _even(v: Tensor) -> bool:
    return not any(n % 2 for n in (v.shape[-1], v.storage_offset(), *v.stride()[:-1]))


def widths(dim: int, dim_v: int) -> tuple[int, int]:
    """How wide tiles of keys and of values are."""
    return max(16, triton.next_power_of_2(dim)), max(LEAST, triton.next_power_of_2(dim_v))
