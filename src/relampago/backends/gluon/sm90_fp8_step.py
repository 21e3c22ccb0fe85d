"""A block of keys in e4m3, as one warpgroup takes it; scales and parts of the head dim: see `sm90_fp8`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon.channel import receive, release, store
from relampago.backends.gluon.sm90_step import advance, give_turn, scores, wait_turn
from relampago.backends.gluon.softmax import (
    LOG2E,
    capped,
    exp2,
    finite,
    here,
    hide,
    pinned,
    row_max,
)
from relampago.backends.gluon.tiles import ROWS
from relampago.backends.gluon.versions import aggregate
from relampago.quant.cast import BLOCK
from relampago.quant.emulation import PLACES

SHARED_BY = gl.constexpr(BLOCK)  # tokens of a scale
TIMES = gl.constexpr(float(1 << PLACES))
PLACE = gl.constexpr(float(PLACES))


@aggregate
class Scales:
    """Scales fp32 (B, heads, blocks): of queries, keys, values, and how many blocks each has."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    blocks_q: gl.tensor
    blocks_k: gl.tensor
    blocks_v: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, k, v, blocks_q, blocks_k, blocks_v):
        self.q = q
        self.k = k
        self.v = v
        self.blocks_q = blocks_q
        self.blocks_k = blocks_k
        self.blocks_v = blocks_v


