"""The backward on Hopper by tiles of 128 keys: dK and dV, and dQ with them; docs/hopper.md has the drawing.

A block of threads is one producer warp and two consumer warpgroups of 64 keys each, whose dK and dV stay in registers
while blocks of rows go by:

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ    dV += Pᵀ·dO    dK += dSᵀ·Q    dQ = dS·K

Scores lie as [keys, rows], so that weights are the left operand of dV and dK as they come, in registers. Only dS goes
through shared memory: each warpgroup forms its half of the block's dQ over all 128 keys, and adds it to sums in global
memory, in the order in which its threads hold it: 512 bytes an instruction of a warp.

`counts`: of blocks of rows, if tiles are to add to dQ in the order of their keys (`sm90_order`); tiles are drawn then.

SCHEDULE: a block of threads takes one tile, or draws tiles from a counter until there are none: rows of the next tile
are then on their way while this one ends, and its keys and values too where TILES of them fit.

AHEAD, bits: 1 the next block's S is issued under this block's dK; 2 dQ is formed a block late, so that the warpgroups
need not meet in every block.
"""

from typing import Any, NamedTuple

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
from relampago.backends.gluon.held import as_held
from relampago.backends.gluon.named import MEETINGS, PAIR, arrive, sync
from relampago.backends.gluon.sizes import Sides
from relampago.backends.gluon.sm90_gradients import (
    ROWS,
    Size,
    advance,
    disguised,
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
from relampago.backends.gluon.sm90_order import Order, await_turn, keep_order, order_of, tell_added
from relampago.backends.gluon.softmax import capped, exp2
from relampago.backends.gluon.tiles import (
    DYNAMIC,
    SLOTS,
    WORDS,
    accumulator,
    draw,
    send_end,
    send_number,
    tile_of,
)


class Shared(NamedTuple):
    """Shared memory of a block of threads: rings of tiles, and what its warps tell one another."""

    q: Any
    do: Any
    k: Any
    v: Any
    tops: Any  # by the stages of q
    deltas: Any  # by those of do
    slots: Any
    scores: Any  # dS
    met: Any
    end: Any
    order: Any


class From(NamedTuple):
    """TMA's views of what is read."""

    q: Any
    do: Any
    k: Any
    v: Any
    top: Any
    delta: Any


class Into(NamedTuple):
    """Where gradients go: TMA's views, pointers in fp32, and the sums of dQ."""

    dk: Any
    dv: Any
    wide_k: Any
    wide_v: Any
    sums: Any


class Call(NamedTuple):
    """Numbers and tables of a call."""

    factor: Any  # of scores, in base 2
    scale: Any  # of dK
    size: Any
    band: Any
    extra: Any


@gluon.jit
def send_tile(
    number, turn, stage, phase, shared, source, counter, call, BQ: gl.constexpr, STAGES: gl.constexpr,
    TILES: gl.constexpr, SCHEDULE: gl.constexpr,
):  # fmt: skip
    """A tile's keys and values once, then rows of every head of the group; and which tile is next."""
    size, band, extra, order = call.size, call.band, call.extra, shared.order
    PACKED: gl.constexpr = extra.cu_q is not None
    g, k0, q_at, k_at, _, first, n, _ = key_tile(number, size, band, extra, BQ, 2 * ROWS)
    begin = first_turn(k0, first, n, band, BQ, order.counts is None)
    block, head = begin, g * size.group
    place = turn % TILES * 2
    free = turn // TILES & 1 ^ 1
    following = number
    if SCHEDULE == DYNAMIC:
        send_number(shared.slots, turn, number)
        following = draw_next(counter, order, size)
    send(shared.k, source.k, place, free, k_at, k0, g, PACKED)
    send(shared.k, source.k, place + 1, free, k_at, k0 + ROWS, g, PACKED)
    for i in range(n * size.group):
        base = row_base(q_at, head, size, PACKED)
        row = block * BQ
        send_rows(
            shared.q, shared.tops, source.q, source.top, stage, phase, q_at, row, head, base, PACKED
        )  # fmt: skip
        if i == 0:
            send(shared.v, source.v, place, free, k_at, k0, g, PACKED)
            send(shared.v, source.v, place + 1, free, k_at, k0 + ROWS, g, PACKED)
        send_rows(
            shared.do, shared.deltas, source.do, source.delta, stage, phase, q_at, row, head, base, PACKED
        )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)
        block, head = next_rows(block, head, first, n, begin)
    return following, stage, phase


