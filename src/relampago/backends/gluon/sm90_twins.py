"""The backward on Hopper for wide heads: dK and dV of 64 keys, one warpgroup each; docs/hopper.md has the drawing.

A head of 256 leaves a warpgroup room for one accumulator of 64 keys, 128 registers a thread. So the two divide the work
by product and not by keys, two products each:

    values' twin   Sᵀ = K·Qᵀ     P = 2^(S - top), to shared memory     dV += Pᵀ·dO
    keys' twin     dPᵀ = V·dOᵀ   dS = P (dP - delta)                   dK += dSᵀ·Q

Each has a block's first product and the block before's second in flight together; the values' twin takes the softmax
under its second product, as the forward does. dQ comes from `sm90_queries`.
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

from relampago.backends.gluon.channel import (
    Channel,
    barriers,
    channel,
    receive,
    release,
    ring,
    send,
)
from relampago.backends.gluon.held import as_held, as_tile
from relampago.backends.gluon.sizes import Sides
from relampago.backends.gluon.sm90_gradients import (
    ROWS,
    Size,
    advance,
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
from relampago.backends.gluon.tiles import accumulator


@gluon.jit
def produce(
    queries, douts, keys, values, tops, deltas, q_desc, do_desc, k_desc, v_desc, top_desc,
    delta_desc, size, band, extra, BQ: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: the tile's keys and values once, then rows of every head of the group."""
    PACKED: gl.constexpr = extra.cu_q is not None
    g, k0, q_at, k_at, _, first, n, _ = key_tile(gl.program_id(0), size, band, extra, BQ, ROWS)
    begin = first_turn(k0, first, n, band, BQ)
    block, head = begin, g * size.group
    send(keys, k_desc, 0, 1, k_at, k0, g, PACKED)
    stage, phase = 0, 1
    for i in range(n * size.group):
        base = row_base(q_at, head, size, PACKED)
        row = block * BQ
        send_rows(queries, tops, q_desc, top_desc, stage, phase, q_at, row, head, base, PACKED)
        if i == 0:
            send(values, v_desc, 0, 1, k_at, k0, g, PACKED)
        send_rows(douts, deltas, do_desc, delta_desc, stage, phase, q_at, row, head, base, PACKED)
        stage, phase = advance(stage, phase, STAGES)
        block, head = next_rows(block, head, first, n, begin)


@gluon.jit
def recompute(
    s, stage, tops, q0, k0, at_keys, q_at, len_k, offset, size, band, extra, factor, S_L: gl.constexpr,
    MASKED: gl.constexpr, ENDS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """(P, what its twin takes of it) of a block of scores."""
    raised = capped(s, extra.cap)
    s = raised
    if MASKED:  # noqa: SIM102 - one is known when compiled
        if partly(q0, k0, q_at, len_k, offset, size, band, extra, s.shape[1], PACKED):
            s = hide_rows(s, q0, at_keys, q_at, len_k, offset, size, band, extra, ENDS, PACKED, S_L)
    p = exp2(s * factor - tops.index(stage).load(S_L))
    return p, slope(p, raised, extra.cap)


@gluon.jit
def hand_over(handed, slot, phase, p):
    """Values' twin: P of a block for the other, whose threads hold what these hold."""
    mbarrier.wait(handed.empty.index(slot), phase)
    handed.tiles.index(slot).store(as_held(p))
    mbarrier.arrive(handed.full.index(slot), count=1)


@gluon.jit
def take(handed, slot, phase, dp, S_L: gl.constexpr):
    """Keys' twin: dS = P (dP - delta) of a block."""
    mbarrier.wait(handed.full.index(slot), phase)
    held = as_held(dp)
    held = held * handed.tiles.index(slot).load(held.type.layout)
    mbarrier.arrive(handed.empty.index(slot), count=1)
    return gl.convert_layout(as_tile(held, dp.shape[1]), S_L, assert_trivial=True)


@gluon.jit
def consume_values(
    queries, douts, keys, values, tops, handed, end, dv_desc, wide_v, factor, size, band, extra,
    BQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    MASKED: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """The values' twin: S, P and dV."""
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    S_L: gl.constexpr = accumulator(BQ)
    V_L: gl.constexpr = accumulator(E)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_L, k_width=2)
    g, k0, q_at, k_at, offset, first, n, _ = key_tile(gl.program_id(0), size, band, extra, BQ, ROWS)
    begin = first_turn(k0, first, n, band, BQ)
    block, head = begin, g * size.group
    len_k = k_at.length
    at_keys = k0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_L))
    dv = gl.zeros([ROWS, E], gl.float32, V_L)
    k = receive(keys, 0, 0, ROWS, D)

    # the first block has nothing to overlap but its twin
    q = receive(queries, 0, 0, BQ, D)
    s = gl.zeros([ROWS, BQ], gl.float32, S_L)
    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    p, given = recompute(
        s, 0, tops, block * BQ, k0, at_keys, q_at, len_k, offset, size, band, extra, factor, S_L,
        MASKED, ENDS, PACKED,
    )  # fmt: skip
    release(queries, 0)
    hand_over(handed, 0, 1, given)
    p16 = gl.convert_layout(p.to(DT), P_L, assert_trivial=True)
    stage, phase = advance(0, 0, STAGES)
    slot, turn = advance(0, 1, SLOTS)
    before, phase_before = 0, 0
    for _ in range(n * size.group - 1):
        block, head = next_rows(block, head, first, n, begin)
        q = receive(queries, stage, phase, BQ, D)
        s = gl.zeros([ROWS, BQ], gl.float32, S_L)
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
        do = receive(douts, before, phase_before, BQ, E)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        p, given = recompute(
            s, stage, tops, block * BQ, k0, at_keys, q_at, len_k, offset, size, band, extra, factor,
            S_L, MASKED, ENDS, PACKED,
        )  # fmt: skip
        release(queries, stage)
        hand_over(handed, slot, turn, given)
        dv = warpgroup_mma_wait(num_outstanding=0, deps=(dv,))
        release(douts, before)
        p16 = gl.convert_layout(p.to(DT), P_L, assert_trivial=True)
        before, phase_before = stage, phase
        stage, phase = advance(stage, phase, STAGES)
        slot, turn = advance(slot, turn, SLOTS)
    do = receive(douts, before, phase_before, BQ, E)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    dv = warpgroup_mma_wait(num_outstanding=0, deps=(dv,))
    release(douts, before)

    mbarrier.arrive(end, count=1)  # the values' tile is the place for dV, the keys' for dK
    mbarrier.wait(end, 0)
    tile = values.tiles.index(0)
    write(dv_desc, tile, wide_v, dv, k_at, k0, g, size.dim_v, PACKED, E)
    tma.store_wait(pendings=0)


