"""Results in the order in which the threads of a warpgroup hold them: 512 bytes that lie together a warp's instruction.

The sums of dQ, and O over several shards, are the kernels' own until the end: their order in memory is free. A block of
64 rows is one line; rows are put in order when all is added up (`sm90_rows.convert`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from relampago.backends.gluon.tiles import ROWS


@gluon.jit
def as_held(x):
    """[64, N] of a warpgroup's accumulator as a line in the order of its threads."""
    M: gl.constexpr = x.shape[0] * x.shape[1]
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])  # warp, half, row, columns, of four, pair
    return gl.reshape(gl.permute(x, [0, 3, 2, 4, 1, 5]), [M])


@gluon.jit
def as_tile(x, N: gl.constexpr):
    """The other way: [64, N]."""
    x = gl.permute(gl.reshape(x, [4, N // 8, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5])
    return gl.reshape(x, [64, N])


@gluon.jit
def block_at(extra, b, head, row0, N: gl.constexpr):
    """Where 64 rows of `extra.wide` begin, which may be part of a longer one."""
    start = gl.cast(b, gl.int64) * extra.out_b + gl.cast(head, gl.int64) * extra.out_h
    return extra.wide + (start + gl.cast(row0, gl.int64) * N)


@gluon.jit
def load_block(at, there, N: gl.constexpr, L: gl.constexpr):
    """[64, N] in the layout of an accumulator; zeros if it is not there."""
    like = as_held(gl.zeros([ROWS, N], gl.float32, L))
    H: gl.constexpr = like.type.layout
    mask = gl.full([ROWS * N], there, gl.int1, H)
    x = gl.load(at + gl.arange(0, ROWS * N, layout=H), mask=mask, other=0.0)
    return gl.convert_layout(as_tile(x, N), L, assert_trivial=True)


@gluon.jit
def store_block(at, there, x):
    """[64, N] of an accumulator, if it is there."""
    if there:
        line = as_held(x)
        gl.store(at + gl.arange(0, line.shape[0], layout=line.type.layout), line)
