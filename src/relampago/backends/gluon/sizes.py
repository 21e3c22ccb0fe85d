"""How a call is cut: tiles, heads packed into them, splits over keys, masks. All of it follows from shapes alone."""

from __future__ import annotations

from typing import NamedTuple

from relampago.backends.gluon.schedule import blocks
from relampago.masks.rules import key_range
from relampago.plan import Plan

L2_BYTES = 32 << 20  # of keys and values that heads in flight share, of the 50 MiB
ROWS = 64  # of a warpgroup
SHARED = 227 * 1024  # bytes of a block of threads
WORTH = 0.9  # of the filled share of tiles: from here on packing heads gains too little
MOST_SPLITS = 64
START = 1.5  # what a tile costs besides its blocks of keys, in the time of one
COMBINE = 3.0  # what the second kernel costs, likewise


class Size(NamedTuple):
    """Lengths and counts."""

    len_q: int  # of packed sequences, all together
    len_k: int
    heads: int
    group: int  # query heads per kv head
    tiles: int  # row tiles of a head
    places: int  # sequences times heads, or times packs of heads
    section: int  # of these, those in flight together
    count: int  # tiles in all
    shift: int  # queries that the first two tiles share, so that the last one is full
    splits: int
    rows: int  # of LSE, all together
    dim_v: int
    table_stride: int  # from one sequence's row tables to the next's


class Sides(NamedTuple):
    """A `Band`'s numbers."""

    offset: int
    left: int | None
    right: int | None
    prefix: int | None


class Masks(NamedTuple):
    """Which blocks of keys need a mask: compiled into the kernel."""

    peeled: bool  # the first block visited
    looped: bool  # the others


class Result(NamedTuple):
    """Where out goes."""

    wide: bool = False  # it is fp32
    given: bool = False  # to `x.into`: no two tiles may share rows then, which both would add to
    held: bool = False  # in blocks of 64 rows, see `held`


class Kind(NamedTuple):
    """What of a call is not in its shapes."""

    sides: Sides
    packed: bool
    table_stride: int | None  # of row tables, 0 if all sequences share one; None if there are none
    multiprocessors: int
    result: Result = Result()

    @property
    def tables(self) -> bool:
        """Whether rows have runs of keys of their own."""
        return self.table_stride is not None


