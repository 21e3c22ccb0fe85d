"""The forward on Hopper in FP8: FlashAttention-3 (arXiv 2407.08608, section 3.3), as `sm90_forward` with e4m3 operands.

Read `sm90_forward` first; what differs:
- Scales. A row of queries has one (with the factor of the softmax in it), a block of keys one for K and one for V.
  Scores are scaled as they become weights; acc is in units of the last block's scale of values, so that a change of
  scale is part of the rescaling that each block brings anyhow.
- Weights are held times 2^PLACES, so that e4m3 keeps what is down to 2^-17 of a row's largest.
- V lies transposed, a key a column, in an order in which an accumulator's registers are the next product's operand as
  they are (`quant.columns`).
- The tensor cores add e4m3 products with some 14 bits. PARTS > 0: each block's P·V starts at 0 and is added to acc in
  fp32, in PARTS parts of the head dim, one after another where registers are few; it costs no instruction, since the
  rescaling's multiplication becomes a multiply-add. PARTS = 0 leaves acc to the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon.channel import (
    Channel,
    barriers,
    channel,
    receive,
    release,
    tiles_of,
)
from relampago.backends.gluon.producer import produce
from relampago.backends.gluon.sizes import Sides, Size
from relampago.backends.gluon.sm90_forward import store_part
from relampago.backends.gluon.sm90_fp8_chain import consume_chained, first_weights, scales_at
from relampago.backends.gluon.sm90_fp8_step import (
    TIMES,
    Scales,
    grown,
    operand,
    others,
    spread,
    step,
    store_tile,
    weigh,
    words,
)
from relampago.backends.gluon.sm90_results import place_of
from relampago.backends.gluon.sm90_step import advance, give_turn, scores, sight, wait_turn
from relampago.backends.gluon.softmax import finish
from relampago.backends.gluon.tiles import (
    DYNAMIC,
    ROWS,
    SLOTS,
    WORDS,
    accumulator,
    first_row,
    locate,
    receive_tile,
    tile_of,
)


@gluon.jit
def store_columns(
    results, o_desc, WG: gl.constexpr, C: gl.constexpr, tile, row0, acc, at, inside, part, size, W: gl.constexpr,
    MOST: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Part C of O to where it belongs; of a split, to its share of `part`."""
    if SPLIT:
        store_part(part, acc, at, inside, size, C * W)
    else:
        store_tile(results, o_desc, WG, C, tile, row0, acc, W, MOST, PACKED)


