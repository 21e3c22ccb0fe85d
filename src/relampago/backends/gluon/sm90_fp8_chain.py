"""`sm90_chain` for e4m3 operands: the next tile's first scores beside the last product of this one.

A block of keys takes half the time that it takes in bf16, and what lies between two tiles weighs twice as much.
Legend: see `sm90_forward`; scales and parts of the head dim: see `sm90_fp8`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from relampago.backends.gluon.channel import receive, release
from relampago.backends.gluon.sm90_chain import queries_of, sums_of, tile_at
from relampago.backends.gluon.sm90_fp8_step import (
    TIMES,
    capped_scores,
    grown,
    of_block,
    of_rows,
    operand,
    others,
    spread,
    step,
    store_tile,
    weigh,
    weights,
    words,
)
from relampago.backends.gluon.sm90_step import advance, give_turn, scores, sight, wait_turn
from relampago.backends.gluon.softmax import hide, part_sum, pin
from relampago.backends.gluon.tiles import ROWS, accumulator, first_row, tile_of

QUEUE = gl.constexpr(2)  # tiles of queries that there is room for


@gluon.jit
def scales_at(tile, seen, k0, size, factor, scales, PACK: gl.constexpr):
    """(of rows, place of the head's in those of keys, of the first block's keys and values)."""
    heads = tile.head + gl.arange(0, ROWS, layout=seen.rows.type.layout) % PACK
    by_row = of_rows(scales, tile, heads, seen.rows, size, factor)
    kv_at = tile.k.b * (size.heads // size.group) + tile.head // size.group
    sk = of_block(scales.k, scales.blocks_k, k0, kv_at)
    sv = of_block(scales.v, scales.blocks_v, k0, kv_at)
    return by_row, kv_at, sk, sv


@gluon.jit
def first_weights(
    s, k0, seen, start, end, band, extra, factor, PEELED: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """(p, m, l) of a tile's first block."""
    TABLES: gl.constexpr = extra.row_start is not None
    s = capped_scores(s, factor, extra.cap)
    if PEELED:
        if extra.cap is not None:  # noqa: SIM114 - softcap's long chain and a branch would spill the scores
            s = hide(s, k0, seen, band, TABLES)
        elif (k0 < start) | (k0 + s.shape[1] > end):
            s = hide(s, k0, seen, band, TABLES)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_L))
    p, m = weights(s, m, factor, extra.cap, S_L)
    return p, m, part_sum(p)


