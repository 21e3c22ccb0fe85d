"""What the kernels share: where a tile lies, which keys it visits, and the scores it finds there.

All functions here take index tensors that broadcast against one another, so that the same code serves tiles laid out
[BQ, BK] (forward, dQ) and [BK, BQ] (dK, dV). Legend: B batch, H query heads, G kv heads, Q/K lengths, D/E head dims of
keys and values, BQ/BK tiles. Bundles such as `band` and `extra` are the NamedTuples of `arguments.py`; a field that is
None compiles to nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from relampago import dropout
from relampago.masks import rules
from relampago.mods import Math

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BIG = tl.constexpr(2147483647)
SCAN = tl.constexpr(1024)  # rows of a table that are looked at together
SPREAD = tl.constexpr(3)  # blocks between where neighbouring programs begin
_A, _B, _GOLDEN = tl.constexpr(dropout._A), tl.constexpr(dropout._B), tl.constexpr(dropout._GOLDEN)


class Strides(NamedTuple):
    """Elements between sequences (or pages), rows and heads; the last dimension is contiguous."""

    b: Any
    l: Any
    h: Any


def plain(fn):
    """A function without a word of Triton, compiled; the interpreter runs it as it is."""
    return fn if triton.knobs.runtime.interpret else triton.jit(fn)


visible = plain(rules.visible)
key_range = plain(rules.key_range)
full_range = plain(rules.full_range)
query_range = plain(rules.query_range)


@triton.jit
def full_query_range(k_first, k_last, len_q, offset, left, right, prefix):
    """Rows [start, end) that see every key in k_first..k_last: the inverse of `full_range`."""
    start = 0
    end = len_q
    if left is not None:
        end = min(end, k_first - offset + left + 1)
    if right is not None:
        first = k_last - offset - right
        if prefix is not None:  # noqa: SIM102 (the first is decided when compiled)
            if k_last < prefix:
                first = first * 0
        start = max(start, first)
    return start, end


@triton.jit
def assignment(size, REVERSED: tl.constexpr):
    """This program's (tile, head, sequence) from its number.

    Heads go in sections whose keys and values fit the L2 cache together; within one, all heads' tile i before i + 1,
    and the heaviest tiles first where later rows see more.
    """
    pid = tl.program_id(0)
    section = pid // (size.section * size.tiles)
    rest = pid - section * size.section * size.tiles
    width = min(size.section, size.batch * size.heads - section * size.section)
    tile = rest // width
    place = section * size.section + rest % width
    if REVERSED:
        tile = size.tiles - 1 - tile
    return tile, place % size.heads, place // size.heads


@triton.jit
def rows_of(lay, size, b):
    """First row of sequence b in q, and how many it has; clamped, whatever cu_seqlens say."""
    if lay.cu_q is None:
        return b * 0, size.len_q
    else:
        start = min(max(tl.load(lay.cu_q + b), 0), size.total_q)
        end = min(max(tl.load(lay.cu_q + b + 1), start), size.total_q)
        return start, end - start


@triton.jit
def keys_of(lay, size, b):
    """First key of sequence b in k, and how many it has."""
    if lay.cu_k is not None:
        start = min(max(tl.load(lay.cu_k + b), 0), size.total_k)
        end = min(max(tl.load(lay.cu_k + b + 1), start), size.total_k)
        return start, end - start
    elif lay.lens_k is not None:
        return b * 0, min(max(tl.load(lay.lens_k + b), 0), size.len_k)
    else:
        return b * 0, size.len_k


@triton.jit
def offset_of(lay, band, len_q, len_k):
    """Position of row 0 among the keys: where lengths differ by sequence, each aligns bottom right by its own."""
    offset = band.offset
    if lay.cu_q is not None or lay.cu_k is not None or lay.lens_k is not None:
        offset += len_k - len_q
    return offset


@triton.jit
def stepped(stride, base, DIM: tl.constexpr):
    """Strides of rows of DIM as multiples of what divides a row, at most 16 bytes, as `rows_contiguous` has them.

    Triton sees for itself only whether an argument is a multiple of 16: rows of 40 or 72 would come number by number.
    Where a dimension has one entry its stride may be any: rounded down or not, it is multiplied by 0.
    """
    whole: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    power: tl.constexpr = DIM & -DIM
    step: tl.constexpr = power if power < whole else whole
    if DIM % 16 == 0 or step == 1:
        return stride
    else:
        return Strides(stride.b // step * step, stride.l // step * step, stride.h // step * step)


@triton.jit
def origin(stride, b, first, head):
    """Where a sequence's head begins in a tensor laid out like q: 64 bits, a long view may pass 2^31 elements."""
    return (
        tl.cast(b, tl.int64) * stride.b
        + tl.cast(first, tl.int64) * stride.l
        + tl.cast(head, tl.int64) * stride.h
    )


