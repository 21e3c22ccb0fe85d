"""The producer: one warp that loads what the consumers will need, as far ahead as the rings allow."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import send
from relampago.backends.gluon.tiles import (
    DYNAMIC,
    ROWS,
    draw,
    first_row,
    locate,
    send_end,
    send_tile,
    tile_of,
)
from relampago.backends.gluon.versions import tma_load
from relampago.quant.cast import BLOCK
from relampago.quant.columns import first_column

advance = gluon.jit(schedule.advance)
turned = gluon.jit(schedule.turned)
first_column_of = gluon.jit(first_column)
BLOCK_OF_SCALE = gl.constexpr(BLOCK)
TURN = gl.constexpr(schedule.TURN)


@gluon.jit
def block_at(j, tile, BK: gl.constexpr, ROTATE: gl.constexpr):
    """The first key of the block that is visited j-th."""
    if ROTATE:
        at = turned(j, tile.count, tile.row_tile, TURN)
    else:
        at = tile.count - 1 - j
    return (tile.first + at) * BK


@gluon.jit
def send_values(
    values, v_desc, stage, phase, at, k0, g, BK: gl.constexpr, PACKED: gl.constexpr, v_rest
):  # fmt: skip
    """Values of a block of keys, in one tile or two; and the next place in the ring.

    Those of FP8 lie transposed, (B or 1, G, E, columns): see `quant.columns`.
    """
    SLOTS_V: gl.constexpr = values.tiles.shape[0]
    if v_desc.block_shape[-2] == 1:
        send(values, v_desc, stage, phase, at, k0, g, PACKED, v_rest)
        HALF: gl.constexpr = v_desc.block_shape[-3]
        if HALF < BK:
            stage, phase = advance(stage, phase, SLOTS_V)
            send(values, v_desc, stage, phase, at, k0 + HALF, g, PACKED, v_rest)
    else:
        mbarrier.wait(values.empty.index(stage), phase)
        bar = values.full.index(stage)
        mbarrier.expect(bar, v_desc.block_type.nbytes)
        if PACKED:
            place = [0, g, 0, first_column_of(at.first, at.b, BLOCK_OF_SCALE) + k0]
        else:
            place = [at.b, g, 0, k0]
        tma_load(v_desc, place, bar, values.tiles.index(stage))
    return advance(stage, phase, SLOTS_V)


@gluon.jit
def send_rows(
    queries, keys, values, slots, q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, counter, size, tile, turn,
    stage_k, phase_k, stage_v, phase_v, WGS: gl.constexpr, BK: gl.constexpr, PACK: gl.constexpr,
    STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PACKED: gl.constexpr,
    LISTED: gl.constexpr, ROTATE: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """All loads of a tile, and which is the next."""
    PART: gl.constexpr = ROWS // PACK
    g = tile.head // size.group
    row = first_row(tile.row_tile, size, WGS * PART)
    if SCHEDULE == DYNAMIC:
        send_tile(slots, turn, tile, PACKED, LISTED)
    # the first keys before the queries: these wait for the previous tile's epilogue
    k0 = block_at(0, tile, BK, ROTATE)
    send(keys, k_desc, stage_k, phase_k, tile.k, k0, g, PACKED, k_rest)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    for w in gl.static_range(WGS):
        send(
            queries, q_desc, turn % QUEUE * WGS + w, (turn // QUEUE & 1) ^ 1, tile.q, row + w * PART, tile.head, PACKED,
            q_rest,
        )  # fmt: skip
    if SCHEDULE == DYNAMIC:  # early: an answer from the L2 cache takes its time
        following = draw(counter, size.count)
    else:
        following = tile_of(turn + 1, size, slots, SCHEDULE)
        following = size.count if following < 0 else following
    for j in range(1, tile.count):
        v0 = k0
        k0 = block_at(j, tile, BK, ROTATE)
        send(keys, k_desc, stage_k, phase_k, tile.k, k0, g, PACKED, k_rest)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES)
        stage_v, phase_v = send_values(
            values, v_desc, stage_v, phase_v, tile.k, v0, g, BK, PACKED, v_rest
        )  # fmt: skip
    stage_v, phase_v = send_values(
        values, v_desc, stage_v, phase_v, tile.k, k0, g, BK, PACKED, v_rest
    )
    return following, stage_k, phase_k, stage_v, phase_v


@gluon.jit
def produce(
    queries, keys, values, slots, q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, counter, size, band, extra,
    WGS: gl.constexpr, BK: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
    SCHEDULE: gl.constexpr, SPLIT: gl.constexpr, ROTATE: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """All tiles of this block of threads. QUEUE: tiles of queries that there is room for."""
    PACKED: gl.constexpr = extra.cu_q is not None
    LISTED: gl.constexpr = SPLIT or extra.row_start is not None
    stage_k, phase_k, stage_v, phase_v = 0, 1, 0, 1
    turn = 0
    number = gl.program_id(0)
    while number < size.count:
        tile = locate(number, size, band, extra, WGS, BK, PACK, SPLIT)
        if PACKED:
            if tile.row_tile * (WGS * ROWS // PACK) < tile.q.length:
                number, stage_k, phase_k, stage_v, phase_v = send_rows(
                    queries, keys, values, slots, q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, counter,
                    size, tile, turn, stage_k, phase_k, stage_v, phase_v, WGS, BK, PACK, STAGES,
                    SCHEDULE, PACKED, LISTED, ROTATE, QUEUE,
                )  # fmt: skip
                turn += 1
            else:  # a shorter sequence than the longest has no such tile
                number = draw(counter, size.count)
        else:
            number, stage_k, phase_k, stage_v, phase_v = send_rows(
                queries, keys, values, slots, q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, counter, size,
                tile, turn, stage_k, phase_k, stage_v, phase_v, WGS, BK, PACK, STAGES, SCHEDULE,
                PACKED, LISTED, ROTATE, QUEUE,
            )  # fmt: skip
            turn += 1
    if SCHEDULE == DYNAMIC:
        send_end(slots, turn)
