"""The forward on Hopper: FlashAttention-3 (arXiv 2407.08608), Algorithm 2, in Gluon; docs/hopper.md has the drawing.

A block of threads is one producer warp, which loads tiles by TMA, and WGS consumer warpgroups, each with 64 rows of
queries, which multiply by WGMMA. While the tensor cores form Sⱼ = Q·Kⱼᵀ and then O += Pⱼ₋₁·Vⱼ₋₁, a warpgroup takes the
softmax of Sⱼ under the second product. Keys are visited from the last block to the first.

The papers' letters: m running maximum (of unscaled scores), l running sum, acc unnormalised output, p weights, s
scores. Legend: B batch, H query heads, G kv heads, BQ = 64·WGS rows of a tile, BK keys of a block, D/E head
dims of keys and values, padded by TMA's zero fill to a power of two or to two of them (D + D2, E + E2), PACK heads
in a tile's rows. `size` and `band` are `sizes.Size` and `sizes.Sides`, `extra` is `launch.Extra`; what is None
compiles to nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import (
    Channel,
    barriers,
    channel,
    receive,
    release,
    rest_of,
    tiles_of,
)
from relampago.backends.gluon.held import block_at, load_block, store_block
from relampago.backends.gluon.producer import produce
from relampago.backends.gluon.sizes import Sides, Size
from relampago.backends.gluon.sm90_chain import consume_chained
from relampago.backends.gluon.sm90_results import place_of, raise_top, store_tile
from relampago.backends.gluon.sm90_step import (
    give_turn,
    in_hand,
    let_pass,
    next_values,
    opened,
    pass_values,
    release_values,
    scaled,
    scores,
    settle,
    sight,
    step,
    unseen,
    wait_turn,
    weigh_next,
)
from relampago.backends.gluon.softmax import (
    LATER,
    LOG2E,
    capped,
    exp2,
    finish,
    finite,
    hide,
    row_max,
)
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

advance = gluon.jit(schedule.advance)


# ---------------------------------------------------------------------------------------------- consumer


@gluon.jit
def store_part(part, acc, at, inside, size, COLUMN: gl.constexpr):
    """A split's share of O, fp32, to `part`, laid out like LSE with a last dimension of dim_v."""
    O_L: gl.constexpr = acc.type.layout
    places, mask = columns_of(part, at * size.dim_v, inside, size.dim_v, COLUMN, acc.shape[1], O_L)
    gl.store(places, acc, mask=mask)


@gluon.jit
def wide_places(extra, b, heads, rows):
    """Where rows begin in `extra.wide` and in `extra.wide_lse`, which may be part of longer ones."""
    b = gl.cast(b, gl.int64)
    heads = gl.cast(heads, gl.int64)
    rows = gl.cast(rows, gl.int64)
    in_lse = b * extra.lse_b + heads * extra.lse_h + rows
    in_out = in_lse
    if extra.held is None:
        in_out = b * extra.out_b + heads * extra.out_h + rows * extra.out_l
    return in_out, in_lse


@gluon.jit
def columns_of(
    out, places, inside, dim_v, COLUMN: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr, whole=None
):  # fmt: skip
    """Addresses of columns from COLUMN on of rows at `places`, [ROWS, WIDTH], and which are there.

    `whole`: all columns are. A mask that differs along a row would take its pairs of columns apart.
    """
    places = gl.convert_layout(places, gl.SliceLayout(1, L), assert_trivial=True)
    inside = gl.convert_layout(inside, gl.SliceLayout(1, L), assert_trivial=True)
    columns = COLUMN + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    at = out + gl.expand_dims(places, 1) + gl.expand_dims(columns, 0)
    there = gl.expand_dims(inside, 1)
    if whole is None:
        there = there & gl.expand_dims(columns < dim_v, 0)
    return at, there