@gluon.jit
def consume_keys(
    queries, douts, keys, values, deltas, handed, end, dk_desc, wide_k, scale, size, band, extra,
    BQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The keys' twin: dP, dS and dK."""
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    S_L: gl.constexpr = accumulator(BQ)
    K_L: gl.constexpr = accumulator(D)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_L, k_width=2)
    g, k0, _, k_at, _, _, n, _ = key_tile(gl.program_id(0), size, band, extra, BQ, ROWS)
    dk = gl.zeros([ROWS, D], gl.float32, K_L)
    v = receive(values, 0, 0, ROWS, E)

    do = receive(douts, 0, 0, BQ, E)
    dp = gl.zeros([ROWS, BQ], gl.float32, S_L)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    dp = dp - deltas.index(0).load(S_L)
    release(douts, 0)
    ds = take(handed, 0, 0, dp, S_L)
    ds16 = gl.convert_layout(ds.to(DT), P_L, assert_trivial=True)
    stage, phase = advance(0, 0, STAGES)
    slot, turn = advance(0, 0, SLOTS)
    before, phase_before = 0, 0
    for _ in range(n * size.group - 1):
        # dK first: its block of Q is free the sooner, and the twin's products hide the arithmetic
        q = receive(queries, before, phase_before, BQ, D)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        do = receive(douts, stage, phase, BQ, E)
        dp = gl.zeros([ROWS, BQ], gl.float32, S_L)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(num_outstanding=1, deps=(dk,))
        release(queries, before)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        dp = dp - deltas.index(stage).load(S_L)
        release(douts, stage)
        ds = take(handed, slot, turn, dp, S_L)
        ds16 = gl.convert_layout(ds.to(DT), P_L, assert_trivial=True)
        before, phase_before = stage, phase
        stage, phase = advance(stage, phase, STAGES)
        slot, turn = advance(slot, turn, SLOTS)
    q = receive(queries, before, phase_before, BQ, D)
    dk = warpgroup_mma(ds16, q, dk, is_async=True)
    dk = warpgroup_mma_wait(num_outstanding=0, deps=(dk,))
    release(queries, before)

    mbarrier.arrive(end, count=1)
    mbarrier.wait(end, 0)
    tile = keys.tiles.index(0)
    write(dk_desc, tile, wide_k, dk * scale, k_at, k0, g, size.dim, PACKED, D)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["factor", "scale", *Size._fields, *Sides._fields])
def by_products(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, wide_k, wide_v, top_desc, delta_desc,
    factor, scale,
    len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride,
    offset, left, right, prefix, extra,
    BQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, ENDS: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys of a kv head."""
    SLOTS: gl.constexpr = 2
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride
    )
    band = Sides(offset, left, right, prefix)
    queries = channel(q_desc, STAGES, 2)
    douts = channel(do_desc, STAGES, 2)
    keys = channel(k_desc, 1, 1)
    values = channel(v_desc, 1, 1)
    tops = gl.allocate_shared_memory(
        gl.float32, ring(STAGES, top_desc.block_shape), top_desc.layout
    )
    deltas = gl.allocate_shared_memory(
        gl.float32, ring(STAGES, delta_desc.block_shape), delta_desc.layout
    )
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    places = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS * BQ], line)
    handed = Channel(places, barriers(SLOTS, 1), barriers(SLOTS, 1), places)
    end = barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize([
        (consume_values, (queries, douts, keys, values, tops, handed, end.index(0), dv_desc, wide_v, factor, size,
                          band, extra, BQ, D, E, STAGES, SLOTS, MASKED, ENDS)),
        (consume_keys, (queries, douts, keys, values, deltas, handed, end.index(0), dk_desc, wide_k, scale, size, band,
                        extra, BQ, D, E, STAGES, SLOTS)),
        (produce, (queries, douts, keys, values, tops, deltas, q_desc, do_desc, k_desc, v_desc, top_desc, delta_desc,
                   size, band, extra, BQ, STAGES)),
    ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
