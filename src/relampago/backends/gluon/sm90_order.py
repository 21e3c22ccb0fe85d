"""Sums of dQ in one order, for `deterministic=True`: tiles of keys add to a block of rows one after another.

For each block of rows a counter in global memory says how many tiles have added to it. Two warps more of a block of
threads keep the order, so that no warpgroup with products waits for memory: one asks until those before have added, the
other counts on when both warpgroups have.

    counter of the block ─► asks ─► turns ─► warpgroups add ─► added ─► passes on ─► the counter, +1
                             ▲───────────────── passed ◄────────────────────┘

Tiles come in ascending order of their keys and each is drawn when a block of threads is there for it, so that a tile
waits for none that has not begun. FlashAttention-3 has such semaphores in its deterministic backward
(arXiv 2407.08608, the public code).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import barriers, release
from relampago.backends.gluon.sm90_gradients import key_tile, next_rows, row_base
from relampago.backends.gluon.tiles import DYNAMIC, SLOTS, tile_of

DEPTH = gl.constexpr(4)  # blocks whose turn may have come before the first of them is passed on

adders_before = gluon.jit(schedule.adders_before)


class Order(NamedTuple):
    """Counters of blocks of rows and barriers [DEPTH, 1], of which each block of rows has the next; without counters
    there is no order.
    """

    counts: Any
    turns: Any
    added: Any
    passed: Any


@gluon.jit
def order_of(counts):
    """For counters of blocks of rows."""
    return Order(counts, barriers(DEPTH, 1), barriers(DEPTH, 2), barriers(DEPTH, 1))


@gluon.jit
def await_turn(order, n):
    """Warpgroup: until it may add to its n-th block of rows."""
    if order.counts is not None:
        mbarrier.wait(order.turns.index(n % DEPTH), n // DEPTH & 1)


@gluon.jit
def tell_added(order, n):
    """Warpgroup: it has."""
    if order.counts is not None:
        mbarrier.arrive(order.added.index(n % DEPTH), count=1)


@gluon.jit
def keep_order(
    slots, order, size, band, extra, BQ: gl.constexpr, BK: gl.constexpr, ASKS: gl.constexpr
):
    """One warp: asks for the turn of each block of rows of each tile of this block of threads, or passes it on."""
    turn, done = 0, 0
    number = tile_of(turn, size, slots, DYNAMIC)
    while number >= 0:
        release(slots, turn % SLOTS)
        done = keep_tile(number, done, order, size, band, extra, BQ, BK, ASKS)
        turn += 1
        number = tile_of(turn, size, slots, DYNAMIC)


@gluon.jit
def keep_tile(
    number, done, order, size, band, extra, BQ: gl.constexpr, BK: gl.constexpr, ASKS: gl.constexpr
):
    """Blocks of rows of a tile, in the order in which the warpgroups add to them; how many that makes in all.

    A tile that no row sees has one, to which nothing is added: it waits for nobody, and nobody for it.
    """
    PACKED: gl.constexpr = extra.cu_q is not None
    g, k0, q_at, _, offset, first, n, seen = key_tile(number, size, band, extra, BQ, BK)
    block, head = first, g * size.group
    for i in range(n * size.group):
        at = (done + i) % DEPTH
        phase = (done + i) // DEPTH & 1
        row = block * BQ
        counter = order.counts + (row_base(q_at, head, size, PACKED) + row) // BQ
        if ASKS:
            mbarrier.wait(order.passed.index(at), phase ^ 1)
            if seen:
                before = adders_before(k0, row, offset, band.left, BK)
                while gl.atomic_add(counter, 0, sem="acquire") < before:
                    pass
            mbarrier.arrive(order.turns.index(at), count=1)
        else:
            mbarrier.wait(order.added.index(at), phase)
            if seen:
                gl.atomic_add(counter, 1, sem="release")
            mbarrier.arrive(order.passed.index(at), count=1)
        block, head = next_rows(block, head, first, n, first)
    return done + n * size.group