@gluon.jit
def resume(
    extra, tile, rows, row0, factor, dim_v, acc2, E: gl.constexpr, E2: gl.constexpr,
    O1: gl.constexpr, O2: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """O, and m of unscaled scores, after the keys of other shards: a result is a state whose m is LSE and l is 1."""
    heads = tile.head + gl.arange(0, ROWS, layout=rows.type.layout) % PACK
    inside = rows < tile.q.length
    in_out, in_lse = wide_places(extra, tile.q.b, heads, rows)
    lse = gl.load(extra.wide_lse + in_lse, mask=inside, other=float("-inf"))
    if extra.held is not None:
        at = block_at(extra, tile.q.b, tile.head, row0, E)
        acc1 = load_block(at, row0 < tile.q.length, E, O1)
    else:
        at, mask = columns_of(extra.wide, in_out, inside, dim_v, 0, E, O1, extra.whole)
        acc1 = gl.load(at, mask=mask, other=0.0)
        if E2 > 0:
            at, mask = columns_of(extra.wide, in_out, inside, dim_v, E, E2, O2, extra.whole)
            acc2 = gl.load(at, mask=mask, other=0.0)
    return acc1, acc2, lse * LOG2E / factor


@gluon.jit
def store_wide(
    extra, acc1, acc2, lse, tile, heads, rows, row0, inside, dim_v, E: gl.constexpr, E2: gl.constexpr
):  # fmt: skip
    """O and LSE in fp32."""
    in_out, in_lse = wide_places(extra, tile.q.b, heads, rows)
    gl.store(extra.wide_lse + in_lse, lse, mask=inside)
    if extra.held is not None:
        store_block(block_at(extra, tile.q.b, tile.head, row0, E), row0 < tile.q.length, acc1)
    else:
        O1: gl.constexpr = acc1.type.layout
        at, mask = columns_of(extra.wide, in_out, inside, dim_v, 0, E, O1, extra.whole)
        gl.store(at, acc1, mask=mask)
        if E2 > 0:
            O2: gl.constexpr = acc2.type.layout
            at, mask = columns_of(extra.wide, in_out, inside, dim_v, E, E2, O2, extra.whole)
            gl.store(at, acc2, mask=mask)


@gluon.jit
def consume_apart(
    queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    E: gl.constexpr, E2: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
    SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, LAZY: gl.constexpr, HOLD: gl.constexpr, SHARE: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Tiles one after another, each by itself."""
    PART: gl.constexpr = ROWS // PACK
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    TABLES: gl.constexpr = extra.row_start is not None
    PASSES: gl.constexpr = LOOPED and band.right is not None
    S_L: gl.constexpr = accumulator(BK)
    O1: gl.constexpr = accumulator(E)
    O2: gl.constexpr = accumulator(E2 if E2 > 0 else E)
    P1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O1, k_width=2)
    P2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O2, k_width=2)
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
        acc1 = gl.zeros([ROWS, E], gl.float32, O1)
        q1 = in_hand(receive(queries, WG, turn & 1, ROWS, D), HOLD, S_L)
        acc2, q2 = stage_k, q1  # stand for what is not there
        if D2 > 0:
            q2 = in_hand(rest_of(queries, WG, ROWS, D2), HOLD, S_L)
        if HOLD and not SHARE:
            mbarrier.arrive(queries.empty.index(WG), count=1)
        if E2 > 0:
            acc2 = gl.zeros([ROWS, E2], gl.float32, O2)
        if extra.before is not None:
            acc1, acc2, m0 = resume(
                extra, tile, seen.rows, row0, factor, size.dim_v, acc2, E, E2, O1, O2, PACK
            )

        passed = tile.count * 0
        if PASSES:
            passed = unseen(row0, tile, band, PART, BK)
            k0 -= passed * BK
            stage_k, phase_k, stage_v, phase_v = let_pass(
                passed, keys, values, stage_k, phase_k, stage_v, phase_v, WG, WGS, BK, D, E, STAGES, PINGPONG
            )  # fmt: skip

        # the first block: S and its softmax, with nothing to overlap but the other warpgroups
        k = receive(keys, stage_k, phase_k, BK, D)
        if PASSES:  # noqa: SIM102
            if passed > 0:
                wait_turn(WG, PINGPONG)
        s = scores(q1, q2, keys, stage_k, k, BK, D2, S_L)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        release(keys, stage_k)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES)
        if PASSES:  # noqa: SIM102
            if passed > 0:
                give_turn((WG + 1) % WGS, PINGPONG)
                stage_v, phase_v = pass_values(values, stage_v, phase_v, BK, E)
        s = capped(s, extra.cap)
        if PEELED:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
            if (k0 < start) | (k0 + BK > end):
                s = hide(s, k0, seen, band, TABLES)
        m = row_max(s, R_L)
        if extra.before is not None:
            m = gl.maximum(m, m0)
        p, l = opened(s, m, factor)
        if extra.before is not None:
            alpha = exp2((m0 - finite(m)) * factor)
            share = gl.convert_layout(alpha / l.shape[1], gl.SliceLayout(1, l.type.layout))
            l += gl.expand_dims(share, 1)
            acc1, acc2 = scaled(acc1, acc2, alpha, E2)
        p16 = gl.convert_layout(p.to(DT), P1, assert_trivial=True)
        alpha = gl.full([ROWS], 1.0, gl.float32, R_L)

        # one loop, the mask under a branch that a whole warpgroup takes: two successive loops would make LLVM carry
        # the weights as single 16-bit values
        for _ in range(tile.count - 1 - passed):
            k0 -= BK
            masked = (k0 < start) | (k0 + BK > end)
            acc1, acc2, p16, m, l, alpha, stage_k, phase_k, stage_v, phase_v = step(
                q1, q2, keys, values, acc1, acc2, p16, m, l, alpha, stage_k, phase_k, stage_v, phase_v, k0,
                masked, seen, band, extra.cap, factor, WG, WGS, BK, D, D2, E, E2, STAGES, S_L, P1, P2,
                LOOPED, TABLES, PINGPONG, PIN, LAZY,
            )  # fmt: skip
        if LAZY == LATER:
            acc1, acc2 = scaled(acc1, acc2, alpha, E2)
        acc1, acc2 = weigh_next(p16, values, stage_v, phase_v, acc1, acc2, BK, E, E2, S_L, P1, P2)
        if not SHARE and not HOLD:
            mbarrier.arrive(queries.empty.index(WG), count=1)
        total = gl.convert_layout(gl.sum(l, axis=1), R_L)
        heads = tile.head + gl.arange(0, ROWS, layout=R_L) % PACK
        if extra.top is not None:
            raise_top(extra.top, m, tile, heads, seen.rows, size, factor, PACK)
        inverse, rows_lse = finish(m, total, factor, extra.sinks, heads)
        acc1, acc2 = settle(acc1, acc2, E2)
        release_values(values, stage_v, phase_v, BK)
        stage_v, phase_v = next_values(values, stage_v, phase_v, BK)

        acc1, acc2 = scaled(acc1, acc2, inverse, E2)
        inside = seen.rows < tile.q.length
        if extra.wide is not None:
            store_wide(
                extra, acc1, acc2, rows_lse, tile, heads, seen.rows, row0, inside, size.dim_v, E, E2
            )  # fmt: skip
        else:
            at = place_of(size, tile, heads, seen.rows, SPLIT, PACKED)
            if SPLIT:
                store_part(part, acc1, at, inside, size, 0)
                if E2 > 0:
                    store_part(part, acc2, at, inside, size, E)
            else:
                store_tile(
                    results, o_desc, o_rest, WG, tile, row0, acc1, acc2, E, E2, SHARE, PACKED
                )  # fmt: skip
            gl.store(lse + at, rows_lse, mask=inside)
        turn += 1
        number = tile_of(turn, size, slots, SCHEDULE)
        if SHARE:
            tma.store_wait(pendings=0)
            mbarrier.arrive(queries.empty.index(WG), count=1)
    if WG == 0:
        wait_turn(0, PINGPONG)  # the last turn given, so that no barrier is left half full
    tma.store_wait(pendings=0)


@gluon.jit
def consume(
    queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    E: gl.constexpr, E2: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
    SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, LAZY: gl.constexpr, HOLD: gl.constexpr, SHARE: gl.constexpr,
    SPLIT: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile of this block of threads."""
    if CHAIN > 0:
        consume_chained(
            queries, keys, values, slots, results, o_desc, o_rest, lse, size, band, extra, factor, WG, WGS, BK, D, D2,
            E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD, SHARE, CHAIN,
        )  # fmt: skip
    else:
        consume_apart(
            queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor, WG, WGS, BK,
            D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD, SHARE, SPLIT,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["factor", *Size._fields, *Sides._fields])
def attend(
    q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, o_desc, o_rest, part, lse, counter, factor,
    len_q, len_k, heads, group, tiles, places, section, count, shift, splits, rows, dim_v, table_stride,
    offset, left, right, prefix, extra,
    WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, E: gl.constexpr,
    E2: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr,
    PEELED: gl.constexpr, LOOPED: gl.constexpr, PINGPONG: gl.constexpr,
    PIN: gl.constexpr, LAZY: gl.constexpr, HOLD: gl.constexpr, SHARE: gl.constexpr, SPLIT: gl.constexpr,
    ROTATE: gl.constexpr, CHAIN: gl.constexpr, REGISTERS: gl.constexpr, REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """Out and LSE; or, if SPLIT, each split's part of them.

    PEELED, LOOPED: whether the first block, and the others, may need a mask. HOLD: Q stays in registers. SHARE: O's
    tile lies where Q's was. ROTATE: see `schedule.turned`. CHAIN: the tiles of queries in `sm90_chain`, or 0. The
    default partition takes the registers that the others leave.
    Numbers come one by one: in a tuple, each that is 1 or a multiple of 16 would be compiled for apart.
    """
    size = Size(
        len_q, len_k, heads, group, tiles, places, section, count, shift, splits, rows, dim_v, table_stride
    )  # fmt: skip
    band = Sides(offset, left, right, prefix)
    queue: gl.constexpr = CHAIN if CHAIN > 0 else 1
    queries = channel(q_desc, queue * WGS, 1, q_rest)
    keys = channel(k_desc, STAGES, WGS, k_rest)
    # by halves of a block there is a tile more, so that half of the next block's values come early
    SLOTS_V: gl.constexpr = STAGES + 1 if v_desc.block_shape[-3] < BK else STAGES
    values = channel(v_desc, SLOTS_V, WGS, v_rest)
    results = queries
    WIDE: gl.constexpr = extra.wide is not None
    if not SHARE and not SPLIT and not WIDE:
        room = tiles_of(o_desc, WGS)
        more = room
        if E2 > 0:
            more = tiles_of(o_rest, WGS)
        results = Channel(room, queries.full, queries.empty, more)
    words = gl.allocate_shared_memory(
        gl.int32, [SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    slots = Channel(words, barriers(SLOTS, 1), barriers(SLOTS, WGS))
    fence_async_shared()
    if WGS == 3:
        gl.warp_specialize([
            (consume, (queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor, 0,
                       WGS, BK, D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD,
                       SHARE, SPLIT, CHAIN)),
            (consume, (queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor, 1,
                       WGS, BK, D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD,
                       SHARE, SPLIT, CHAIN)),
            (consume, (queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor, 2,
                       WGS, BK, D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD,
                       SHARE, SPLIT, CHAIN)),
            (produce, (queries, keys, values, slots, q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, counter, size,
                       band, extra, WGS, BK, PACK, STAGES, SCHEDULE, SPLIT, ROTATE, queue)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor, 0,
                       WGS, BK, D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD,
                       SHARE, SPLIT, CHAIN)),
            (consume, (queries, keys, values, slots, results, o_desc, o_rest, part, lse, size, band, extra, factor, 1,
                       WGS, BK, D, D2, E, E2, PACK, STAGES, SCHEDULE, PEELED, LOOPED, PINGPONG, PIN, LAZY, HOLD,
                       SHARE, SPLIT, CHAIN)),
            (produce, (queries, keys, values, slots, q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, counter, size,
                       band, extra, WGS, BK, PACK, STAGES, SCHEDULE, SPLIT, ROTATE, queue)),
        ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
