"""What the backward's kernels share: which tile a program has, the loads of rows, masks, how results leave.

FlashAttention-2, Algorithm 2 (arXiv 2307.08691). The papers' letters: s scores, p weights, dp = dO·Vᵀ, ds its part that
goes back to the scores; `top` is what a row subtracts from its scores in base 2 to get its weights back, its LSE, and
delta = rowsum(dO · O) - dLSE. Legend: BQ rows of queries in a block, BK keys in a block, D/E head dims of keys and
values, padded to powers of two by TMA's zero fill. `size`, `band` and `extra` are NamedTuples of `backward_launch.py`.

Rows of a head stand in `top`, `delta` and the sums of dQ at multiples of UNIT, so that blocks of them can be copied
whole; rows that are none have top = inf, and with it no weight.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import Rows, load, store
from relampago.backends.gluon.sm90_tables import keys_of, rows_of, runs_of, shared_by
from relampago.backends.gluon.softmax import full_range
from relampago.backends.gluon.tiles import place, span, visited
from relampago.backends.gluon.versions import tma_load
from relampago.masks import rules

UNIT = gl.constexpr(schedule.UNIT)
ROWS = gl.constexpr(64)  # of a warpgroup: WGMMA's M


class Size(NamedTuple):
    """Lengths and counts. `tiles`, `places` and `section` are those of the kernel that gets it."""

    len_q: Any  # of packed sequences, all together
    len_k: Any
    heads: Any
    group: Any  # query heads per kv head
    tiles: Any  # of a head
    places: Any  # sequences times heads
    section: Any  # of these, those in flight together
    padded: Any  # rows of a head in `top`, `delta` and the sums of dQ
    dim: Any
    dim_v: Any
    table_stride: Any  # from one sequence's row tables to the next's


key_range = gluon.jit(rules.key_range)
query_range = gluon.jit(rules.query_range)
visible = gluon.jit(rules.visible)
blocks = gluon.jit(schedule.blocks)
advance = gluon.jit(schedule.advance)


@gluon.jit
def sequence(b, size, band, extra):
    """(rows of queries, keys, offset) of a sequence."""
    if extra.cu_q is None:
        return Rows(b, b, size.len_q), Rows(b, b, size.len_k), band.offset
    else:
        first_q, len_q = span(extra.cu_q, b, size.len_q)
        first_k, len_k = span(extra.cu_k, b, size.len_k)
        return Rows(b, first_q, len_q), Rows(b, first_k, len_k), band.offset + len_k - len_q


@gluon.jit
def row_base(at, head, size, PACKED: gl.constexpr):
    """Where a head's rows begin in `top`, `delta` and the sums of dQ: a multiple of UNIT."""
    if PACKED:  # room for every sequence's last block, as FlashAttention pads
        return head * size.padded + (at.first + at.b * UNIT) // UNIT * UNIT
    else:
        return (at.b * size.heads + head) * size.padded