@gluon.jit
def draw_first(counter, order, size):
    """The tile to begin with. In order a program draws it as well: who begins earlier then has the earlier tile."""
    if order.counts is None:
        return gl.program_id(0)
    else:
        return draw_next(counter, order, size)


@gluon.jit
def draw_next(counter, order, size):
    """The next tile that nobody has."""
    if order.counts is None:
        return draw(counter, size.tiles * size.places)
    else:
        programs = gl.num_programs(0)
        return draw(counter, size.tiles * size.places + programs) - programs


@gluon.jit
def produce(
    shared, source, counter, call, BQ: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    SCHEDULE: gl.constexpr,
):  # fmt: skip
    """One warp: all loads."""
    number = draw_first(counter, shared.order, call.size)
    stage, phase, turn = 0, 1, 0
    if SCHEDULE == DYNAMIC:
        while number < call.size.tiles * call.size.places:
            number, stage, phase = send_tile(
                number, turn, stage, phase, shared, source, counter, call, BQ, STAGES, TILES, SCHEDULE
            )  # fmt: skip
            turn += 1
        send_end(shared.slots, turn)
    else:
        send_tile(
            number, turn, stage, phase, shared, source, counter, call, BQ, STAGES, TILES, SCHEDULE
        )


@gluon.jit
def meet(met, buffer, cycle, WG: gl.constexpr, NAMED: gl.constexpr, LATE: gl.constexpr):
    """Until both warpgroups have stored their dS in a buffer."""
    if NAMED:
        if LATE:  # the other one has arrived, this one long since
            sync(MEETINGS + buffer * 2 + (1 - WG), PAIR)
        else:
            sync(MEETINGS + buffer, PAIR)
    else:
        mbarrier.wait(met.index(buffer), cycle & 1)


@gluon.jit
def stored(met, buffer, WG: gl.constexpr, NAMED: gl.constexpr, LATE: gl.constexpr):
    """Tell the other warpgroup that this one's dS is in a buffer."""
    if NAMED:
        if LATE:
            arrive(MEETINGS + buffer * 2 + WG, PAIR)
    else:
        mbarrier.arrive(met.index(buffer), count=1)


