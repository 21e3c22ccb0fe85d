"""Before and after the backward on Hopper: numbers of rows, sums of dQ set to 0, and dQ out of its sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from relampago.backends.gluon.held import as_tile
from relampago.backends.gluon.sizes import Sides
from relampago.backends.gluon.sm90_gradients import Size, row_base, sequence
from relampago.backends.gluon.softmax import LOG2E


@gluon.constexpr_function
def spread(columns):
    """A layout of [rows, columns] for four warps in which a thread has eight columns of a row."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def rows_here(size, band, extra, R: gl.constexpr):
    """(sequence's rows, head, first row) of this program's R rows."""
    pid = gl.program_id(0)
    which = pid // size.tiles
    q_at, _, _ = sequence(which // size.heads, size, band, extra)
    return q_at, which % size.heads, pid % size.tiles * R


@gluon.jit
def lines(base, stride, at, head, row, dim, R: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr):
    """(pointers to R rows of a head, which of them exist)."""
    L: gl.constexpr = spread(C)
    rows = row + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, C, layout=gl.SliceLayout(0, L))
    first = at.first if PACKED else 0
    line = gl.expand_dims(gl.cast(rows + first, gl.int64) * stride.l, 1) + gl.expand_dims(cols, 0)
    inside = gl.expand_dims(rows < at.length, 1) & gl.expand_dims(cols < dim, 0)
    start = gl.cast(head, gl.int64) * stride.h
    if not PACKED:
        start += gl.cast(at.b, gl.int64) * stride.b
    return base + start + line, inside


@gluon.jit(do_not_specialize=[*Size._fields, *Sides._fields])
def prepare(
    out, dout, lse, dlse, known, top, delta, sums, counts, out_stride, dout_stride,
    len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride,
    offset, left, right, prefix, extra,
    R: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO · O) - dLSE (Algorithm 2, line 4), top = LSE in base 2; rows that see nothing have top inf.

    Where delta is `known`, shaped like LSE, it is only put in its place. DIM is the head dim of O. LSE and dLSE are
    (B, H, Lq) or (H, total), contiguous. Sums of dQ, if there are, are set to 0, and so are counts of the tiles that
    have added to a block of rows.
    """
    PACKED: gl.constexpr = extra.cu_q is not None
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride
    )
    band = Sides(offset, left, right, prefix)
    at, head, row = rows_here(size, band, extra, R)
    if row < (at.length + BQ - 1) // BQ * BQ:  # as far as blocks of rows reach
        L: gl.constexpr = gl.SliceLayout(1, spread(E))
        rows = row + gl.arange(0, R, layout=L)
        here = rows < at.length
        if PACKED:
            place = gl.cast(head, gl.int64) * size.len_q + at.first
        else:
            place = (gl.cast(at.b, gl.int64) * size.heads + head) * size.len_q
        value = gl.load(lse + place + rows, mask=here, other=float("-inf"))
        if known is not None:
            total = gl.load(known + place + rows, mask=here, other=0.0)
        else:
            o_at, inside = lines(out, out_stride, at, head, row, DIM, R, E, PACKED)
            do_at, _ = lines(dout, dout_stride, at, head, row, DIM, R, E, PACKED)
            o = gl.load(o_at, mask=inside, other=0.0).to(gl.float32)
            do = gl.load(do_at, mask=inside, other=0.0).to(gl.float32)
            total = gl.sum(o * do, axis=1)  # [R]
        if dlse is not None:
            total -= gl.load(dlse + place + rows, mask=here, other=0.0).to(gl.float32)
        blind = value == float("-inf")
        to = row_base(at, head, size, PACKED) + rows
        gl.store(delta + to, gl.where(blind, 0.0, total))
        gl.store(top + to, gl.where(blind, float("inf"), value * LOG2E))
        if sums is not None:
            flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
            to = gl.cast(row_base(at, head, size, PACKED) + row, gl.int64) * D
            gl.store(
                sums + to + gl.arange(0, R * D, layout=flat), gl.zeros([R * D], gl.float32, flat)
            )
        if counts is not None:
            gl.store(counts + (row_base(at, head, size, PACKED) + row) // BQ, 0)


@gluon.jit(do_not_specialize=["scale", *Size._fields, *Sides._fields])
def convert(
    sums, dq, stride, scale,
    len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride,
    offset, left, right, prefix, extra,
    R: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    DIM: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """dQ of R rows, added to what is there if ADDS, from the sums, which lie
    `as_held` in parts of [64, W], those of the same rows first."""
    PACKED: gl.constexpr = extra.cu_q is not None
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride
    )
    band = Sides(offset, left, right, prefix)
    at, head, row = rows_here(size, band, extra, R)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    if row < at.length:
        base = sums + gl.cast(row_base(at, head, size, PACKED) + row, gl.int64) * D
        for part in gl.static_range(R // 64 * (D // W)):
            x = gl.load(base + part * 64 * W + gl.arange(0, 64 * W, layout=flat))
            x = gl.convert_layout(as_tile(x, W), spread(W)) * scale
            col = part % (D // W) * W
            first = row + part // (D // W) * 64
            to, inside = lines(dq + col, stride, at, head, first, DIM - col, 64, W, PACKED)
            if ADDS:
                x += gl.load(to, mask=inside, other=0.0)
            gl.store(to, x.to(dq.dtype.element_ty), mask=inside)