@gluon.jit
def of_block(scales, blocks, k0, at):
    """The scale of the keys from k0 on; `at` is the place of the sequence's and head's, in heads."""
    return gl.load(scales + (at * blocks + min(max(k0, 0) // SHARED_BY, blocks - 1)))


@gluon.jit
def of_rows(scales, tile, heads, rows, size, factor):
    """Each row's scale times the softmax's factor."""
    block = gl.minimum(rows // SHARED_BY, scales.blocks_q - 1)
    place = (tile.q.b * size.heads + heads) * scales.blocks_q + block
    return gl.load(scales.q + place, mask=rows < tile.q.length, other=1.0) * factor


@gluon.jit
def words(p):
    """Weights in e4m3, four to an int32: of the keys that are neighbours in the order of `quant.columns`.

    A loop carries bytes in a register each, with some ten instructions to take four apart and to join them again.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    p = gl.permute(gl.reshape(p, [M, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    even, odd = gl.split(gl.reshape(p, [M, N // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
        "mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def operand(w, P_L: gl.constexpr):
    """Those words as the next product's operand, register by register."""
    M: gl.constexpr = w.shape[0]
    N: gl.constexpr = w.shape[1] * 4
    w = gl.join(w, w)
    w = gl.convert_layout(gl.reshape(gl.join(w, w), [M, N]), P_L, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [w], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def weigh(
    p8, v, acc, beta, C: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, O_L: gl.constexpr
):  # fmt: skip
    """Part C of P·V under way: apart from acc, or, if PARTS is 0, onto it. beta: what acc shrinks by before."""
    if PARTS == 0:  # under the next scores: FlashAttention-3's RescaleOBeforeGemm
        acc = acc * spread(here(beta), O_L)
        t = warpgroup_mma(p8, v.permute((1, 0)), acc, is_async=True)
    else:
        t = gl.zeros([ROWS, W], gl.float32, O_L)
        if PARTS > 1:
            v = v.slice(C * W, W, dim=0)
        t = warpgroup_mma(p8, v.permute((1, 0)), t, use_acc=False, is_async=True)
    return t


@gluon.jit
def grown(acc, t, beta, PARTS: gl.constexpr):
    """acc with a block's part t: both in fp32, in registers. beta: what acc shrinks by before."""
    if PARTS == 0:
        acc = t
    else:
        O_L: gl.constexpr = acc.type.layout
        acc = acc * spread(beta, O_L) + t
    return acc


@gluon.jit
def spread(factor, O_L: gl.constexpr):
    """A factor per row, for O."""
    return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, O_L), assert_trivial=True), 1)


@gluon.jit
def others(
    p8, v, acc2, acc3, acc4, beta, PARTS: gl.constexpr, W: gl.constexpr, O_L: gl.constexpr
):  # fmt: skip
    """The parts after the first, one at a time."""
    if PARTS >= 2:
        t = weigh(p8, v, acc2, beta, 1, PARTS, W, O_L)
        t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
        acc2 = grown(acc2, t, beta, PARTS)
    if PARTS == 4:
        t = weigh(p8, v, acc3, beta, 2, PARTS, W, O_L)
        t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
        acc3 = grown(acc3, t, beta, PARTS)
        t = weigh(p8, v, acc4, beta, 3, PARTS, W, O_L)
        t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
        acc4 = grown(acc4, t, beta, PARTS)
    return acc2, acc3, acc4


@gluon.jit
def capped_scores(s, factor, cap):
    """Scores in base 2 after softcap, if there is one; else as they are. factor: what a row's are times, > 0."""
    if cap is not None:
        s = capped(s * gl.expand_dims(factor, 1), 1.0) * (cap * LOG2E)
    return s


@gluon.jit
def weights(s, m, factor, cap, S_L: gl.constexpr):
    """(weights times 2^PLACES, maxima in base 2) of what `capped_scores` gives."""
    if cap is not None:
        m = gl.maximum(m, row_max(s, gl.SliceLayout(1, S_L)))
        p = exp2(s - gl.expand_dims(finite(m) - PLACE, 1))
    else:
        m = gl.maximum(m, row_max(s, gl.SliceLayout(1, S_L)) * factor)
        p = exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(finite(m) - PLACE, 1))
    return p, m


@gluon.jit
def step(
    q, keys, values, acc1, acc2, acc3, acc4, p_words, m, l, beta, sv, stage_k, phase_k, stage_v, phase_v, k0, masked,
    seen, band, cap, factor, scales, kv_at, WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr,
    D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr,
    P_L: gl.constexpr, W: gl.constexpr, MASKS: gl.constexpr, TABLES: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 8 to 14: Sⱼ and Pⱼ₋₁Vⱼ₋₁ in flight together, softmax of Sⱼ under the latter."""
    sk = of_block(scales.k, scales.blocks_k, k0, kv_at)
    sv_new = of_block(scales.v, scales.blocks_v, k0, kv_at)
    k = receive(keys, stage_k, phase_k, BK, D)
    wait_turn(WG, PINGPONG)
    s = scores(q, q, keys, stage_k, k, BK, 0, S_L)
    v = receive(values, stage_v, phase_v, E, BK)
    p8 = operand(p_words, P_L)
    t = weigh(p8, v, acc1, beta, 0, PARTS, W, O_L)
    give_turn((WG + 1) % WGS, PINGPONG == 1)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    give_turn((WG + 1) % WGS, PINGPONG == 2)
    release(keys, stage_k)
    s = capped_scores(s, factor * sk, cap)
    if MASKS:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if masked:
            s = hide(s, k0, seen, band, TABLES)
    p, m_new = weights(s, m, factor * sk, cap, S_L)
    alpha = exp2(m - finite(m_new))
    alpha4 = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
    l = pinned(l * gl.expand_dims(alpha4, 1), p, PIN)
    t = warpgroup_mma_wait(num_outstanding=0, deps=(t,))
    acc1 = grown(acc1, t, beta, PARTS)
    acc2, acc3, acc4 = others(p8, v, acc2, acc3, acc4, beta, PARTS, W, O_L)
    release(values, stage_v)
    beta = alpha * (sv / sv_new)
    p_words = words(p)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    stage_v, phase_v = advance(stage_v, phase_v, STAGES)
    return (
        acc1,
        acc2,
        acc3,
        acc4,
        p_words,
        m_new,
        l,
        beta,
        sv_new,
        stage_k,
        phase_k,
        stage_v,
        phase_v,
    )


@gluon.jit
def store_tile(
    results, o_desc, WG: gl.constexpr, C: gl.constexpr, tile, row0, acc, W: gl.constexpr,
    MOST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Part C of O, W columns of it, through shared memory."""
    result = results.tiles.index(WG * MOST + C)
    result.reshape([ROWS, W]).store(acc.to(results.tiles.dtype))
    fence_async_shared()
    store(o_desc, result, tile.q, row0, tile.head, PACKED, C * W)
