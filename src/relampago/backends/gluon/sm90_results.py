"""Where a tile's rows of O, of LSE and of the largest scores go. Legend: see `sm90_forward`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from relampago.backends.gluon.channel import rest_of, store
from relampago.backends.gluon.softmax import LN2
from relampago.backends.gluon.tiles import ROWS, accumulator


@gluon.jit
def place_of(size, tile, heads, rows, SPLIT: gl.constexpr, PACKED: gl.constexpr):
    """Where rows stand in LSE, (B, H, Lq) or (H, total); of a split, in its own."""
    if PACKED:
        at = gl.cast(heads, gl.int64) * size.len_q + (rows + tile.q.first)
    else:
        first = gl.cast(tile.q.b, gl.int64) * size.heads
        at = (first + heads) * size.len_q + rows
    if SPLIT:
        at += tile.split * gl.cast(size.rows, gl.int64)
    return at


@gluon.jit
def raise_top(top, m, tile, heads, rows, size, factor, PACK: gl.constexpr):
    """Raise heads' largest scores, (B, H), to those of a tile, whose order does not matter. m: of unscaled scores."""
    highest = gl.where(rows < tile.q.length, m, float("-inf")) * (factor * LN2)
    at = top + tile.q.b * size.heads
    if PACK > 1:
        gl.atomic_max(at + heads, highest, sem="relaxed")
    else:
        gl.atomic_max(at + tile.head, gl.max(highest, axis=0), sem="relaxed")


@gluon.jit
def store_tile(
    results, o_desc, o_rest, WG: gl.constexpr, tile, row0, acc1, acc2, E: gl.constexpr,
    E2: gl.constexpr, SHARE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """O in the queries' dtype, through shared memory."""
    if not SHARE:
        tma.store_wait(pendings=0)
    result = results.tiles.index(WG)
    result.reshape([ROWS, E]).store(acc1.to(results.tiles.dtype))
    if E2 > 0:
        rest_of(results, WG, ROWS, E2).store(acc2.to(results.tiles.dtype))
    fence_async_shared()
    store(o_desc, result, tile.q, row0, tile.head, PACKED)
    if E2 > 0:
        store(o_rest, results.rest.index(WG), tile.q, row0, tile.head, PACKED, E)


@gluon.jit
def store_halves(
    results, o_desc, WG: gl.constexpr, tile, row0, acc, E: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """O in the queries' dtype, one half of its columns after the other through the same room."""
    H: gl.constexpr = E // 2
    O_L: gl.constexpr = accumulator(H)
    halves = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, H]), (0, 2, 1)))
    result = results.tiles.index(WG)
    for c in gl.static_range(2):
        half = gl.convert_layout(halves[c], O_L, assert_trivial=True)
        tma.store_wait(pendings=0)
        result.reshape([ROWS, H]).store(half.to(results.tiles.dtype))
        fence_async_shared()
        store(o_desc, result, tile.q, row0, tile.head, PACKED, c * H)
