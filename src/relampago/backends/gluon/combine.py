"""What splits over keys have found, as one: `relampago.merge` in a kernel, with the sinks as one more score."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from relampago.backends.gluon.softmax import LN2, LOG2E, exp2, finite

AT_ONCE = gl.constexpr(8)  # splits whose loads are in flight together
LINES = gl.constexpr(4)  # rows of a program, a warp each


@gluon.jit(do_not_specialize=["splits", "rows", "heads", "len_q"])
def combine(
    part, part_lse, out, lse, sinks, splits, rows, heads, len_q, dim_v, WIDTH: gl.constexpr,
):  # fmt: skip
    """LINES rows, in the order of LSE, (B, H, Lq) or (H, total): Σ wᵢ·outᵢ with wᵢ = exp(lseᵢ - lse).

    Rows of no sequence, which no split has written, have an LSE of inf.
    """
    L: gl.constexpr = gl.BlockedLayout([1, WIDTH // 32], [1, 32], [4, 1], [1, 0])
    R_L: gl.constexpr = gl.SliceLayout(1, L)
    place = gl.program_id(0) * LINES + gl.arange(0, LINES, layout=R_L)
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    inside = place < rows
    head = place // len_q % heads
    step = gl.cast(rows, gl.int64)
    m = gl.full([LINES], float("-inf"), gl.float32, R_L)
    for i in range(splits):
        x = gl.load(part_lse + (i * step + place), mask=inside, other=float("-inf"))
        m = gl.maximum(m, x)
    absent = m == float("inf")
    sink = m
    if sinks is not None:
        sink = gl.cast(gl.load(sinks + head, mask=inside, other=0.0), gl.float32)
        m = gl.maximum(m, sink)
    shift = gl.where(absent, 0.0, finite(m))
    total = gl.zeros([LINES], gl.float32, R_L)
    acc = gl.zeros([LINES, WIDTH], gl.float32, L)
    for i0 in range(0, splits, AT_ONCE):
        for j in gl.static_range(AT_ONCE):
            at = (i0 + j) * step + place
            there = inside & (i0 + j < splits) & (absent == 0)
            x = gl.load(part_lse + at, mask=there, other=float("-inf"))
            w = exp2((x - shift) * LOG2E)
            seen = gl.expand_dims(there & (x != float("-inf")), 1)
            mask = seen & gl.expand_dims(columns < dim_v, 0)
            places = part + gl.expand_dims(at * dim_v, 1) + gl.expand_dims(columns, 0)
            acc += gl.expand_dims(w, 1) * gl.load(places, mask=mask, other=0.0)
            total += w
    if sinks is not None:
        total += exp2((sink - shift) * LOG2E)
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    b = place // len_q // heads
    row = (gl.cast(b, gl.int64) * len_q + place % len_q) * heads + head
    places = out + gl.expand_dims(row * dim_v, 1) + gl.expand_dims(columns, 0)
    acc = (acc * gl.expand_dims(inverse, 1)).to(out.dtype.element_ty)
    mask = gl.expand_dims(inside, 1) & gl.expand_dims(columns < dim_v, 0)
    gl.store(places, acc, mask=mask)
    found = gl.where(absent, float("-inf"), shift + gl.log2(total) * LN2)
    gl.store(lse + place, found, mask=inside)
