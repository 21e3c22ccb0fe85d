"""The softmax of one warpgroup's scores: Algorithm 1 of FlashAttention-2, on tiles in registers.

Functions that ptxas and LLVM would otherwise undo carry the reason; docs/hopper.md has the figures.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from relampago.backends.gluon.tiles import accumulator
from relampago.backends.gluon.versions import aggregate
from relampago.masks import rules

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
STALE = gl.constexpr(8.0)
SELDOM = gl.constexpr(1)  # O is rescaled where a maximum grew much
MAXIMA = gl.constexpr(8)  # pinned: the maxima alone, not the weights
LATER = gl.constexpr(2)  # always, under the next scores

full_range = gluon.jit(rules.full_range)
run_of = gluon.jit(rules.run_of)


@aggregate
class Seen:
    """What decides which keys a warpgroup's rows see."""

    rows: gl.tensor  # the query of each row
    len_k: gl.tensor
    offset: gl.tensor
    start: gl.tensor  # of tables: each row's run of keys
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, rows, len_k, offset, start, end):
        self.rows = rows
        self.len_k = len_k
        self.offset = offset
        self.start = start
        self.end = end


@gluon.jit
def exp2(x):
    """2ˣ by the exponential unit."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """1 / x to a unit in the last place."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def pin(x):
    """x, behind a fence that keeps ptxas from ending the overlap: it moves the wait for PV above pure arithmetic.

    The fence is a store to shared memory that never happens and that needs x: a row sum, which no one can order below
    -1.7e38 but ptxas does not know.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $2, 0fFEFFFFFF; "
        "@p st.volatile.shared.f32 [a], $3; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def here(x):
    """x, which LLVM may not use before this place: it would move a product to the end of the loop's last turn."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def row_max(s, R_L: gl.constexpr):
    """Maxima of rows. A tree over a thread's own elements: gl.max alone would be one chain of dependent steps."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1] // 8
    x = gl.max(gl.reshape(s, [M, N, 4, 2]), axis=3)
    if N >= 16:
        x = gl.max(gl.reshape(x, [M, 2, N // 2, 4]), axis=1)
    if N >= 8:
        x = gl.max(gl.reshape(x, [M, 2, x.shape[1] // 2, 4]), axis=1)
    if N >= 4:
        x = gl.max(gl.reshape(x, [M, 2, x.shape[1] // 2, 4]), axis=1)
    x = gl.max(x, axis=1)
    return gl.convert_layout(gl.max(x, axis=1), R_L, assert_trivial=True)


@gluon.jit
def part_sum(p):
    """[M, 4]: sums over the elements of a row that one thread holds. The quad's four are added once, at the end."""
    x = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), axis=3)
    return gl.sum(x, axis=1)


@gluon.jit
def halves(x):
    """A tile's columns in two halves, as WGMMA would hold them: a thread's registers, of which none moves."""
    M: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    L: gl.constexpr = accumulator(HALF)
    low, high = gl.split(gl.permute(gl.reshape(x, [M, 2, HALF]), (0, 2, 1)))
    low = gl.convert_layout(low, L, assert_trivial=True)
    return low, gl.convert_layout(high, L, assert_trivial=True)


@gluon.jit
def plus(l, p):
    """l and sums over the elements of a row of p that one thread holds."""
    return l + gl.convert_layout(part_sum(p), l.type.layout, assert_trivial=True)


@gluon.jit
def pinned(l, p, PIN: gl.constexpr):
    """l and the sums of p, and a fence that 1 / PIN of p must come before, or nothing but the maxima.

    The fence needs l: of a sum of weights alone ptxas knows that it is not negative.
    """
    if PIN == 1:
        l = pin(plus(l, p))
    elif PIN == 2:
        low, high = halves(p)
        l = plus(pin(plus(l, low)), high)
    elif PIN == MAXIMA:
        l = plus(pin(l), p)
    else:
        l = plus(l, p)
    return l


@gluon.jit
def finite(m):
    """The maximum to subtract: 0 for a row that has seen nothing, so that -inf minus it stays -inf."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def by_row(x, S_L: gl.constexpr):
    """A number for each row, [M, 1], beside a tile that lies otherwise."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, S_L), assert_trivial=True), 1)


@gluon.jit
def below(x, quad):
    """Bits of those of a thread's columns of a row that come before column x, which may lie outside of the block.

    A thread of WGMMA's accumulator has columns 8i + 2·quad and the next one: its bits 2i and 2i + 1.
    """
    count = (x >> 3) * 2 + gl.minimum(gl.maximum((x & 7) - quad * 2, 0), 2)  # [M, 4]
    return gl.where(count <= 0, 0, gl.where(count >= 32, -1, (count * 0 + 1 << count) - 1))