@gluon.jit
def form_dq(scores, keys, place, buffer, WG: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr):
    """Start this warpgroup's half of a block's dQ: 64 rows of it, or all 64 with half the columns.

    The tile's keys lie at `place` and the one after it.
    """
    a0 = scores.index(buffer * 2)
    a1 = scores.index(buffer * 2 + 1)
    k0 = keys.tiles.index(place).reshape([ROWS, D])
    k1 = keys.tiles.index(place + 1).reshape([ROWS, D])
    if BQ == 64:
        W: gl.constexpr = D // 2
        k0 = k0.slice(WG * W, W, dim=1)
        k1 = k1.slice(WG * W, W, dim=1)
    else:
        W: gl.constexpr = D
        a0 = a0.slice(WG * 64, 64, dim=1)
        a1 = a1.slice(WG * 64, 64, dim=1)
    Q_L: gl.constexpr = accumulator(W)
    dq = gl.zeros([ROWS, W], gl.float32, Q_L)
    dq = warpgroup_mma(a0.permute((1, 0)), k0, dq, use_acc=False, is_async=True)
    return warpgroup_mma(a1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def add_dq(
    sums, order, n, dq, row, WG: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr,
    ALWAYS: gl.constexpr,
):  # fmt: skip
    """Add a warpgroup's half of the n-th block's dQ to the sums, which lie as its threads hold them; row < 0: don't."""
    if ALWAYS:  # noqa: SIM114 - known when compiled
        add_part(sums, order, n, dq, row, WG, BQ, D)
    elif row >= 0:
        add_part(sums, order, n, dq, row, WG, BQ, D)


@gluon.jit
def add_part(sums, order, n, dq, row, WG: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr):
    """Add [64, W] in the order of the threads, when it is its turn."""
    x = as_held(dq)
    at = sums + (gl.cast(row, gl.int64) * D + WG * (BQ * D // 2))
    await_turn(order, n)
    gl.atomic_add(at + gl.arange(0, BQ * D // 2, layout=x.type.layout), x, sem="relaxed")
    tell_added(order, n)


@gluon.jit
def take_tile(
    number, turn, stage, phase, done, shared, into, call, WG: gl.constexpr, BQ: gl.constexpr,
    D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, FUSED: gl.constexpr,
    AHEAD: gl.constexpr, NAMED: gl.constexpr, MASKED: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 keys, half of every block's dQ. done: blocks of rows of the tiles before."""
    queries, douts, keys, values = shared.q, shared.do, shared.k, shared.v
    scores, met, order = shared.scores, shared.met, shared.order
    size, band, extra = call.size, call.band, call.extra
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    EARLY: gl.constexpr = AHEAD % 2 == 1
    LATE: gl.constexpr = AHEAD >= 2
    # buffers of dS: what is written now was read two blocks ago by a warpgroup that may be a block behind
    BUFFERS: gl.constexpr = 4 if LATE else 2
    S_L: gl.constexpr = accumulator(BQ)
    K_L: gl.constexpr = accumulator(D)
    V_L: gl.constexpr = accumulator(E)
    PK_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_L, k_width=2)
    PV_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_L, k_width=2)
    g, k0, q_at, k_at, offset, first, n, _ = key_tile(number, size, band, extra, BQ, 2 * ROWS)
    begin = first_turn(k0, first, n, band, BQ, order.counts is None)
    block, head = begin, g * size.group
    k0 += WG * ROWS
    at_keys = k0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_L))
    dk = gl.zeros([ROWS, D], gl.float32, K_L)
    dv = gl.zeros([ROWS, E], gl.float32, V_L)
    last_row = -1
    count = n * size.group
    place = turn % TILES * 2
    own = place + WG
    there = turn // TILES & 1
    k = receive(keys, own, there, ROWS, D)
    if FUSED:
        mbarrier.wait(keys.full.index(place + (1 - WG)), there)
    if EARLY:
        q = receive(queries, stage, phase, BQ, D)
        s = gl.zeros([ROWS, BQ], gl.float32, S_L)
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    v = receive(values, own, there, ROWS, E)
    for i in range(count):
        q0 = block * BQ
        row = row_base(q_at, head, size, PACKED) + q0
        if PACKED and order.counts is None:
            row = row if q0 < q_at.length else -1  # an empty sequence has only room for rows
        if EARLY or BQ > ROWS or TILES > 1:  # short of registers
            again = disguised(own, q0)
            k = keys.tiles.index(again).reshape([ROWS, D])
            v = values.tiles.index(again).reshape([ROWS, E])
        q = queries.tiles.index(stage).reshape([BQ, D])
        if not EARLY:
            mbarrier.wait(queries.full.index(stage), phase)
            s = gl.zeros([ROWS, BQ], gl.float32, S_L)
            s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
        do = receive(douts, stage, phase, BQ, E)
        dp = gl.zeros([ROWS, BQ], gl.float32, S_L)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
        if not EARLY:
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        raised = capped(s, extra.cap)
        s = raised
        if MASKED:  # noqa: SIM102 - one is known when compiled
            if partly(q0, k0, q_at, k_at.length, offset, size, band, extra, BQ, PACKED):
                s = hide_rows(
                    s, q0, at_keys, q_at, k_at.length, offset, size, band, extra, ENDS, PACKED, S_L
                )
        p = exp2(s * call.factor - shared.tops.index(stage).load(S_L))
        p16 = gl.convert_layout(p.to(DT), PV_L, assert_trivial=True)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        p = slope(p, raised, extra.cap)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        ds = (p * (dp - shared.deltas.index(stage).load(S_L))).to(DT)
        buffer = (done + i) & (BUFFERS - 1)
        if FUSED:
            scores.index(buffer * 2 + WG).store(ds)
            fence_async_shared()
            stored(met, buffer, WG, NAMED, LATE)
        dk = warpgroup_mma(gl.convert_layout(ds, PK_L, assert_trivial=True), q, dk, is_async=True)
        stage_q = stage
        stage, phase = advance(stage, phase, STAGES)
        if EARLY:
            # after the last block from what shared memory holds, unused: no branch stands around a product
            dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))
            mbarrier.wait(queries.full.index(stage), phase, pred=i + 1 < count)
            q = queries.tiles.index(stage).reshape([BQ, D])
            s = gl.zeros([ROWS, BQ], gl.float32, S_L)
            s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
        if FUSED:
            if LATE:
                at = (done + i - 1) & (BUFFERS - 1)
                if i > 0:
                    meet(met, at, (done + i - 1) // BUFFERS, WG, NAMED, LATE)
            else:
                at = buffer
                meet(met, at, (done + i) // BUFFERS, WG, NAMED, LATE)
            dq = form_dq(
                scores, keys, place, at, WG, BQ, D
            )  # the first block's isn't added, if LATE
            if EARLY:
                dk, s = warpgroup_mma_wait(num_outstanding=2, deps=(dk, s))
            else:
                dv, dk = warpgroup_mma_wait(num_outstanding=2, deps=(dv, dk))
            release(queries, stage_q)
            release(douts, stage_q)
            dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
            if LATE:
                add_dq(into.sums, order, done + i - 1, dq, last_row, WG, BQ, D, False)
            else:
                add_dq(into.sums, order, done + i, dq, row, WG, BQ, D, not PACKED)
        else:
            if EARLY:
                dk, s = warpgroup_mma_wait(num_outstanding=0, deps=(dk, s))
            else:
                dv, dk = warpgroup_mma_wait(num_outstanding=0, deps=(dv, dk))
            release(queries, stage_q)
            release(douts, stage_q)
        last_row = row
        block, head = next_rows(block, head, first, n, begin)
    if FUSED and LATE:
        at = (done + count - 1) & (BUFFERS - 1)
        meet(met, at, (done + count - 1) // BUFFERS, WG, NAMED, LATE)
        dq = form_dq(scores, keys, place, at, WG, BQ, D)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        add_dq(into.sums, order, done + count - 1, dq, last_row, WG, BQ, D, False)

    write(into.dv, values.tiles.index(own), into.wide_v, dv, k_at, k0, g, size.dim_v, PACKED, E)
    if FUSED:  # the other warpgroup forms its dQ from these keys
        mbarrier.arrive(shared.end, count=1)
        mbarrier.wait(shared.end, turn & 1)
    dk *= call.scale
    write(into.dk, keys.tiles.index(own), into.wide_k, dk, k_at, k0, g, size.dim, PACKED, D)
    tma.store_wait(pendings=0)
    release(values, own)
    release(keys, own)
    return stage, phase, done + count


@gluon.jit
def consume(
    shared, into, call, WG: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SCHEDULE: gl.constexpr, FUSED: gl.constexpr,
    AHEAD: gl.constexpr, NAMED: gl.constexpr, MASKED: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile of this block of threads."""
    stage, phase, turn, done = 0, 0, 0, 0
    if SCHEDULE == DYNAMIC:
        number = tile_of(turn, call.size, shared.slots, SCHEDULE)
        while number >= 0:
            release(shared.slots, turn % SLOTS)
            stage, phase, done = take_tile(
                number, turn, stage, phase, done, shared, into, call, WG, BQ, D, E, STAGES, TILES, FUSED, AHEAD, NAMED,
                MASKED, ENDS,
            )  # fmt: skip
            turn += 1
            number = tile_of(turn, call.size, shared.slots, SCHEDULE)
    else:
        take_tile(
            gl.program_id(0), turn, stage, phase, done, shared, into, call, WG, BQ, D, E, STAGES, TILES, FUSED, AHEAD,
            NAMED, MASKED, ENDS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "scale", *Size._fields, *Sides._fields])
def by_keys(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, wide_k, wide_v, top_desc, delta_desc, sums,
    counter, counts, factor, scale,
    len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride,
    offset, left, right, prefix, extra,
    BQ: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, SCHEDULE: gl.constexpr, FUSED: gl.constexpr,
    AHEAD: gl.constexpr, NAMED: gl.constexpr, MASKED: gl.constexpr, ENDS: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys of a kv head; FUSED: also their part of dQ."""
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, padded, dim, dim_v, table_stride
    )
    band = Sides(offset, left, right, prefix)
    queries = channel(q_desc, STAGES, 2)
    douts = channel(do_desc, STAGES, 2)
    keys = channel(k_desc, 2 * TILES, 1)
    values = channel(v_desc, 2 * TILES, 1)
    tops = gl.allocate_shared_memory(
        gl.float32, ring(STAGES, top_desc.block_shape), top_desc.layout
    )
    deltas = gl.allocate_shared_memory(
        gl.float32, ring(STAGES, delta_desc.block_shape), delta_desc.layout
    )
    BUFFERS: gl.constexpr = 4 if AHEAD >= 2 else 2
    if FUSED:
        DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BQ], k_desc.dtype)
        scores = gl.allocate_shared_memory(k_desc.dtype, [2 * BUFFERS, ROWS, BQ], DS_L)
    else:
        scores = tops
    met = barriers(BUFFERS, 2)
    end = barriers(1, 2)
    words = gl.allocate_shared_memory(
        gl.int32, [SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    if counts is None:
        order = Order(None, met, met, met)
    else:
        order = order_of(counts)
    slots = Channel(words, barriers(SLOTS, 1), barriers(SLOTS, 2 if order.counts is None else 4))
    fence_async_shared()
    shared = Shared(
        queries, douts, keys, values, tops, deltas, slots, scores, met, end.index(0), order
    )
    source = From(q_desc, do_desc, k_desc, v_desc, top_desc, delta_desc)
    into = Into(dk_desc, dv_desc, wide_k, wide_v, sums)
    call = Call(factor, scale, size, band, extra)
    if order.counts is None:
        gl.warp_specialize([
            (consume, (shared, into, call, 0, BQ, D, E, STAGES, TILES, SCHEDULE, FUSED, AHEAD, NAMED, MASKED, ENDS)),
            (consume, (shared, into, call, 1, BQ, D, E, STAGES, TILES, SCHEDULE, FUSED, AHEAD, NAMED, MASKED, ENDS)),
            (produce, (shared, source, counter, call, BQ, STAGES, TILES, SCHEDULE)),
        ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (shared, into, call, 0, BQ, D, E, STAGES, TILES, SCHEDULE, FUSED, AHEAD, NAMED, MASKED, ENDS)),
            (consume, (shared, into, call, 1, BQ, D, E, STAGES, TILES, SCHEDULE, FUSED, AHEAD, NAMED, MASKED, ENDS)),
            (produce, (shared, source, counter, call, BQ, STAGES, TILES, SCHEDULE)),
            (keep_order, (slots, order, size, band, extra, BQ, 2 * ROWS, True)),
            (keep_order, (slots, order, size, band, extra, BQ, 2 * ROWS, False)),
        ], [4, 1, 1, 1], [REGISTERS, REGISTERS_PRODUCER, REGISTERS_PRODUCER, REGISTERS_PRODUCER])  # fmt: skip
