"""The backward on Hopper by tiles of 64·WGS keys: dK and dV, and dQ with them, which warpgroups form in turns.

As `sm90_backward`, but a block's dQ is one warpgroup's, over all keys of the tile, and the next block's another's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon.channel import (
    Channel,
    barriers,
    channel,
    receive,
    release,
    ring,
    send,
)
from relampago.backends.gluon.sizes import Sides
from relampago.backends.gluon.sm90_gradients import (
    ROWS,
    Size,
    advance,
    as_held,
    first_turn,
    hide_rows,
    key_tile,
    next_rows,
    partly,
    row_base,
    send_rows,
    slope,
    write,
)
from relampago.backends.gluon.softmax import capped, exp2

BUFFERS = gl.constexpr(4)


@gluon.jit
def produce(
    queries, douts, keys, values, tops, deltas, q_desc, do_desc, k_desc, v_desc, top_desc,
    delta_desc, size, band, extra, WGS: gl.constexpr, BQ: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: the tile's keys and values once, then rows of every head of the group."""
    PACKED: gl.constexpr = extra.cu_q is not None
    g, k0, q_at, k_at, _, first, n = key_tile(size, band, extra, BQ, WGS * ROWS)
    begin = first_turn(k0, first, n, band, BQ)
    block, head = begin, g * size.group
    for w in gl.static_range(WGS):
        send(keys, k_desc, w, 1, k_at, k0 + w * ROWS, g, PACKED)
    stage, phase = 0, 1
    for i in range(n * size.group):
        base = row_base(q_at, head, size, PACKED)
        row = block * BQ
        send_rows(queries, tops, q_desc, top_desc, stage, phase, q_at, row, head, base, PACKED)
        if i == 0:
            for w in gl.static_range(WGS):
                send(values, v_desc, w, 1, k_at, k0 + w * ROWS, g, PACKED)
        send_rows(douts, deltas, do_desc, delta_desc, stage, phase, q_at, row, head, base, PACKED)
        stage, phase = advance(stage, phase, STAGES)
        block, head = next_rows(block, head, first, n, begin)


@gluon.jit
def add_dq(
    scores, keys, buffer, phase, sums, row, WGS: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr
):
    """dQ of a block of 64 rows over all keys of the tile, added to the sums; row < 0: not added."""
    Q_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    mbarrier.wait(scores.full.index(buffer), phase)
    dq = gl.zeros([BQ, D], gl.float32, Q_L)
    for w in gl.static_range(WGS):
        ds = scores.tiles.index(buffer * WGS + w).permute((1, 0))
        dq = warpgroup_mma(
            ds, keys.tiles.index(w).reshape([ROWS, D]), dq, use_acc=w > 0, is_async=True
        )
    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    mbarrier.arrive(scores.empty.index(buffer), count=1)
    if row >= 0:
        x = as_held(dq)
        at = sums + gl.cast(row, gl.int64) * D
        gl.atomic_add(at + gl.arange(0, BQ * D, layout=x.type.layout), x, sem="relaxed")


