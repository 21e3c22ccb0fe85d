"""Consumers whose tiles follow one another without a gap.

A tile by itself (`sm90_forward.consume`) begins with scores that no product stands beside, and ends with a product that
no scores stand beside; between the two its result is stored. Here the first scores of the next tile are under way
together with the last product of this one, as any other two blocks', and the tensor cores have work meanwhile.

QUEUE: for how many tiles of queries there is room. With one (LATE), the next queries are loaded where this tile's
were, as soon as its last scores are there; its last product does not wait for them, and O is stored, by halves, under
the next scores. Legend: see `sm90_forward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from relampago.backends.gluon.channel import receive, release, rest_of
from relampago.backends.gluon.sm90_results import (
    place_of,
    raise_top,
    store_halves,
    store_tile,
)
from relampago.backends.gluon.sm90_step import (
    advance,
    give_turn,
    in_hand,
    opened,
    scaled,
    scores,
    settle,
    sight,
    step,
    wait_turn,
    weigh,
)
from relampago.backends.gluon.softmax import LATER, capped, finish, hide, pin, row_max
from relampago.backends.gluon.tiles import (
    DYNAMIC,
    ROWS,
    accumulator,
    first_row,
    locate,
    receive_tile,
    tile_of,
)


@gluon.jit
def tile_at(
    number, turn, slots, size, band, extra, WGS: gl.constexpr, BK: gl.constexpr, PACK: gl.constexpr,
    SCHEDULE: gl.constexpr,
):  # fmt: skip
    """A turn's tile."""
    if SCHEDULE == DYNAMIC:
        PACKED: gl.constexpr = extra.cu_q is not None
        TABLES: gl.constexpr = extra.row_start is not None
        tile = receive_tile(
            number, slots, turn, size, band, WGS * (ROWS // PACK), BK, PACKED, TABLES
        )
    else:
        tile = locate(number, size, band, extra, WGS, BK, PACK, False)
    return tile


@gluon.jit
def queries_of(
    queries, turn, WG: gl.constexpr, WGS: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, QUEUE: gl.constexpr
):  # fmt: skip
    """A warpgroup's rows of a turn's queries, which lie in QUEUE places by turns."""
    place = turn % QUEUE * WGS + WG
    q1 = receive(queries, place, turn // QUEUE & 1, ROWS, D)
    q2 = q1  # stands for what is not there
    if D2 > 0:
        q2 = rest_of(queries, place, ROWS, D2)
    return q1, q2


@gluon.jit
def first_weights(
    s, k0, seen, start, end, band, extra, factor, PEELED: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """(p, m, l) of a tile's first block."""
    TABLES: gl.constexpr = extra.row_start is not None
    s = capped(s, extra.cap)
    if PEELED:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if (k0 < start) | (k0 + s.shape[1] > end):
            s = hide(s, k0, seen, band, TABLES)
    m = row_max(s, gl.SliceLayout(1, S_L))
    p, l = opened(s, m, factor)
    return p, m, l


@gluon.jit
def sums_of(
    l, m, tile, seen, size, extra, lse, factor, unit: gl.constexpr, PACK: gl.constexpr, R_L: gl.constexpr
):  # fmt: skip
    """What to multiply O by. LSE is stored. unit: what a weight of 1 is worth in l."""
    PACKED: gl.constexpr = extra.cu_q is not None
    total = gl.convert_layout(gl.sum(l, axis=1), R_L) * unit
    heads = tile.head + gl.arange(0, ROWS, layout=R_L) % PACK
    if extra.top is not None:
        raise_top(extra.top, m, tile, heads, seen.rows, size, factor, PACK)
    inverse, rows_lse = finish(m, total, factor, extra.sinks, heads)
    at = place_of(size, tile, heads, seen.rows, False, PACKED)
    gl.store(lse + at, rows_lse, mask=seen.rows < tile.q.length)
    return inverse


@gluon.jit
def chain(
    number, queries, keys, values, slots, results, o_desc, o_rest, lse, size, band, extra, factor,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    E: gl.constexpr, E2: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
    SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, LAZY: gl.constexpr, HOLD: gl.constexpr, SHARE: gl.constexpr,
    QUEUE: gl.constexpr,
):  # fmt: skip
    """All tiles of this block of threads, of which there is at least one."""
    LATE: gl.constexpr = QUEUE == 1
    PART: gl.constexpr = ROWS // PACK
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    TABLES: gl.constexpr = extra.row_start is not None
    S_L: gl.constexpr = accumulator(BK)
    O1: gl.constexpr = accumulator(E)
    O2: gl.constexpr = accumulator(E2 if E2 > 0 else E)
    P1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O1, k_width=2)
    P2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O2, k_width=2)
    R_L: gl.constexpr = gl.SliceLayout(1, S_L)
    stage_k, phase_k, stage_v, phase_v = 0, 0, 0, 0
    turn = 0

    # the first tile's first scores: these alone have nothing beside them but the other warpgroups
    tile = tile_at(number, turn, slots, size, band, extra, WGS, BK, PACK, SCHEDULE)
    row0 = first_row(tile.row_tile, size, WGS * PART) + WG * PART
    seen, start, end = sight(row0, tile, size, band, extra, PACK, R_L)
    k0 = (tile.first + tile.count - 1) * BK
    k = receive(keys, stage_k, phase_k, BK, D)
    q1, q2 = queries_of(queries, turn, WG, WGS, D, D2, QUEUE)
    s = scores(q1, q2, keys, stage_k, k, BK, D2, S_L)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(keys, stage_k)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    p, m, l = first_weights(s, k0, seen, start, end, band, extra, factor, PEELED, S_L)
    p16 = gl.convert_layout(p.to(DT), P1, assert_trivial=True)

    while number >= 0:
        acc1 = gl.zeros([ROWS, E], gl.float32, O1)
        acc2 = stage_k
        if E2 > 0:
            acc2 = gl.zeros([ROWS, E2], gl.float32, O2)
        place = turn % QUEUE * WGS + WG
        own1 = in_hand(queries.tiles.index(place).reshape([ROWS, D]), HOLD, S_L)
        own2 = own1
        if D2 > 0:
            own2 = in_hand(rest_of(queries, place, ROWS, D2), HOLD, S_L)
        if HOLD and not SHARE:
            mbarrier.arrive(queries.empty.index(place), count=1)
        alpha = gl.full([ROWS], 1.0, gl.float32, R_L)
        free = None
        if LATE and not HOLD:
            free = queries.empty.index(place)
            mbarrier.arrive(free, count=1, pred=tile.count == 1)
        for left in range(tile.count - 1, 0, -1):
            k0 -= BK
            masked = (k0 < start) | (k0 + BK > end)
            acc1, acc2, p16, m, l, alpha, stage_k, phase_k, stage_v, phase_v = step(
                own1, own2, keys, values, acc1, acc2, p16, m, l, alpha, stage_k, phase_k, stage_v, phase_v, k0,
                masked, seen, band, extra.cap, factor, WG, WGS, BK, D, D2, E, E2, STAGES, S_L, P1, P2,
                LOOPED, TABLES, PINGPONG, PIN, LAZY, free, left == 1,
            )  # fmt: skip
        if not SHARE and not LATE and not HOLD:
            mbarrier.arrive(queries.empty.index(place), count=1)

        if LAZY == LATER:
            acc1, acc2 = scaled(acc1, acc2, alpha, E2)
        turn += 1
        number = tile_of(turn, size, slots, SCHEDULE)
        last, last_row0 = tile, row0
        if number >= 0:
            k = receive(keys, stage_k, phase_k, BK, D)
            if LATE:
                v = receive(values, stage_v, phase_v, BK, E)
                acc1, acc2 = weigh(p16, values, stage_v, v, acc1, acc2, BK, E2, P2)
                q1, q2 = queries_of(queries, turn, WG, WGS, D, D2, QUEUE)
                wait_turn(WG, PINGPONG)
                s = scores(q1, q2, keys, stage_k, k, BK, D2, S_L)
            else:
                q1, q2 = queries_of(queries, turn, WG, WGS, D, D2, QUEUE)
                wait_turn(WG, PINGPONG)
                s = scores(q1, q2, keys, stage_k, k, BK, D2, S_L)
                v = receive(values, stage_v, phase_v, BK, E)
                acc1, acc2 = weigh(p16, values, stage_v, v, acc1, acc2, BK, E2, P2)
            give_turn((WG + 1) % WGS, PINGPONG)
            inverse = sums_of(l, m, tile, seen, size, extra, lse, factor, 1.0, PACK, R_L)
            tile = tile_at(number, turn, slots, size, band, extra, WGS, BK, PACK, SCHEDULE)
            row0 = first_row(tile.row_tile, size, WGS * PART) + WG * PART
            seen, start, end = sight(row0, tile, size, band, extra, PACK, R_L)
            k0 = (tile.first + tile.count - 1) * BK
            if LATE:
                acc1 = warpgroup_mma_wait(num_outstanding=2 if D2 > 0 else 1, deps=(acc1,))
                acc1, acc2 = scaled(acc1, acc2, inverse, E2)
                store_halves(results, o_desc, WG, last, last_row0, acc1, E, PACKED)
                s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            else:
                s = warpgroup_mma_wait(num_outstanding=2 if E2 > 0 else 1, deps=(s,))
            release(keys, stage_k)
            stage_k, phase_k = advance(stage_k, phase_k, STAGES)
            p, m, l = first_weights(s, k0, seen, start, end, band, extra, factor, PEELED, S_L)
            if not LATE:
                if PIN:
                    l = pin(l)
                acc1, acc2 = settle(acc1, acc2, E2)
            p16 = gl.convert_layout(p.to(DT), P1, assert_trivial=True)
        else:
            v = receive(values, stage_v, phase_v, BK, E)
            acc1, acc2 = weigh(p16, values, stage_v, v, acc1, acc2, BK, E2, P2)
            inverse = sums_of(l, m, tile, seen, size, extra, lse, factor, 1.0, PACK, R_L)
            acc1, acc2 = settle(acc1, acc2, E2)
            if LATE:
                acc1, acc2 = scaled(acc1, acc2, inverse, E2)
                store_halves(results, o_desc, WG, last, last_row0, acc1, E, PACKED)
        release(values, stage_v)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES)
        if not LATE:
            acc1, acc2 = scaled(acc1, acc2, inverse, E2)
            store_tile(
                results, o_desc, o_rest, place if SHARE else WG, last, last_row0, acc1, acc2, E, E2, SHARE, PACKED,
            )  # fmt: skip
        if SHARE:
            tma.store_wait(pendings=0)
            mbarrier.arrive(queries.empty.index(place), count=1)


@gluon.jit
def consume_chained(
    queries, keys, values, slots, results, o_desc, o_rest, lse, size, band, extra, factor,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    E: gl.constexpr, E2: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
    SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, LAZY: gl.constexpr, HOLD: gl.constexpr, SHARE: gl.constexpr,
    QUEUE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile of this block of threads."""
    if WG == WGS - 1:
        give_turn(0, PINGPONG)
    number = tile_of(0, size, slots, SCHEDULE)
    if number >= 0:  # short sequences may leave a block of threads without any
        chain(
            number, queries, keys, values, slots, results, o_desc, o_rest, lse, size, band, extra, factor, WG, WGS,
            BK, D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD, SHARE, QUEUE,
        )  # fmt: skip
    if WG == 0:
        wait_turn(0, PINGPONG)  # the last turn given, so that no barrier is left half full
    tma.store_wait(pendings=0)
