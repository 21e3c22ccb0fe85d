"""A block of keys, as one warpgroup takes it: its scores under way, the product before them, the softmax between.

FlashAttention-3 (arXiv 2407.08608), Algorithm 2, lines 8 to 14. Legend: see `sm90_forward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import receive, release, rest_of
from relampago.backends.gluon.named import PAIR, TURNS, arrive, sync
from relampago.backends.gluon.softmax import (
    LATER,
    SELDOM,
    Seen,
    capped,
    exp2,
    finite,
    full_range,
    halves,
    here,
    hide,
    part_sum,
    rescaled,
    softmax,
)
from relampago.backends.gluon.tiles import ROWS, table_at
from relampago.masks import rules

BIG = gl.constexpr(2147483647)

advance = gluon.jit(schedule.advance)
key_range = gluon.jit(rules.key_range)


@gluon.jit
def wait_turn(WG: gl.constexpr, PINGPONG: gl.constexpr):
    """Until the warpgroup before this one has issued its products."""
    if PINGPONG:
        sync(TURNS + WG, PAIR)


@gluon.jit
def give_turn(WG: gl.constexpr, PINGPONG: gl.constexpr):
    """Let warpgroup WG issue its products."""
    if PINGPONG:
        arrive(TURNS + WG, PAIR)


@gluon.jit
def scores(
    q1, q2, keys, stage, k1, BK: gl.constexpr, D2: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """S = Q·Kᵀ under way; with a second part of the head dim, two products on one accumulator."""
    s = gl.zeros([ROWS, BK], gl.float32, S_L)
    s = warpgroup_mma(q1, k1.permute((1, 0)), s, use_acc=False, is_async=True)
    if D2 > 0:
        k2 = rest_of(keys, stage, BK, D2)
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def in_hand(q, HOLD: gl.constexpr, S_L: gl.constexpr):
    """Queries as a product takes them from registers, which are read anew for no block of keys; or where they lie."""
    if HOLD:
        return q.load(gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2))
    else:
        return q


@gluon.jit
def weigh(p16, values, stage, v1, acc1, acc2, BK: gl.constexpr, E2: gl.constexpr, P2: gl.constexpr):
    """O += P·V under way."""
    acc1 = warpgroup_mma(p16, v1, acc1, is_async=True)
    if E2 > 0:
        v2 = rest_of(values, stage, BK, E2)
        p16 = gl.convert_layout(p16, P2, assert_trivial=True)
        acc2 = warpgroup_mma(p16, v2, acc2, is_async=True)
    return acc1, acc2


@gluon.jit
def halves_of(p16, S_L: gl.constexpr, P1: gl.constexpr):
    """P's columns in two halves: a thread's registers, of which none moves."""
    low, high = halves(gl.convert_layout(p16, S_L, assert_trivial=True))
    low = gl.convert_layout(low, P1, assert_trivial=True)
    return low, gl.convert_layout(high, P1, assert_trivial=True)


@gluon.jit
def weigh_next(
    p16, values, stage, phase, acc1, acc2, BK: gl.constexpr, E: gl.constexpr, E2: gl.constexpr, S_L: gl.constexpr,
    P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """O += P·V under way as soon as the values are there, in one tile or in two of half the keys."""
    KEYS: gl.constexpr = values.tiles.shape[-3]
    v = receive(values, stage, phase, KEYS, E)
    if KEYS < BK:
        low, high = halves_of(p16, S_L, P1)
        acc1, acc2 = weigh(low, values, stage, v, acc1, acc2, KEYS, E2, P2)
        stage, phase = advance(stage, phase, values.tiles.shape[0])
        v = receive(values, stage, phase, KEYS, E)
        acc1, acc2 = weigh(high, values, stage, v, acc1, acc2, KEYS, E2, P2)
    else:
        acc1, acc2 = weigh(p16, values, stage, v, acc1, acc2, BK, E2, P2)
    return acc1, acc2


@gluon.jit
def release_values(values, stage, phase, BK: gl.constexpr):
    """A block's values, in one tile or in two, may be overwritten."""
    release(values, stage)
    if values.tiles.shape[-3] < BK:
        stage, phase = advance(stage, phase, values.tiles.shape[0])
        release(values, stage)


@gluon.jit
def next_values(values, stage, phase, BK: gl.constexpr):
    """Where the next block's values are in their ring."""
    SLOTS_V: gl.constexpr = values.tiles.shape[0]
    stage, phase = advance(stage, phase, SLOTS_V)
    if values.tiles.shape[-3] < BK:
        stage, phase = advance(stage, phase, SLOTS_V)
    return stage, phase


@gluon.jit
def pass_values(values, stage, phase, BK: gl.constexpr, E: gl.constexpr):
    """Let a block's values pass as soon as they are there; where the next block's are."""
    KEYS: gl.constexpr = values.tiles.shape[-3]
    receive(values, stage, phase, KEYS, E)
    if KEYS < BK:
        rest, rest_phase = advance(stage, phase, values.tiles.shape[0])
        receive(values, rest, rest_phase, KEYS, E)
    release_values(values, stage, phase, BK)
    return next_values(values, stage, phase, BK)