@gluon.jit
def chain(
    number, queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, scales,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    PACK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PEELED: gl.constexpr,
    LOOPED: gl.constexpr, PINGPONG: gl.constexpr, PIN: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """All tiles of this block of threads, of which there is at least one."""
    PART: gl.constexpr = ROWS // PACK
    PACKED: gl.constexpr = extra.cu_q is not None
    TABLES: gl.constexpr = extra.row_start is not None
    MOST: gl.constexpr = PARTS if PARTS > 0 else 1
    W: gl.constexpr = E // MOST
    S_L: gl.constexpr = accumulator(BK, 32)
    O_L: gl.constexpr = accumulator(W, 32)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=4)
    R_L: gl.constexpr = gl.SliceLayout(1, S_L)
    stage_k, phase_k, stage_v, phase_v = 0, 0, 0, 0
    turn = 0

    # the first tile's first scores: these alone have nothing beside them but the other warpgroups
    tile = tile_at(number, turn, slots, size, band, extra, WGS, BK, PACK, SCHEDULE)
    row0 = first_row(tile.row_tile, size, WGS * PART) + WG * PART
    seen, start, end = sight(row0, tile, size, band, extra, PACK, R_L)
    k0 = (tile.first + tile.count - 1) * BK
    by_row, kv_at, sk, sv = scales_at(tile, seen, k0, size, factor, scales, PACK)
    k = receive(keys, stage_k, phase_k, BK, D)
    q, _rest = queries_of(queries, turn, WG, WGS, D, 0, QUEUE)
    s = scores(q, q, keys, stage_k, k, BK, 0, S_L)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(keys, stage_k)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    p, m, l = first_weights(s, k0, seen, start, end, band, extra, by_row * sk, PEELED, S_L)
    p_words = words(p)

    while number >= 0:
        acc1 = gl.zeros([ROWS, W], gl.float32, O_L)
        acc2, acc3, acc4 = stage_k, stage_k, stage_k  # stand for what is not there
        if PARTS >= 2:
            acc2 = gl.zeros([ROWS, W], gl.float32, O_L)
        if PARTS == 4:
            acc3 = gl.zeros([ROWS, W], gl.float32, O_L)
            acc4 = gl.zeros([ROWS, W], gl.float32, O_L)
        beta = gl.full([ROWS], 1.0, gl.float32, R_L)
        place = turn % QUEUE * WGS + WG
        q = queries.tiles.index(place).reshape([ROWS, D])
        for _ in range(tile.count - 1):
            k0 -= BK
            masked = (k0 < start) | (k0 + BK > end)
            (acc1, acc2, acc3, acc4, p_words, m, l, beta, sv, stage_k, phase_k, stage_v, phase_v) = step(
                q, keys, values, acc1, acc2, acc3, acc4, p_words, m, l, beta, sv, stage_k, phase_k, stage_v,
                phase_v, k0, masked, seen, band, extra.cap, by_row, scales, kv_at, WG, WGS, BK, D, E, STAGES,
                S_L, O_L, P_L, W, LOOPED, TABLES, PINGPONG, PIN, PARTS,
            )  # fmt: skip
        mbarrier.arrive(queries.empty.index(place), count=1)

        turn += 1
        number = tile_of(turn, size, slots, SCHEDULE)
        last, last_row0, last_sv = tile, row0, sv
        p8 = operand(p_words, P_L)
        if number >= 0:
            k = receive(keys, stage_k, phase_k, BK, D)
            q, _rest = queries_of(queries, turn, WG, WGS, D, 0, QUEUE)
            wait_turn(WG, PINGPONG)
            s = scores(q, q, keys, stage_k, k, BK, 0, S_L)
            v = receive(values, stage_v, phase_v, E, BK)
            t = weigh(p8, v, acc1, beta, 0, PARTS, W, O_L)
            give_turn((WG + 1) % WGS, PINGPONG)
            inverse = sums_of(l, m, tile, seen, size, extra, lse, 1.0, 1.0 / TIMES, PACK, R_L)
            tile = tile_at(number, turn, slots, size, band, extra, WGS, BK, PACK, SCHEDULE)
            row0 = first_row(tile.row_tile, size, WGS * PART) + WG * PART
            seen, start, end = sight(row0, tile, size, band, extra, PACK, R_L)
            k0 = (tile.first + tile.count - 1) * BK
            by_row, kv_at, sk, sv = scales_at(tile, seen, k0, size, factor, scales, PACK)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            release(keys, stage_k)
            stage_k, phase_k = advance(stage_k, phase_k, STAGES)
            p, m, l = first_weights(s, k0, seen, start, end, band, extra, by_row * sk, PEELED, S_L)
            if PIN:
                l = pin(l)
            t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
            acc1 = grown(acc1, t, beta, PARTS)
            acc2, acc3, acc4 = others(p8, v, acc2, acc3, acc4, beta, PARTS, W, O_L)
            p_words = words(p)
        else:
            v = receive(values, stage_v, phase_v, E, BK)
            t = weigh(p8, v, acc1, beta, 0, PARTS, W, O_L)
            inverse = sums_of(l, m, tile, seen, size, extra, lse, 1.0, 1.0 / TIMES, PACK, R_L)
            t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
            acc1 = grown(acc1, t, beta, PARTS)
            acc2, acc3, acc4 = others(p8, v, acc2, acc3, acc4, beta, PARTS, W, O_L)
        release(values, stage_v)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES)
        by = spread(inverse * (last_sv * (1.0 / TIMES)), O_L)
        tma.store_wait(pendings=0)
        store_tile(results, o_desc, WG, 0, last, last_row0, acc1 * by, W, MOST, PACKED)
        if PARTS >= 2:
            store_tile(results, o_desc, WG, 1, last, last_row0, acc2 * by, W, MOST, PACKED)
        if PARTS == 4:
            store_tile(results, o_desc, WG, 2, last, last_row0, acc3 * by, W, MOST, PACKED)
            store_tile(results, o_desc, WG, 3, last, last_row0, acc4 * by, W, MOST, PACKED)


@gluon.jit
def consume_chained(
    queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, scales,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    PACK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PEELED: gl.constexpr,
    LOOPED: gl.constexpr, PINGPONG: gl.constexpr, PIN: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile of this block of threads."""
    if WG == WGS - 1:
        give_turn(0, PINGPONG)
    number = tile_of(0, size, slots, SCHEDULE)
    if number >= 0:  # short sequences may leave a block of threads without any
        chain(
            number, queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, scales, WG, WGS, BK,
            D, E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, PARTS,
        )  # fmt: skip
    if WG == 0:
        wait_turn(0, PINGPONG)  # the last turn given, so that no barrier is left half full
    tma.store_wait(pendings=0)
