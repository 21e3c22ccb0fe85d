"""dQ on Hopper by tiles of 128 rows, without atomics: for deterministic sums, and for wide heads.

The forward's shape again: one producer warp, two consumer warpgroups of 64 rows, keys from the last block to the first.
The scores' products of a block and dQ's of the block before are in flight together:

    S = Q·Kᵀ    dP = dO·Vᵀ    dS = P (dP - delta)    dQ += dS·K
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon.channel import channel, receive, release, send
from relampago.backends.gluon.sizes import Sides
from relampago.backends.gluon.sm90_gradients import (
    ROWS,
    Size,
    advance,
    disguised,
    query_tile,
    row_base,
    slope,
    write,
)
from relampago.backends.gluon.sm90_tables import runs_of, shared_by
from relampago.backends.gluon.softmax import Seen, capped, exp2, full_range, hide, part_sum, pin
from relampago.backends.gluon.tiles import accumulator


@gluon.jit
def first_keys(row_tile, first, n, band, BK: gl.constexpr):
    """The block of keys to begin with: the last, or where all tiles see the same keys another for each of them.

    Tiles in step on the same keys would all wait for the same part of the L2 cache.
    """
    if band.left is None and band.right is None:
        return (first + 3 * row_tile % n) * BK
    else:
        return (first + n - 1) * BK


@gluon.jit
def next_keys(k0, first, n, BK: gl.constexpr):
    """The block before, around the first."""
    k0 = k0 - BK
    return k0 + n * BK if k0 < first * BK else k0


@gluon.jit
def produce(
    queries, douts, keys, values, q_desc, do_desc, k_desc, v_desc, size, band, extra,
    BK: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """One warp: the tile's rows once, then keys and values."""
    PACKED: gl.constexpr = extra.cu_q is not None
    head, row_tile, q_at, k_at, _, first, n = query_tile(size, band, extra, 2 * ROWS, BK)
    row = row_tile * (2 * ROWS)
    g = head // size.group
    k0 = first_keys(row_tile, first, n, band, BK)
    for w in gl.static_range(2):
        send(queries, q_desc, w, 1, q_at, row + w * ROWS, head, PACKED)
    stage_k, phase_k, stage_v, phase_v = 0, 1, 0, 1
    for j in range(n):
        send(keys, k_desc, stage_k, phase_k, k_at, k0, g, PACKED)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
        if j == 0:
            for w in gl.static_range(2):
                send(douts, do_desc, w, 1, q_at, row + w * ROWS, head, PACKED)
        send(values, v_desc, stage_v, phase_v, k_at, k0, g, PACKED)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
        k0 = next_keys(k0, first, n, BK)