@gluon.jit
def unseen(row0, tile, band, PART: gl.constexpr, BK: gl.constexpr):
    """How many of a tile's first blocks PART rows do not see: never all, so that their result is written."""
    _, end = key_range(
        row0, row0 + (PART - 1), tile.k.length, tile.offset, band.left, band.right, band.prefix
    )
    return min(max(tile.first + tile.count - (end + (BK - 1)) // BK, 0), tile.count - 1)


@gluon.jit
def let_pass(
    blocks, keys, values, stage_k, phase_k, stage_v, phase_v, WG: gl.constexpr, WGS: gl.constexpr,
    BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """A tile's first blocks as `step` takes them, but nothing is computed; the last one's values are still to pass."""
    for i in range(blocks):
        receive(keys, stage_k, phase_k, BK, D)
        if i > 0:  # a tile's first block takes no turn
            wait_turn(WG, PINGPONG)
            give_turn((WG + 1) % WGS, PINGPONG)
        release(keys, stage_k)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES)
        if i > 0:
            stage_v, phase_v = pass_values(values, stage_v, phase_v, BK, E)
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def settle(acc1, acc2, E2: gl.constexpr):
    """Wait for O."""
    if E2 > 0:
        acc1, acc2 = warpgroup_mma_wait(num_outstanding=0, deps=(acc1, acc2))
    else:
        acc1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc1,))
    return acc1, acc2


@gluon.jit
def scaled(acc1, acc2, factor, E2: gl.constexpr):
    """O with its rows multiplied."""
    O1: gl.constexpr = acc1.type.layout
    by = gl.convert_layout(factor, gl.SliceLayout(1, O1), assert_trivial=True)
    acc1 = acc1 * gl.expand_dims(by, 1)
    if E2 > 0:
        O2: gl.constexpr = acc2.type.layout
        by = gl.convert_layout(factor, gl.SliceLayout(1, O2), assert_trivial=True)
        acc2 = acc2 * gl.expand_dims(by, 1)
    return acc1, acc2


@gluon.jit
def opened(s, m, factor):
    """(weights, a row's sum by thread) of the first block of a tile, whose rows' maxima are m."""
    p = exp2(s * factor - gl.expand_dims(finite(m) * factor, 1))
    return p, part_sum(p)


@gluon.jit
def step(
    q1, q2, keys, values, acc1, acc2, p16, m, l, alpha, stage_k, phase_k, stage_v, phase_v, k0, masked, seen, band,
    cap, factor, WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr,
    D2: gl.constexpr, E: gl.constexpr, E2: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr,
    P1: gl.constexpr, P2: gl.constexpr, MASKS: gl.constexpr, TABLES: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, LAZY: gl.constexpr, free=None, last=False,
):  # fmt: skip
    """Algorithm 2, lines 8 to 14: Sⱼ and O += Pⱼ₋₁Vⱼ₋₁ in flight together, softmax of Sⱼ under the latter.

    alpha: what O is still to be multiplied by, if LAZY says so (FlashAttention-3's RescaleOBeforeGemm); as returned.
    If there is `free`, a barrier, it is told as soon as the queries are not needed any more, in the step that is the
    `last`.
    """
    k = receive(keys, stage_k, phase_k, BK, D)
    wait_turn(WG, PINGPONG)
    s = scores(q1, q2, keys, stage_k, k, BK, D2, S_L)
    if LAZY == LATER:
        acc1, acc2 = scaled(acc1, acc2, here(alpha), E2)
    acc1, acc2 = weigh_next(p16, values, stage_v, phase_v, acc1, acc2, BK, E, E2, S_L, P1, P2)
    give_turn((WG + 1) % WGS, PINGPONG == 1)
    PARTS: gl.constexpr = (2 if E2 > 0 else 1) * (BK // values.tiles.shape[-3])
    s = warpgroup_mma_wait(num_outstanding=PARTS, deps=(s,))
    give_turn((WG + 1) % WGS, PINGPONG == 2)
    release(keys, stage_k)
    if free is not None:
        mbarrier.arrive(free, count=1, pred=last)
    s = capped(s, cap)
    if MASKS:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if masked:
            s = hide(s, k0, seen, band, TABLES)
    p, m, l, alpha = softmax(s, m, l, factor, gl.SliceLayout(1, S_L), PIN, LAZY)
    acc1, acc2 = settle(acc1, acc2, E2)
    release_values(values, stage_v, phase_v, BK)
    p16 = gl.convert_layout(p.to(p16.dtype), P1, assert_trivial=True)
    if LAZY == SELDOM:
        acc1 = rescaled(acc1, alpha)
        if E2 > 0:
            acc2 = rescaled(acc2, alpha)
    elif LAZY != LATER:
        acc1, acc2 = scaled(acc1, acc2, alpha, E2)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    stage_v, phase_v = next_values(values, stage_v, phase_v, BK)
    return acc1, acc2, p16, m, l, alpha, stage_k, phase_k, stage_v, phase_v


@gluon.jit
def sight(row0, tile, size, band, extra, PACK: gl.constexpr, R_L: gl.constexpr):
    """What 64 rows see, and the keys [start, end) that all of them do: no mask is needed there."""
    rows = row0 + gl.arange(0, ROWS, layout=R_L) // PACK
    len_k = tile.k.length
    start, end = full_range(
        row0, row0 + (ROWS // PACK - 1), len_k, tile.offset, band.left, band.right, band.prefix
    )
    if extra.row_start is not None:
        inside = rows < tile.q.length
        at = table_at(size, tile.q.b) + rows
        row_start = gl.load(extra.row_start + at, mask=inside, other=0)
        row_end = gl.load(extra.row_end + at, mask=inside, other=0)
        start = max(start, gl.max(row_start, axis=0))
        end = min(end, gl.min(gl.where(inside, row_end, BIG), axis=0))
        seen = Seen(rows, len_k, tile.offset, row_start, row_end)
    else:
        seen = Seen(rows, len_k, tile.offset, rows, rows)
    return seen, start, end
