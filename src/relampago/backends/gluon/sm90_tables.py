"""Row tables in the backward on Hopper: what blocks of rows and blocks of keys have to do with each other.

Each row sees a run of keys of its own (`Band.row_start`, `row_end`). Two small kernels come before the others: `bound`
finds for each 64 rows [least start, greatest end, greatest start, least end], int32 (B, blocks of rows, 4); `reach`
the rows [first, end) among which all that see any of 64 keys are, int32 (B, blocks of keys, 2). Both take O(N) memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNIT = gl.constexpr(64)  # rows, or keys, of an entry
AT_ONCE = gl.constexpr(128)  # blocks of rows that a block of keys is compared with at once
BIG = gl.constexpr(2147483647)


@gluon.jit(do_not_specialize=["len_q", "stride"])
def bound(row_start, row_end, bounds, len_q, stride):
    """One block of rows. `stride` is the step from one sequence's tables to the next's."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    blocks = (len_q + (UNIT - 1)) // UNIT
    pid = gl.program_id(0)
    rows = pid % blocks * UNIT + gl.arange(0, UNIT, layout=one)
    inside = rows < len_q
    at = gl.cast(pid // blocks, gl.int64) * stride + rows
    start = gl.load(row_start + at, mask=inside, other=0)
    end = gl.load(row_end + at, mask=inside, other=0)
    sees = start < end
    to = bounds + pid * 4
    gl.store(to, gl.min(gl.where(sees, start, BIG), axis=0))
    gl.store(to + 1, gl.max(gl.where(sees, end, 0), axis=0))
    gl.store(to + 2, gl.max(start, axis=0))
    gl.store(to + 3, gl.min(gl.where(inside, end, BIG), axis=0))


@gluon.jit(do_not_specialize=["len_q", "len_k"])
def reach(bounds, reached, len_q, len_k):
    """One block of keys."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    blocks = (len_q + (UNIT - 1)) // UNIT
    tiles = (len_k + (UNIT - 1)) // UNIT
    pid = gl.program_id(0)
    k0 = pid % tiles * UNIT
    first, last = blocks, blocks * 0 - 1
    for c in range(0, blocks, AT_ONCE):
        i = c + gl.arange(0, AT_ONCE, layout=one)
        there = i < blocks
        at = bounds + (pid // tiles * blocks + i) * 4
        low = gl.load(at, mask=there, other=BIG)
        high = gl.load(at + 1, mask=there, other=0)
        meets = (low < k0 + UNIT) & (high > k0)
        first = min(first, gl.min(gl.where(meets, i, BIG), axis=0))
        last = max(last, gl.max(gl.where(meets, i, -1), axis=0))
    gl.store(reached + pid * 2, first * UNIT)
    gl.store(reached + pid * 2 + 1, (last + 1) * UNIT)


@gluon.jit
def entry(table, b, n, at, WIDTH: gl.constexpr):
    """Where a sequence's entry for a row or key stands; beyond the last one, the last one."""
    blocks = (n + (UNIT - 1)) // UNIT
    return table + (b * blocks + min(at // UNIT, blocks - 1)) * WIDTH


@gluon.jit
def rows_of(extra, b, len_k, k0, KEYS: gl.constexpr):
    """Rows [start, end) outside of which none sees any of KEYS keys from k0 on."""
    at = entry(extra.reached, b, len_k, k0, 2)
    start, end = gl.load(at), gl.load(at + 1)
    for i in gl.static_range(1, KEYS // UNIT):
        at = entry(extra.reached, b, len_k, k0 + i * UNIT, 2)
        start = min(start, gl.load(at))
        end = max(end, gl.load(at + 1))
    return start, end


@gluon.jit
def keys_of(extra, b, len_q, row, ROWS: gl.constexpr):
    """Keys [start, end) outside of which none of ROWS rows sees any."""
    at = entry(extra.bounds, b, len_q, row, 4)
    start, end = gl.load(at), gl.load(at + 1)
    for i in gl.static_range(1, ROWS // UNIT):
        at = entry(extra.bounds, b, len_q, row + i * UNIT, 4)
        start = min(start, gl.load(at))
        end = max(end, gl.load(at + 1))
    return start, end


@gluon.jit
def shared_by(extra, b, len_q, row, ROWS: gl.constexpr):
    """Keys [start, end) that all of ROWS rows see."""
    at = entry(extra.bounds, b, len_q, row, 4)
    start, end = gl.load(at + 2), gl.load(at + 3)
    for i in gl.static_range(1, ROWS // UNIT):
        at = entry(extra.bounds, b, len_q, row + i * UNIT, 4)
        start = max(start, gl.load(at + 2))
        end = min(end, gl.load(at + 3))
    return start, end


@gluon.jit
def runs_of(extra, size, b, rows):
    """Each row's run of keys."""
    at = gl.cast(b, gl.int64) * size.table_stride + rows
    inside = rows < size.len_q
    start = gl.load(extra.row_start + at, mask=inside, other=0)
    return start, gl.load(extra.row_end + at, mask=inside, other=0)
