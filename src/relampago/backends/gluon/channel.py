"""Rings of tiles in shared memory between the producer warp, which fills them by TMA, and the warpgroups that read.

A ring has STAGES tiles and two mbarriers for each: `full`, which the copy engine completes when the bytes have come,
and `empty`, at which every reader arrives when it is done. A dim that is no power of two is cut in two tiles, `tiles`
and `rest`, which share the barriers. The n-th use of a tile completes each barrier's n-th phase;
who waits names the parity of the phase. A fresh barrier counts as being in phase 0 with phase "-1" complete, so that a
producer that starts with parity 1 passes its first waits on `empty`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from relampago.backends.gluon import schedule
from relampago.backends.gluon.versions import aggregate, tma_load, tma_store

packed_rows = gluon.jit(schedule.packed_rows)
FAR = gl.constexpr(schedule.FAR)


@aggregate
class Channel:
    """A ring: tiles [STAGES, 1, rows, 1, dim] or [STAGES, 1, 1, rows, 1, dim], and barriers [STAGES, 1]."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor  # the last columns; `tiles` itself if these hold all

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, rest=None):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.rest = tiles if rest is None else rest


@aggregate
class Rows:
    """A sequence's rows of queries or keys."""

    b: gl.tensor  # which sequence
    first: gl.tensor  # its first row in a packed tensor
    length: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, first, length):
        self.b = b
        self.first = first
        self.length = length


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Barriers of a ring that complete after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.constexpr_function
def ring(stages, block):
    """The shape of a ring of blocks."""
    return [stages, *block]


@gluon.jit
def tiles_of(desc, STAGES: gl.constexpr):
    """Room for STAGES tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, ring(STAGES, desc.block_shape), desc.layout)


@gluon.jit
def channel(desc, STAGES: gl.constexpr, READERS: gl.constexpr, rest=None):
    """A ring of tiles that a descriptor loads, or two: `rest` loads the last columns. READERS: warpgroups."""
    tiles = tiles_of(desc, STAGES)
    more = tiles
    if rest is not None:
        more = tiles_of(rest, STAGES)
    return Channel(tiles, barriers(STAGES, 1), barriers(STAGES, READERS), more)


@gluon.jit
def load(desc, at, row, head, column, bar, tile, PACKED: gl.constexpr):
    """Start the load of a box; what lies beyond the sequence reads as 0."""
    if PACKED:
        far, end, near = packed_rows(at.first, at.length, row, FAR)
        tma_load(desc, [far, end, near, head, column], bar, tile)
    else:
        tma_load(desc, [at.b, row, head, column], bar, tile)


@gluon.jit
def send(ring, desc, stage, phase, at, row, head, PACKED: gl.constexpr, rest=None):
    """Producer: wait until the tile is free, then start its load. `at` is the sequence's `Rows`."""
    mbarrier.wait(ring.empty.index(stage), phase)
    bar = ring.full.index(stage)
    if rest is None:
        mbarrier.expect(bar, desc.block_type.nbytes)
        load(desc, at, row, head, 0, bar, ring.tiles.index(stage), PACKED)
    else:
        mbarrier.expect(bar, desc.block_type.nbytes + rest.block_type.nbytes)
        load(desc, at, row, head, 0, bar, ring.tiles.index(stage), PACKED)
        load(rest, at, row, head, desc.block_shape[-1], bar, ring.rest.index(stage), PACKED)


@gluon.jit
def store(desc, tile, at, row, head, PACKED: gl.constexpr, column=0):
    """Start to store a tile from a column on; rows beyond the sequence are not written."""
    if PACKED:
        far, end, near = packed_rows(at.first, at.length, row, FAR)
        tma_store(desc, [far, end, near, head, column], tile)
    else:
        tma_store(desc, [at.b, row, head, column], tile)


@gluon.jit
def receive(ring, stage, phase, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Consumer: wait for a tile; a view of it, [ROWS, DIM]."""
    mbarrier.wait(ring.full.index(stage), phase)
    return ring.tiles.index(stage).reshape([ROWS, DIM])


@gluon.jit
def rest_of(ring, stage, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Consumer: the last columns of a tile that has been received, [ROWS, DIM]."""
    return ring.rest.index(stage).reshape([ROWS, DIM])


@gluon.jit
def release(ring, stage):
    """Consumer: the tile may be overwritten."""
    mbarrier.arrive(ring.empty.index(stage), count=1)