@gluon.jit
def consume(
    queries, douts, keys, values, tops, deltas, scores, end, dk_desc, dv_desc, wide_k, wide_v,
    sums, factor, scale, size, band, extra, WG: gl.constexpr, WGS: gl.constexpr, BQ: gl.constexpr,
    D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 keys, every WGS-th block's dQ."""
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BQ, 16]
    )
    K_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    V_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16]
    )
    PK_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_L, k_width=2)
    PV_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_L, k_width=2)
    g, k0, q_at, k_at, offset, first, n = key_tile(size, band, extra, BQ, WGS * ROWS)
    begin = first_turn(k0, first, n, band, BQ)
    block, head = begin, g * size.group
    k0 += WG * ROWS
    at_keys = k0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_L))
    dk = gl.zeros([ROWS, D], gl.float32, K_L)
    dv = gl.zeros([ROWS, E], gl.float32, V_L)
    stage, phase = 0, 0
    buffer, free = 0, 1  # of dS, and the phase in which it is free
    last, last_phase, last_row, turn = 0, 0, 0, WGS  # the block before: whose dQ
    k = receive(keys, WG, 0, ROWS, D)
    for w in gl.static_range(WGS):
        mbarrier.wait(keys.full.index(w), 0)
    v = receive(values, WG, 0, ROWS, E)
    for _ in range(n * size.group):
        q0 = block * BQ
        row = row_base(q_at, head, size, PACKED) + q0
        if PACKED:  # an empty sequence has no rows to add to
            row = row if q0 < q_at.length else -1
        q = receive(queries, stage, phase, BQ, D)
        s = gl.zeros([ROWS, BQ], gl.float32, S_L)
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
        do = receive(douts, stage, phase, BQ, E)
        dp = gl.zeros([ROWS, BQ], gl.float32, S_L)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        raised = capped(s, extra.cap)
        s = raised
        if MASKED:  # noqa: SIM102 - one is known when compiled
            if partly(q0, k0, q_at, k_at.length, offset, band, BQ, PACKED):
                s = hide_rows(
                    s, q0, at_keys, q_at.length, k_at.length, offset, band, ENDS, PACKED, S_L
                )
        p = exp2(s * factor - tops.index(stage).load(S_L))
        p16 = gl.convert_layout(p.to(DT), PV_L, assert_trivial=True)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        p = slope(p, raised, extra.cap)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        ds = (p * (dp - deltas.index(stage).load(S_L))).to(DT)
        mbarrier.wait(scores.empty.index(buffer), free)
        scores.tiles.index(buffer * WGS + WG).store(ds)
        fence_async_shared()
        mbarrier.arrive(scores.full.index(buffer), count=1)
        dk = warpgroup_mma(gl.convert_layout(ds, PK_L, assert_trivial=True), q, dk, is_async=True)
        dv, dk = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk))
        release(queries, stage)
        release(douts, stage)
        if turn == WG:
            add_dq(scores, keys, last, last_phase, sums, last_row, WGS, BQ, D)
        turn = turn + 1
        turn = 0 if turn >= WGS else turn
        last, last_phase, last_row = buffer, free ^ 1, row
        buffer, free = advance(buffer, free, BUFFERS)
        stage, phase = advance(stage, phase, STAGES)
        block, head = next_rows(block, head, first, n, begin)
    if turn == WG:
        add_dq(scores, keys, last, last_phase, sums, last_row, WGS, BQ, D)

    heads = size.heads // size.group
    base = k_at.first if PACKED else k_at.b * size.len_k
    write(
        dv_desc, values.tiles.index(WG), wide_v, dv, k_at, k0, g, heads, base, size.dim_v, PACKED, E
    )
    mbarrier.arrive(end, count=1)  # the others form their dQ from these keys
    mbarrier.wait(end, 0)
    write(
        dk_desc, keys.tiles.index(WG), wide_k, dk * scale, k_at, k0, g, heads, base, size.dim,
        PACKED, D,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "scale", *Size._fields, *Sides._fields])
def in_turns(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, wide_k, wide_v, top_desc, delta_desc, sums,
    factor, scale, 
    len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, offset, left, right, prefix, extra,
    WGS: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, ENDS: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64·WGS keys of a kv head, and their part of dQ."""
    size = Size(len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v)
    band = Sides(offset, left, right, prefix)
    queries = channel(q_desc, STAGES, WGS)
    douts = channel(do_desc, STAGES, WGS)
    keys = channel(k_desc, WGS, 1)
    values = channel(v_desc, WGS, 1)
    tops = gl.allocate_shared_memory(
        gl.float32, ring(STAGES, top_desc.block_shape), top_desc.layout
    )
    deltas = gl.allocate_shared_memory(
        gl.float32, ring(STAGES, delta_desc.block_shape), delta_desc.layout
    )
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BQ], k_desc.dtype)
    places = gl.allocate_shared_memory(k_desc.dtype, [WGS * BUFFERS, ROWS, BQ], DS_L)
    scores = Channel(places, barriers(BUFFERS, WGS), barriers(BUFFERS, 1), places)
    end = barriers(1, WGS)
    fence_async_shared()
    if WGS == 3:
        gl.warp_specialize([
            (consume, (queries, douts, keys, values, tops, deltas, scores, end.index(0), dk_desc, dv_desc, wide_k,
                       wide_v, sums, factor, scale, size, band, extra, 0, WGS, BQ, D, E, STAGES, MASKED, ENDS)),
            (consume, (queries, douts, keys, values, tops, deltas, scores, end.index(0), dk_desc, dv_desc, wide_k,
                       wide_v, sums, factor, scale, size, band, extra, 1, WGS, BQ, D, E, STAGES, MASKED, ENDS)),
            (consume, (queries, douts, keys, values, tops, deltas, scores, end.index(0), dk_desc, dv_desc, wide_k,
                       wide_v, sums, factor, scale, size, band, extra, 2, WGS, BQ, D, E, STAGES, MASKED, ENDS)),
            (produce, (queries, douts, keys, values, tops, deltas, q_desc, do_desc, k_desc, v_desc, top_desc,
                       delta_desc, size, band, extra, WGS, BQ, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (queries, douts, keys, values, tops, deltas, scores, end.index(0), dk_desc, dv_desc, wide_k,
                       wide_v, sums, factor, scale, size, band, extra, 0, WGS, BQ, D, E, STAGES, MASKED, ENDS)),
            (consume, (queries, douts, keys, values, tops, deltas, scores, end.index(0), dk_desc, dv_desc, wide_k,
                       wide_v, sums, factor, scale, size, band, extra, 1, WGS, BQ, D, E, STAGES, MASKED, ENDS)),
            (produce, (queries, douts, keys, values, tops, deltas, q_desc, do_desc, k_desc, v_desc, top_desc,
                       delta_desc, size, band, extra, WGS, BQ, STAGES)),
        ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