@gluon.jit
def differentiate(
    s, dp, k0, seen, masked, top, delta, band, cap, factor,
    MASKED: gl.constexpr, TABLES: gl.constexpr, LEFT: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """dS of a block, [64, BK], from S and from dP, which is still under way, behind LEFT later products."""
    raised = capped(s, cap)
    s = raised
    if MASKED:  # noqa: SIM102 - one is known when compiled
        if masked:
            s = hide(s, k0, seen, band, TABLES)
    p = exp2(s * factor - gl.expand_dims(top, 1))
    p = slope(p, raised, cap)
    if PIN:
        sums = part_sum(p)
        sums = pin(sums + gl.expand_dims(
            gl.convert_layout(top, gl.SliceLayout(1, sums.type.layout), assert_trivial=True), 1
        ))  # fmt: skip
    dp = warpgroup_mma_wait(num_outstanding=LEFT, deps=(dp,))
    return p * (dp - gl.expand_dims(delta, 1))


@gluon.jit
def consume(
    queries, douts, keys, values, dq_desc, wide, tops, deltas, factor, scale, size, band, extra,
    WG: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr, PIN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dQ of 64 rows."""
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    TABLES: gl.constexpr = extra.row_start is not None
    S_L: gl.constexpr = accumulator(BK)
    Q_L: gl.constexpr = accumulator(D)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=Q_L, k_width=2)
    head, row_tile, q_at, k_at, offset, first, n = query_tile(size, band, extra, 2 * ROWS, BK)
    len_k = k_at.length
    base = row_base(q_at, head, size, PACKED)
    row = row_tile * (2 * ROWS) + WG * ROWS
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_L))
    inside = rows < q_at.length
    top = gl.load(tops + base + rows, mask=inside, other=float("inf"))
    delta = gl.load(deltas + base + rows, mask=inside, other=0.0)
    start, end = full_range(
        row, row + ROWS - 1, len_k, offset, band.left, band.right, band.prefix
    )  # no mask is needed there
    if TABLES:
        low, high = shared_by(extra, q_at.b, size.len_q, row, ROWS)
        start, end = max(start, low), min(end, high)
        row_start, row_end = runs_of(extra, size, q_at.b, rows)
        seen = Seen(rows, len_k, offset, row_start, row_end)
    else:
        seen = Seen(rows, len_k, offset, rows, rows)
    k0 = first_keys(row_tile, first, n, band, BK)
    dq = gl.zeros([ROWS, D], gl.float32, Q_L)
    q = receive(queries, WG, 0, ROWS, D)

    # the first block has nothing to overlap but the other warpgroup
    k = receive(keys, 0, 0, BK, D)
    s = gl.zeros([ROWS, BK], gl.float32, S_L)
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    do = receive(douts, WG, 0, ROWS, E)
    v = receive(values, 0, 0, BK, E)
    dp = gl.zeros([ROWS, BK], gl.float32, S_L)
    dp = warpgroup_mma(do, v.permute((1, 0)), dp, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    masked = (k0 < start) | (k0 + BK > end)
    ds = differentiate(
        s, dp, k0, seen, masked, top, delta, band, extra.cap, factor, MASKED, TABLES, 0, False,
    )  # fmt: skip
    release(values, 0)
    ds16 = gl.convert_layout(ds.to(DT), P_L, assert_trivial=True)
    before = 0
    stage_k, phase_k = advance(0, 0, STAGES_K)
    stage_v, phase_v = advance(0, 0, STAGES_V)
    for _ in range(n - 1):
        k0 = next_keys(k0, first, n, BK)
        own = disguised(WG, k0)
        q = queries.tiles.index(own).reshape([ROWS, D])
        do = douts.tiles.index(own).reshape([ROWS, E])
        k = receive(keys, stage_k, phase_k, BK, D)
        s = gl.zeros([ROWS, BK], gl.float32, S_L)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(values.full.index(stage_v), phase_v)
        v = values.tiles.index(disguised(stage_v, k0)).reshape([BK, E])
        dp = gl.zeros([ROWS, BK], gl.float32, S_L)
        dp = warpgroup_mma(do, v.permute((1, 0)), dp, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds16, keys.tiles.index(before).reshape([BK, D]), dq, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=2, deps=(s,))
        masked = (k0 < start) | (k0 + BK > end)
        ds = differentiate(
            s, dp, k0, seen, masked, top, delta, band, extra.cap, factor, MASKED, TABLES, 1, PIN,
        )  # fmt: skip
        release(values, stage_v)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        release(keys, before)
        ds16 = gl.convert_layout(ds.to(DT), P_L, assert_trivial=True)
        before = stage_k
        stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
    dq = warpgroup_mma(ds16, keys.tiles.index(before).reshape([BK, D]), dq, is_async=True)
    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    release(keys, before)
    write(dq_desc, queries.tiles.index(WG), wide, dq * scale, q_at, row, head, size.dim, PACKED, D)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["factor", "scale", *Size._fields, *Sides._fields])
def by_queries(
    q_desc, do_desc, k_desc, v_desc, dq_desc, wide, tops, deltas, factor, scale,
    len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride,
    offset, left, right, prefix, extra,
    BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr, PIN: gl.constexpr, MASKED: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """dQ of 128 rows of a head."""
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride
    )
    band = Sides(offset, left, right, prefix)
    queries = channel(q_desc, 2, 1)
    douts = channel(do_desc, 2, 1)
    keys = channel(k_desc, STAGES_K, 2)
    values = channel(v_desc, STAGES_V, 2)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (queries, douts, keys, values, dq_desc, wide, tops, deltas, factor, scale, size, band, extra, 0, BK,
                   D, E, STAGES_K, STAGES_V, PIN, MASKED)),
        (consume, (queries, douts, keys, values, dq_desc, wide, tops, deltas, factor, scale, size, band, extra, 1, BK,
                   D, E, STAGES_K, STAGES_V, PIN, MASKED)),
        (produce, (queries, douts, keys, values, q_desc, do_desc, k_desc, v_desc, size, band, extra, BK, STAGES_K,
                   STAGES_V)),
    ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
