"""Rings of tiles in shared memory between the producer warp, which fills them by TMA, and the warpgroups that read them.

A ring has STAGES tiles and two mbarriers for each: `full`, which the copy engine completes when the bytes have come,
and `empty`, at which every reader arrives when it is done. The n-th use of a tile completes each barrier's n-th phase;
who waits names the parity of the phase. A fresh barrier counts as being in phase 0 with phase "-1" complete, so that a
producer that starts with parity 1 passes its first waits on `empty`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from relampago.backends.gluon.versions import aggregate, tma_load


@aggregate
class Channel:
    """A ring: tiles [STAGES, 1, rows, 1, dim] and their barriers [STAGES, 1]."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Barriers of a ring that complete after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def channel(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of tiles that a descriptor loads."""
    shape: gl.constexpr = [STAGES, 1, desc.block_shape[1], 1, desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return Channel(tiles, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def send(ring, desc, stage, phase, b, row, head):
    """Producer: wait until the tile is free, then start its load."""
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [b, row, head, 0], ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def receive(ring, stage, phase, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Consumer: wait for a tile; a view of it, [ROWS, DIM]."""
    mbarrier.wait(ring.full.index(stage), phase)
    return ring.tiles.index(stage).reshape([ROWS, DIM])


@gluon.jit
def release(ring, stage):
    """Consumer: the tile may be overwritten."""
    mbarrier.arrive(ring.empty.index(stage), count=1)