@gluon.jit
def key_tile(number, size, band, extra, BQ: gl.constexpr, BK: gl.constexpr):
    """(kv head, first key, queries, keys, offset, first block of rows, how many, whether any sees a key) of a tile."""
    tile, which = place(number, size.tiles, size.section, size.places)
    k0 = (size.tiles - 1 - tile) * BK  # the first keys first: under causal all rows see them
    kv_heads = size.heads // size.group
    q_at, k_at, offset = sequence(which // kv_heads, size, band, extra)
    last = min(k0 + BK, k_at.length) - 1
    start, end = query_range(k0, last, q_at.length, offset, band.left, band.right, band.prefix)
    if extra.reached is not None:
        low, high = rows_of(extra, k_at.b, size.len_k, k0, BK)
        start, end = max(start, low), min(end, high)
    end = end if k0 < k_at.length else 0  # beyond a shorter sequence: one block, all of it hidden
    first, n = blocks(start, end, BQ)
    return which % kv_heads, k0, q_at, k_at, offset, first, n, start < end


@gluon.jit
def query_tile(size, band, extra, BQ: gl.constexpr, BK: gl.constexpr):
    """(head, tile, queries, keys, offset, first block of keys, how many) of this program's tile of rows."""
    tile, which = place(gl.program_id(0), size.tiles, size.section, size.places)
    q_at, k_at, offset = sequence(which // size.heads, size, band, extra)
    row = tile * BQ
    if extra.bounds is not None:
        last = min(row + BQ, q_at.length) - 1
        start, end = key_range(row, last, k_at.length, offset, band.left, band.right, band.prefix)
        low, high = keys_of(extra, q_at.b, size.len_q, row, BQ)
        first, n = blocks(max(start, low), min(end, high), BK)
    else:
        first, n = visited(row, q_at.length, k_at.length, offset, band, BQ, BK)
    n = n if row < q_at.length else 1  # beyond a shorter sequence: rows that nobody stores
    return which % size.heads, tile, q_at, k_at, offset, first, n


@gluon.jit
def first_turn(k0, first, n, band, BQ: gl.constexpr, ROTATES: gl.constexpr = True):
    """The block of rows to begin with. Where all see the same rows, tiles begin apart: they add to the same dQ.

    Not where they do that in an order, in which each follows the one before.
    """
    if ROTATES and band.right is None:
        return first + k0 // BQ % n
    else:
        return first


@gluon.jit
def next_rows(block, head, first, n, begin):
    """The next block of rows of this head, around its end; then the next head of the group."""
    block = block + 1
    block = first if block == first + n else block
    head = head + 1 if block == begin else head
    return block, head


@gluon.jit
def send_rows(
    ring, facts, desc, facts_desc, stage, phase, at, row, head, base, PACKED: gl.constexpr
):
    """Producer: a block of Q or dO and what goes with each of its rows, on one barrier."""
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(full, desc.block_type.nbytes + facts_desc.block_type.nbytes)
    load(desc, at, row, head, 0, full, ring.tiles.index(stage), PACKED)
    tma_load(facts_desc, [0, base + row], full, facts.index(stage))


@gluon.jit
def hide_rows(
    s, q0, keys, q_at, len_k, offset, size, band, extra, ENDS: gl.constexpr, PACKED: gl.constexpr,
    S_L: gl.constexpr,
):  # fmt: skip
    """Scores [keys, rows] with -inf where a row does not see a key."""
    line = q0 + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, S_L))
    rows = gl.expand_dims(line, 0)
    keys = gl.expand_dims(keys, 1)
    if band.left is not None or band.right is not None:
        s = gl.where(
            visible(rows, keys, offset, band.left, band.right, band.prefix), s, float("-inf")
        )
    if ENDS:
        s = gl.where(keys < len_k, s, float("-inf"))
    if PACKED:
        s = gl.where(rows < q_at.length, s, float("-inf"))
    if extra.row_start is not None:
        start, end = runs_of(extra, size, q_at.b, line)
        inside = (keys >= gl.expand_dims(start, 0)) & (keys < gl.expand_dims(end, 0))
        s = gl.where(inside, s, float("-inf"))
    return s


@gluon.jit
def partly(
    q0, k0, at, len_k, offset, size, band, extra, BQ: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Whether a block of rows needs a mask with the 64 keys from k0."""
    start, end = full_range(q0, q0 + BQ - 1, len_k, offset, band.left, band.right, band.prefix)
    masked = (k0 < start) | (k0 + ROWS > end)
    if PACKED:
        masked = masked | (q0 + BQ > at.length)
    if extra.bounds is not None:
        start, end = shared_by(extra, at.b, size.len_q, q0, BQ)
        masked = masked | (k0 < start) | (k0 + ROWS > end)
    return masked


@gluon.jit
def disguised(index, k0):
    """The index of a tile, as one that the compiler takes for another in each block of keys; k0 is never below 0.

    Else the addresses of a tile that stays, one for each slice that a product reads, would move out of the loop, into
    registers that head dim 256 does not have.
    """
    return 1 - index if k0 < 0 else index


@gluon.jit
def slope(p, s, cap):
    """p times the slope of softcap, if there is one: `s` is a tanh then, not hidden, since 0 · inf is no number."""
    if cap is not None:
        p = p * (1.0 - s * s)
    return p


@gluon.jit
def write(
    desc, tile, wide, x, at, row, head, dim, PACKED: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """64 rows of a gradient: by TMA from a tile in shared memory, or in fp32 straight to where `wide` says.

    Nobody else adds to them in the same launch, so that a sum depends on no order.
    """
    if wide.base is None:
        tile.reshape([ROWS, DIM]).store(x.to(desc.dtype))
        fence_async_shared()
        store(desc, tile, at, row, head, PACKED)
    else:
        L: gl.constexpr = x.type.layout
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        cols = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
        inside = gl.expand_dims((rows >= 0) & (rows < at.length), 1)
        if wide.whole is None:  # a mask that differs along a row takes its pairs of columns apart
            inside = inside & gl.expand_dims(cols < dim, 0)
        start = gl.cast(head, gl.int64) * wide.h
        if PACKED:
            rows += at.first
        else:
            start += gl.cast(at.b, gl.int64) * wide.b
        line = gl.expand_dims(gl.cast(rows, gl.int64) * wide.l, 1) + gl.expand_dims(cols, 0)
        if wide.adds is not None:
            gl.atomic_add(wide.base + start + line, x, mask=inside, sem="relaxed")
        else:
            gl.store(wide.base + start + line, x, mask=inside)