@gluon.jit
def hide(s, k0, seen, band, TABLES: gl.constexpr):
    """Scores with -inf where a row does not see a key: each sees one run of keys, whatever the masks.

    Two instructions a score: is the bit set? Under a branch, or the compiler would decide for each score before S is
    there, and keep that in half as many instructions again.
    """
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    gl.static_assert(N <= 128, "a thread has more columns of a row than a word has bits")
    by_eight = gl.reshape(s, [M, N // 8, 4, 2])
    ALL: gl.constexpr = by_eight.type.layout
    QUADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, ALL))
    quad = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, QUADS)), 0)
    rows = by_row(seen.rows, QUADS)
    start, end = run_of(rows, seen.len_k, seen.offset, band.left, band.right, band.prefix)
    if TABLES:
        start = gl.maximum(by_row(seen.start, QUADS), start)
        end = gl.minimum(by_row(seen.end, QUADS), end)
    word = below(end - k0, quad)
    if TABLES or band.left is not None:
        word = word & (below(start - k0, quad) ^ -1)
    word = gl.expand_dims(gl.expand_dims(word, 1), 3)  # [M, 1, 4, 1]
    eight = gl.arange(
        0, N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ALL)))
    )
    one = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ALL))))
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 2), 3)
    one = gl.expand_dims(gl.expand_dims(gl.expand_dims(one, 0), 1), 2)
    shown = (word >> (eight * 2 + one)) & 1
    by_eight = gl.where(shown != 0, by_eight, float("-inf"))
    return gl.convert_layout(gl.reshape(by_eight, [M, N]), s.type.layout, assert_trivial=True)


@gluon.jit
def capped(s, cap):
    """tanh of cap · s by the exponential unit, if there is a cap; `factor` has the rest of softcap."""
    if cap is not None:
        s = 1.0 - 2.0 * reciprocal(1.0 + exp2(s * (cap * 2.0 * LOG2E)))
    return s


@gluon.constexpr_function
def rescaling(n):
    """Assembly: n numbers times as many, unless the first four of these are 1 in all threads of a warp.

    A thread of WGMMA's accumulator has two rows, which alternate by pairs. The numbers are operands twice, as results
    and as inputs in the same place: the factors come after both.
    """
    one, by = "0f3F800000", 2 * n
    told = " ".join(f"setp.ne.or.f32 p, ${by + i}, {one}, p;" for i in range(1, 4))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${by + i};" for i in range(n))
    return (
        f"{{ .reg .pred p; setp.ne.f32 p, ${by}, {one}; {told} vote.sync.any.pred p, p, 0xffffffff; "
        f"@!p bra SAME; {products} SAME: }}"
    )


@gluon.constexpr_function
def tied(n):
    """Its constraints: results lie where the first numbers were."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def at_once(x):
    """Numbers that it takes together: those of a thread of [64, N] in four warps, or 32 of them."""
    return min(32, x // 2)


@gluon.jit
def rescaled(acc, factor):
    """acc times its rows' factors. Where they are 1 in a whole warp, as with LAZY they mostly are, that is a branch."""
    N: gl.constexpr = at_once(acc.shape[1])
    by = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    by = gl.expand_dims(by, 1) + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(
        rescaling(N), tied(N), [acc, by], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.jit
def softmax(s, m, l, factor, R_L: gl.constexpr, PIN: gl.constexpr, LAZY: gl.constexpr):
    """Algorithm 1, lines 9 and 10: weights of this block; m, l, and what earlier sums shrink by.

    LAZY, if SELDOM: a maximum that grew by less than STALE in base 2 stays (FlashAttention-4): weights reach 2^STALE
    then, which the sums, in fp32, and a division at the end take as well as 1.
    """
    m_new = gl.maximum(m, row_max(s, R_L))
    if LAZY == SELDOM:
        m_new = gl.where((m_new - m) * factor > STALE, m_new, m)
    shift = finite(m_new)
    alpha = exp2((m - shift) * factor)
    p = exp2(s * factor - gl.expand_dims(shift * factor, 1))  # [64, BK]
    alpha4 = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
    l = pinned(l * gl.expand_dims(alpha4, 1), p, PIN)  # [64, 4]
    return p, m_new, l, alpha


@gluon.jit
def finish(m, total, factor, sinks, heads):
    """(what to multiply acc by, LSE) from the maxima and sums: Algorithm 1, line 12. A sink is one more score."""
    m = m * factor
    if sinks is not None:
        sink = gl.cast(gl.load(sinks + heads), gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        shrink = exp2(m - finite(top))
        total = total * shrink + exp2(sink - finite(top))
        inverse = shrink / gl.where(total == 0.0, 1.0, total)
        m = top
    else:
        inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    return inverse, (finite(m) + gl.log2(total)) * LN2