@gluon.jit
def consume_apart(
    queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    PACK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PEELED: gl.constexpr,
    LOOPED: gl.constexpr, PINGPONG: gl.constexpr, PIN: gl.constexpr,
    SPLIT: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Tiles one after another, each by itself."""
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
    if WG == WGS - 1:
        give_turn(0, PINGPONG)
    number = tile_of(turn, size, slots, SCHEDULE)
    while number >= 0:
        if SCHEDULE == DYNAMIC:
            tile = receive_tile(
                number, slots, turn, size, band, WGS * PART, BK, PACKED, SPLIT or TABLES
            )
        else:
            tile = locate(number, size, band, extra, WGS, BK, PACK, SPLIT)
        row0 = first_row(tile.row_tile, size, WGS * PART) + WG * PART
        seen, start, end = sight(row0, tile, size, band, extra, PACK, R_L)
        k0 = (tile.first + tile.count - 1) * BK
        heads = tile.head + gl.arange(0, ROWS, layout=R_L) % PACK
        by_row, kv_at, sk, sv = scales_at(tile, seen, k0, size, factor, scales, PACK)
        acc1 = gl.zeros([ROWS, W], gl.float32, O_L)
        acc2, acc3, acc4 = stage_k, stage_k, stage_k  # stand for what is not there
        if PARTS >= 2:
            acc2 = gl.zeros([ROWS, W], gl.float32, O_L)
        if PARTS == 4:
            acc3 = gl.zeros([ROWS, W], gl.float32, O_L)
            acc4 = gl.zeros([ROWS, W], gl.float32, O_L)
        q = receive(queries, WG, turn & 1, ROWS, D)

        # the first block: S and its softmax, with nothing to overlap but the other warpgroups
        k = receive(keys, stage_k, phase_k, BK, D)
        s = scores(q, q, keys, stage_k, k, BK, 0, S_L)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        release(keys, stage_k)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES)
        p, m, l = first_weights(s, k0, seen, start, end, band, extra, by_row * sk, PEELED, S_L)
        beta = gl.full([ROWS], 1.0, gl.float32, R_L)  # acc is 0
        p_words = words(p)

        for _ in range(tile.count - 1):
            k0 -= BK
            masked = (k0 < start) | (k0 + BK > end)
            (acc1, acc2, acc3, acc4, p_words, m, l, beta, sv, stage_k, phase_k, stage_v, phase_v) = step(
                q, keys, values, acc1, acc2, acc3, acc4, p_words, m, l, beta, sv, stage_k, phase_k, stage_v,
                phase_v, k0, masked, seen, band, extra.cap, by_row, scales, kv_at, WG, WGS, BK, D, E, STAGES,
                S_L, O_L, P_L, W, LOOPED, TABLES, PINGPONG, PIN, PARTS,
            )  # fmt: skip
        v = receive(values, stage_v, phase_v, E, BK)
        p8 = operand(p_words, P_L)
        t = weigh(p8, v, acc1, beta, 0, PARTS, W, O_L)
        mbarrier.arrive(queries.empty.index(WG), count=1)
        total = gl.convert_layout(gl.sum(l, axis=1), R_L) * (1.0 / TIMES)
        inverse, rows_lse = finish(m, total, 1.0, extra.sinks, heads)
        t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
        acc1 = grown(acc1, t, beta, PARTS)
        acc2, acc3, acc4 = others(p8, v, acc2, acc3, acc4, beta, PARTS, W, O_L)
        release(values, stage_v)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES)

        by = spread(inverse * (sv * (1.0 / TIMES)), O_L)
        inside = seen.rows < tile.q.length
        at = place_of(size, tile, heads, seen.rows, SPLIT, PACKED)
        if not SPLIT:
            tma.store_wait(pendings=0)
        store_columns(
            results, o_desc, WG, 0, tile, row0, acc1 * by, at, inside, part, size, W, MOST, SPLIT, PACKED
        )  # fmt: skip
        if PARTS >= 2:
            store_columns(
                results, o_desc, WG, 1, tile, row0, acc2 * by, at, inside, part, size, W, MOST, SPLIT, PACKED
            )  # fmt: skip
        if PARTS == 4:
            store_columns(
                results, o_desc, WG, 2, tile, row0, acc3 * by, at, inside, part, size, W, MOST, SPLIT, PACKED
            )  # fmt: skip
            store_columns(
                results, o_desc, WG, 3, tile, row0, acc4 * by, at, inside, part, size, W, MOST, SPLIT, PACKED
            )  # fmt: skip
        gl.store(lse + at, rows_lse, mask=inside)
        turn += 1
        number = tile_of(turn, size, slots, SCHEDULE)
    if WG == 0:
        wait_turn(0, PINGPONG)  # the last turn given, so that no barrier is left half full
    tma.store_wait(pendings=0)


@gluon.jit
def consume(
    queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    PACK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PEELED: gl.constexpr,
    LOOPED: gl.constexpr, PINGPONG: gl.constexpr, PIN: gl.constexpr,
    SPLIT: gl.constexpr, PARTS: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile of this block of threads."""
    if CHAIN:
        consume_chained(
            queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, scales, WG, WGS, BK, D, E,
            PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, PARTS,
        )  # fmt: skip
    else:
        consume_apart(
            queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales, WG, WGS, BK, D,
            E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, SPLIT, PARTS,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["factor", *Size._fields, *Sides._fields, "blocks_q", "blocks_k", "blocks_v"]
)
def attend_fp8(
    q_desc, k_desc, v_desc, o_desc, part, lse, counter, factor, q_scale, k_scale, v_scale, blocks_q, blocks_k,
    blocks_v, len_q, len_k, heads, group, tiles, places, section, count, shift, splits, rows, dim_v, table_stride,
    offset, left, right, prefix, extra,
    WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, PACK: gl.constexpr,
    STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, SPLIT: gl.constexpr,
    PARTS: gl.constexpr, CHAIN: gl.constexpr, REGISTERS: gl.constexpr,
    REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """Out and LSE; or, if SPLIT, each split's part of them. See `sm90_forward.attend`."""
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, count, shift, splits, rows, dim_v, table_stride
    )  # fmt: skip
    band = Sides(offset, left, right, prefix)
    scales = Scales(q_scale, k_scale, v_scale, blocks_q, blocks_k, blocks_v)
    queue: gl.constexpr = 2 if CHAIN else 1  # tiles of queries
    queries = channel(q_desc, queue * WGS, 1)
    keys = channel(k_desc, STAGES, WGS)
    values = channel(v_desc, STAGES, WGS)
    results = queries
    if not SPLIT:
        results = Channel(
            tiles_of(o_desc, WGS * (PARTS if PARTS > 0 else 1)), queries.full, queries.empty
        )
    words = gl.allocate_shared_memory(
        gl.int32, [SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    slots = Channel(words, barriers(SLOTS, 1), barriers(SLOTS, WGS))
    fence_async_shared()
    if WGS == 3:
        gl.warp_specialize([
            (consume, (queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales, 0,
                       WGS, BK, D, E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, SPLIT, PARTS,
                       CHAIN)),
            (consume, (queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales, 1,
                       WGS, BK, D, E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, SPLIT, PARTS,
                       CHAIN)),
            (consume, (queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales, 2,
                       WGS, BK, D, E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, SPLIT, PARTS,
                       CHAIN)),
            (produce, (queries, keys, values, slots, q_desc, None, k_desc, None, v_desc, None, counter, size, band,
                       extra, WGS, BK, PACK, STAGES, SCHEDULE, SPLIT, False, queue)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales, 0,
                       WGS, BK, D, E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, SPLIT, PARTS,
                       CHAIN)),
            (consume, (queries, keys, values, slots, results, o_desc, part, lse, size, band, extra, factor, scales, 1,
                       WGS, BK, D, E, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, SPLIT, PARTS,
                       CHAIN)),
            (produce, (queries, keys, values, slots, q_desc, None, k_desc, None, v_desc, None, counter, size, band,
                       extra, WGS, BK, PACK, STAGES, SCHEDULE, SPLIT, False, queue)),
        ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