@triton.jit
def places(base, first, stride, COL: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """Addresses of rows first..first + N and columns COL..COL + WIDTH, [N, WIDTH].

    In 64 bits within a tile too: rows of sequence-major keys lie a batch apart, 128 of them 2^31 elements and more.
    """
    row = tl.arange(0, N).to(tl.int64)
    col = COL + tl.arange(0, WIDTH)
    return base + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]


@triton.jit
def load_tile(
    base, first, limit, stride, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows first..first + N and columns COL..COL + WIDTH as [N, WIDTH]; 0 beyond DIM, and beyond limit if MASKED."""
    row = tl.arange(0, N)
    col = COL + tl.arange(0, WIDTH)
    at = places(base, first, stride, COL, WIDTH, N)
    if MASKED and COL + WIDTH > DIM:
        inside = (row[:, None] < limit - first) & (col[None, :] < DIM)
        return tl.load(at, mask=inside, other=0.0)
    elif MASKED:
        return tl.load(at, mask=row[:, None] < limit - first, other=0.0)
    elif COL + WIDTH > DIM:
        return tl.load(at, mask=col[None, :] < DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_tile(
    base, first, limit, stride, x, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_tile`, always masked."""
    row = tl.arange(0, N)
    col = COL + tl.arange(0, WIDTH)
    at = places(base, first, stride, COL, WIDTH, N)
    inside = (row[:, None] < limit - first) & (col[None, :] < DIM)
    tl.store(at, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_keys(
    base, box, lay, b, g, first, limit, stride, DIM: tl.constexpr, COL: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_tile` for keys or values: from pages, or by TMA where box is a descriptor; else base stands at the head."""
    if box is not None:
        return box.load([b, first, g, COL]).reshape([N, WIDTH])
    elif lay.page_table is None:
        return load_tile(base, first, limit, stride.l, DIM, COL, WIDTH, N, MASKED)
    else:
        key = first + tl.arange(0, N)
        entry = tl.minimum(key // lay.page, lay.width - 1)
        page = tl.load(lay.page_table + tl.cast(b, tl.int64) * lay.width + entry)
        page = tl.minimum(tl.maximum(page, 0), lay.pages - 1)
        row = page.to(tl.int64) * stride.b + (key % lay.page).to(tl.int64) * stride.l
        col = COL + tl.arange(0, WIDTH)
        inside = (key < limit)[:, None] & (col < DIM)[None, :]
        return tl.load(base + row[:, None] + col[None, :], mask=inside, other=0.0)


@triton.jit
def load_rows(
    base, box, b, head, first, limit, stride, DIM: tl.constexpr, COL: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_tile` for rows, by TMA where box is a descriptor."""
    if box is not None:
        return box.load([b, first, head, COL]).reshape([N, WIDTH])
    else:
        return load_tile(base, first, limit, stride, DIM, COL, WIDTH, N, MASKED)


@triton.jit
def key_origin(lay, stride, b, first, g):
    """`origin` for keys; those in pages have no place of their own."""
    if lay.page_table is None:
        return origin(stride, b, first, g)
    else:
        return tl.cast(g, tl.int64) * stride.h


@triton.jit
def in_fp16(q1, q2, factor):
    """Queries as fp16 with entries of at most 2, and the factor that scores then have.

    Hopper turns e4m3 into fp16 two at a time, but into bf16 one by one, in a unit that takes longer than the memory.
    A power of 2 loses nothing but what is 2^-24 of the largest entry and less.
    """
    top = tl.maximum(tl.max(tl.abs(q1.to(tl.float32))), tl.max(tl.abs(q2.to(tl.float32))))
    top = tl.minimum(tl.maximum(top, 2.0**-100), 2.0**100)
    exponent = (
        top.to(tl.int32, bitcast=True) & 0x7F800000
    )  # keys wait for this: no logarithm, no division
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    q1 = (q1.to(tl.float32) * inverse).to(tl.float16)
    q2 = (q2.to(tl.float32) * inverse).to(tl.float16)
    return q1, q2, factor * exponent.to(tl.float32, bitcast=True)


@triton.jit
def table_of(band, b, rows, limit):
    """The rows' own runs of keys [start, end), like rows; empty for rows beyond limit."""
    at = tl.cast(b, tl.int64) * band.table_stride + rows
    start = tl.load(band.row_start + at, mask=rows < limit, other=0)
    end = tl.load(band.row_end + at, mask=rows < limit, other=0)
    return start, end


@triton.jit
def bounds(band, offset, b, q0, q_end, len_k, BQ: tl.constexpr):
    """Keys [start, end) that some row of q0..q_end sees, and [full_start, full_end) that all see."""
    start, end = key_range(q0, q_end - 1, len_k, offset, band.left, band.right, band.prefix)
    full_start, full_end = full_range(
        q0, q_end - 1, len_k, offset, band.left, band.right, band.prefix
    )
    if band.row_start is not None:
        rows = q0 + tl.arange(0, BQ)
        row_start, row_end = table_of(band, b, rows, q_end)
        inside = rows < q_end
        start = max(start, tl.min(tl.where(inside, row_start, BIG), 0))
        end = min(end, tl.max(row_end, 0))
        full_start = max(full_start, tl.max(row_start, 0))
        full_end = min(full_end, tl.min(tl.where(inside, row_end, BIG), 0))
    return start, end, full_start, full_end


@triton.jit
def query_bounds(band, offset, b, k0, k_end, len_q):
    """Rows [start, end) that see some key of k0..k_end, and [full_start, full_end) that see all."""
    start, end = query_range(k0, k_end - 1, len_q, offset, band.left, band.right, band.prefix)
    full_start, full_end = full_query_range(
        k0, k_end - 1, len_q, offset, band.left, band.right, band.prefix
    )
    if band.row_start is not None:
        first = tl.full((), BIG, tl.int32)
        last = tl.full((), -1, tl.int32)
        for row in range(0, len_q, SCAN):
            rows = row + tl.arange(0, SCAN)
            row_start, row_end = table_of(band, b, rows, len_q)
            some = (row_start < k_end) & (row_end > k0) & (row_start < row_end)
            first = min(first, tl.min(tl.where(some, rows, BIG), 0))
            last = max(last, tl.max(tl.where(some, rows, -1), 0))
        start, end = max(start, first), min(end, last + 1)
        full_end = full_end * 0  # which rows see all would need a second list: mask them
    return start, end, full_start, full_end


@triton.jit
def loop_bounds(start, end, full_start, full_end, BLOCK: tl.constexpr):
    """Tiles to visit, aligned to BLOCK: [start, …) with [full, full_end) free of masks, and how many need one.

    The edges, numbered 0 .. n, are those before `full` and then those from `full_end` on: see `edge`.
    """
    start = tl.cast(start, tl.int32) // BLOCK * BLOCK
    full = tl.maximum(tl.cdiv(tl.cast(full_start, tl.int32), BLOCK) * BLOCK, start)
    full_end = tl.minimum(tl.cast(full_end, tl.int32), end) // BLOCK * BLOCK
    some = full_end > full
    full = tl.where(some, full, start)
    full_end = tl.where(some, full_end, start)
    before = (full - start) // BLOCK
    n = before + tl.maximum(tl.cdiv(end - full_end, BLOCK), 0)
    return start, full, full_end, before, n


@triton.jit
def turn_of(tile, full, full_end, BLOCK: tl.constexpr):
    """At which block of [full, full_end) a program begins, and how many there are.

    Programs that all read the same rows at the same time would keep one part of the L2 cache busy and the rest idle:
    neighbours begin SPREAD blocks apart and go round.
    """
    steps = (full_end - full) // BLOCK
    return tile * SPREAD % tl.maximum(steps, 1), steps


@triton.jit
def turned(i, turn, steps, full, BLOCK: tl.constexpr):
    """Where the i-th block that a program visits begins."""
    i += turn
    return full + tl.where(i >= steps, i - steps, i) * BLOCK


@triton.jit
def edge(i, start, full_end, before, BLOCK: tl.constexpr):
    """Where the i-th tile at an edge begins."""
    return tl.where(i < before, start + i * BLOCK, full_end + (i - before) * BLOCK)


@triton.jit
def part_of(stride, b, head, rows, keys):
    """Offsets of elements in what broadcasts to (B, H, Lq, Lk); a stride of None is a dimension of size 1."""
    at = tl.cast(b, tl.int64) * 0
    if stride.b is not None:
        at += tl.cast(b, tl.int64) * stride.b
    if stride.h is not None:
        at += tl.cast(head, tl.int64) * stride.h
    at = at + (rows + keys) * 0
    if stride.q is not None:
        at = at + rows.to(tl.int64) * stride.q
    if stride.k is not None:
        at = at + keys.to(tl.int64) * stride.k
    return at


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _log(x):
    return tl.log(x)


@triton.jit
def _tanh(x):
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def _abs(x):
    return tl.abs(x)


@triton.jit
def _where(c, x, y):
    return tl.where(c, x, y)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y)


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y)


@triton.jit
def distance_of(slot, b, keys, place):
    """Which entry of a table of distances the elements at hand read."""
    reach = slot.size // 2
    if slot.places is not None:
        base = slot.places + tl.cast(b, tl.int64) * slot.places_b
        keys = tl.load(base + tl.minimum(keys, slot.places_size - 1)).to(tl.int32)
        place = tl.minimum(tl.maximum(place, 0), slot.places_size - 1)
        place = tl.load(base + place).to(tl.int32)
    return tl.minimum(tl.maximum(keys - place, -reach), reach) + reach


@triton.jit
def argument(slot, b, head, rows, keys, place):
    """A mod's argument for the elements at hand, as `mods.bind` has it; indices are clamped to its size."""
    if slot.axis is None:
        return tl.full((), slot.value, tl.float32)
    else:
        base = slot.value + tl.cast(b, tl.int64) * slot.b + tl.cast(head, tl.int64) * slot.h
        if slot.axis == "head":
            value = tl.load(base)
        else:
            if slot.axis == "distance":
                at = distance_of(slot, b, keys, place)
            elif slot.axis == "q":
                at = rows
            else:
                at = keys
            value = tl.load(base + tl.minimum(at, slot.size - 1))
        if value.dtype.is_floating():
            value = value.to(tl.float32)
        return value


@triton.jit
def arguments(mod, b, head, rows, keys, place):
    """All of a mod's arguments."""
    args = ()
    for i in tl.static_range(mod.count):
        args = args + (argument(mod.slots[i], b, head, rows, keys, place),)  # noqa: RUF005
    return args


@triton.jit
def call(fn, s, place, keys, head, args):
    """A mod's function on a tile. A tuple of functions can be an argument but not a variable."""
    y = fn(s, place, keys, head, args, Math(_exp, _log, _tanh, _abs, _where, _minimum, _maximum))
    return tl.zeros(s.shape, tl.float32) + y


@triton.jit
def modified(s, mods, N: tl.constexpr, b, head, rows, keys, offset):
    """Scores after every mod."""
    place = rows + offset
    for i in tl.static_range(N):
        args = arguments(mods[i], b, head, rows, keys, place)
        s = call(mods[i].fn, s, place, keys, head, args)
    return s


@triton.jit
def slope(s, mods, N: tl.constexpr, b, head, rows, keys, offset):
    """The derivative of the scores after all mods by the scaled products s."""
    place = rows + offset
    total = tl.full(s.shape, 1.0, tl.float32)
    for i in tl.static_range(N):
        args = arguments(mods[i], b, head, rows, keys, place)
        total = total * call(mods[i].dfn, s, place, keys, head, args)
        s = call(mods[i].fn, s, place, keys, head, args)
    return total


@triton.jit
def bend(s, rate, mods, N: tl.constexpr, b, head, rows, keys, offset):
    """Where the scaled products s move at `rate`: the rate after all mods, `slope`, and how fast that moves."""
    place = rows + offset
    total = tl.full(s.shape, 1.0, tl.float32)
    turn = tl.zeros(s.shape, tl.float32)
    for i in tl.static_range(N):
        args = arguments(mods[i], b, head, rows, keys, place)
        own = call(mods[i].dfn, s, place, keys, head, args)
        turn = turn * own + total * call(mods[i].ddfn, s, place, keys, head, args) * rate
        total = total * own
        rate = rate * own
        s = call(mods[i].fn, s, place, keys, head, args)
    return rate, total, turn


@triton.jit
def scores(
    s, factor, band, extra, offset, b, head, rows, keys, q_limit, k_limit, NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Products s as softmax reads them: -inf where hidden, and if NATURAL scaled, after mods and with the bias.

    Unless NATURAL they stay unscaled: the scale joins the subtraction of the maximum in one instruction.
    """
    if NATURAL:
        s = s * factor
        if extra.modified is not None:
            s = modified(s, extra.mods, extra.modified, b, head, rows, keys, offset)
        if extra.bias is not None:
            at = extra.bias + part_of(extra.bias_stride, b, head, rows, keys)
            if MASKED:
                inside = (rows < q_limit) & (keys < k_limit)
                s += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            else:
                s += tl.load(at).to(tl.float32)
    if extra.mask is not None:
        at = extra.mask + part_of(extra.mask_stride, b, head, rows, keys)
        inside = (rows < q_limit) & (keys < k_limit)
        s = tl.where(tl.load(at, mask=inside, other=0) != 0, s, float("-inf"))
    if MASKED:
        seen = keys < k_limit
        if band.left is not None or band.right is not None:
            seen = seen & visible(rows, keys, offset, band.left, band.right, band.prefix)
        if band.row_start is not None:
            row_start, row_end = table_of(band, b, rows, q_limit)
            seen = seen & (keys >= row_start) & (keys < row_end)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def pattern_of(sparse, which, row, key):
    """What a tile of a BlockSparse shows of its own rows and keys; which < 0: everything."""
    inside = (row < sparse.block_q) & (key < sparse.block_k)
    at = (tl.cast(tl.maximum(which, 0), tl.int64) * sparse.block_q + row) * sparse.block_k + key
    return inside & (tl.load(sparse.tiles + at, mask=inside & (which >= 0), other=1) != 0)


@triton.jit
def list_of(stride_b, stride_h, b, head):
    """Where a head's lists of tiles begin among the counts."""
    return tl.cast(b, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h


@triton.jit
def _mix(h):
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * _A
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * _B
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def kept(extra, size, b, head, rows, keys):
    """Whether dropout keeps each weight: `dropout.kept` to the bit."""
    seed = tl.load(extra.seed)
    low, high = (seed & 0xFFFFFFFF).to(tl.int32), (seed >> 32).to(tl.int32)
    stream = tl.cast(b * size.heads_q + head, tl.int32)
    row_bits = _mix(_mix(_mix(stream ^ high) + rows * _GOLDEN) ^ low)
    bits = _mix(row_bits ^ _mix(keys * _GOLDEN))
    return ((bits >> 8) & 0xFFFFFF) >= extra.cutoff


@triton.jit
def power(x, NATURAL: tl.constexpr):
    """e to the x, x in base 2 unless NATURAL."""
    if NATURAL:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp2(x)


@triton.jit
def finite(m):
    """The maximum to subtract: 0 for a row that has seen nothing, so that -inf minus it stays -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def weights(s, shift, norm, factor, NATURAL: tl.constexpr):
    """p = exp(s - LSE), line 12 of Algorithm 2; norm is None or a factor of each row."""
    if NATURAL:
        p = tl.exp2((s - shift) * LOG2E)
    else:
        p = tl.exp2(s * factor - shift)
    if norm is not None:
        p = p * norm
    return p