def pack_of(len_q: int, group: int, block_q: int) -> int:
    """How many heads of a group share a tile's rows: the largest power of two that divides it, if that fills tiles.

    FlashAttention-3 weighs the same two shares (its heuristics.h).
    """
    pack = min(group & -group, ROWS)

    def filled(rows: int) -> float:
        return rows / (-(-rows // block_q) * block_q)

    return pack if filled(len_q) < WORTH * filled(len_q * pack) else 1


def splits_for(count: int, most: int, multiprocessors: int) -> int:
    """Into how many parts to cut tiles of `most` blocks of keys, so that `count` of them fill the machine.

    Time is waves of tiles, each as long as its blocks and a start; a second kernel puts the parts together.
    """
    if 5 * count >= 4 * multiprocessors:
        return 1
    best, lowest = 1, float("inf")
    for splits in range(1, min(MOST_SPLITS, most) + 1):
        waves = -(-count * splits // multiprocessors)
        cost = waves * (-(-most // splits) + START) + (COMBINE if splits > 1 else 0.0)
        if cost < lowest:
            best, lowest = splits, cost
    return best


def size_of(
    shape_q: tuple[int, ...], shape_k: tuple[int, ...], dim_v: int, batch: int, len_q: int,
    len_k: int, kind: Kind, plan: Plan, pack: int,
) -> Size:  # fmt: skip
    """Lengths, tiles, splits, and how many heads are in flight together."""
    heads, width = shape_q[-2], shape_q[-1] + dim_v
    sides, part = kind.sides, plan.block_q // pack
    group, places = heads // shape_k[-2], batch * heads // pack
    tiles = -(-len_q // part)
    together = 1
    if kind.packed or kind.tables or sides.left is not None or sides.right is not None:
        room = plan.reach << 20 or L2_BYTES
        together = max(1, room // max(1, len_k * width * 2))
    most = most_blocks(len_q, len_k, kind, part, plan.block_k)
    splits = 1 if kind.result.held else splits_for(tiles * places, most, kind.multiprocessors)
    # under causal a tile that is not full had better be the first one, which sees few keys; not where rows that two
    # tiles share would be split at different keys
    shifted = sides.right is not None and not kind.packed and splits == 1 and not kind.result.given
    shift = tiles * part - len_q if shifted else 0
    section = min(together * max(1, group // pack), places * splits)
    rows = heads * (shape_q[0] if kind.packed else batch * len_q)
    return Size(
        shape_q[-3], shape_k[-3], heads, group, tiles, places, section, tiles * places * splits,
        shift, splits, rows, dim_v, kind.table_stride or 0,
    )  # fmt: skip


def most_blocks(len_q: int, len_k: int, kind: Kind, part: int, block_k: int) -> int:
    """Blocks of keys that the last tile visits: of packed sequences, as if the longest met the longest."""
    offset, left, right, prefix = kind.sides
    offset = len_k - len_q + offset if kind.packed else offset
    start, end = key_range(max(0, len_q - part), len_q - 1, len_k, offset, left, right, prefix)
    return blocks(start, end, block_k)[1]


def masks_of(len_q: int, len_k: int, kind: Kind, plan: Plan, pack: int, split: bool) -> Masks:
    """Which blocks need a mask. Under causal with an aligned diagonal only the first one visited does."""
    offset, left, right, prefix = kind.sides
    ends = kind.packed or len_k % plan.block_k != 0
    if right is not None and prefix is None:
        ends = ends and (offset + right > 0 if kind.packed else len_q - 1 + offset + right >= len_k)
    if kind.tables or split:  # a split without keys visits the block after the last
        return Masks(True, kind.tables or left is not None or right is not None or ends)
    if left is None and right is None:
        return Masks(ends, False)
    part = plan.block_q // pack
    # the last row of a tile is the last that sees a block
    ends_there = len_q % part == 0 and (offset + (right or 0)) % part == 0
    diagonal = ends_there and plan.block_k % part == 0
    simple = diagonal and not kind.packed and left is None and prefix is None
    return Masks(True, not simple)


def chained(plan: Plan, cut: tuple[int, int], cut_v: tuple[int, int]) -> int:
    """Tiles of queries that there is room for where tiles are to follow without a gap; 0 if they are not, or cannot.

    With one, O's two halves go through the same room, one after the other.
    """
    if not plan.chain or plan.halves:
        return 0
    width, width_v = sum(cut), sum(cut_v)
    if room(plan, width, width_v, 2) <= SHARED:
        return 2
    halves = plan.block_q * (width_v // 2) * 2
    return int(cut_v[1] == 0 and room(plan, width, width_v, 1) + halves <= SHARED)


def shares(plan: Plan, cut: tuple[int, int], cut_v: tuple[int, int]) -> bool:
    """Whether O's tile must lie where Q's was, for want of room."""
    width, width_v = sum(cut), sum(cut_v)
    queue = chained(plan, cut, cut_v)
    fits = cut_v[0] == cut[0] and cut_v[1] in (0, cut[1]) and queue != 1
    return fits and room(plan, width, width_v, max(queue, 1)) + plan.block_q * width_v * 2 > SHARED


def room(plan: Plan, width: int, width_v: int, tiles: int) -> int:
    """Bytes of shared memory for the rings and for so many tiles of queries."""
    keys_v = (plan.stages + 1) * plan.block_k // 2 if plan.halves else plan.stages * plan.block_k
    rings = plan.stages * plan.block_k * width + keys_v * width_v
    return (plan.block_q * width * tiles + rings) * 2 + 1024
