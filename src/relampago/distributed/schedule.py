"""Who sends what to whom, and which pieces are computed meanwhile: a table of slots, as data.

A block (one rank's keys and values) travels a route: an ordered list of stops, each at a slot. From routes alone all
else follows: a message carries what its stop and the later ones will need; gradients of keys and values follow the
block one slot behind, summed up at each stop, and go home from the last. A ring is one route per block through all
ranks that see any of it; a halo is one route per (block, rank) straight from the owner, all in slot 1.

    ring, 4 ranks, block 0        slot 0   slot 1   slot 2   slot 3   slot 4
    keys and values               0 -> 1   1 -> 2   2 -> 3
    computed on                   rank 0   rank 1   rank 2   rank 3
    gradients                                       1 -> 2   2 -> 3   3 -> 0

The owner adds its own share at home, so gradients travel P - 1 times, not P.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from relampago.distributed.layouts import Layout
from relampago.distributed.pieces import Piece, cut, hull, reach
from relampago.distributed.sight import Sight

Kind = Literal["ring", "halo"]
Span = tuple[int, int]


class Message(NamedTuple):
    """Keys [start, stop) of a block, or their gradients, to or from a peer."""

    owner: int
    start: int
    stop: int
    peer: int


class Work(NamedTuple):
    """Pieces of this rank's queries against a block, whose gradients then cover keys `grads`."""

    owner: int
    pieces: tuple[Piece, ...]
    grads: Span


@dataclass
class Slot:
    """What a rank does at a time: messages fly while it computes, and have come when the slot ends."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    grad_sends: list[Message] = field(default_factory=list)
    grad_receives: list[Message] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """A rank's slots. Forward and backward walk the same table; the forward stops when no work is left."""

    rank: int
    slots: tuple[Slot, ...]
    counts: tuple[int, ...]  # keys in each block

    @property
    def forward_slots(self) -> tuple[Slot, ...]:
        """Up to the last work: what remains brings gradients home."""
        last = max((i for i, slot in enumerate(self.slots) if slot.work or slot.sends), default=-1)  # fmt: skip
        return self.slots[: last + 1]

    @property
    def pairs(self) -> float:
        """Visible pairs this rank computes, per head and sequence."""
        return sum(piece.pairs for slot in self.slots for w in slot.work for piece in w.pieces)

    def last_use(self, owner: int) -> int:
        """The last slot in which a block is computed on or sent."""
        return max(
            (
                i
                for i, slot in enumerate(self.slots)
                if any(w.owner == owner for w in slot.work)
                or any(m.owner == owner for m in slot.sends)
            ),
            default=0,
        )


class Stop(NamedTuple):
    """A block comes to a rank for use in a slot, which sees keys `need` of it."""

    rank: int
    slot: int
    need: Span


class Route(NamedTuple):
    """The way of a block (or a part of it) from its owner."""

    owner: int
    stops: tuple[Stop, ...]


def routes(kind: Kind, needs: list[list[Span | None]]) -> list[Route]:
    """The ways blocks go; needs[rank][owner] is what a rank sees of a block."""
    size = len(needs)
    found = []
    for owner in range(size):
        others = [(owner + step) % size for step in range(1, size)]
        stops = [
            Stop(rank, (rank - owner) % size if kind == "ring" else 1, need)
            for rank in others
            if (need := needs[rank][owner]) is not None
        ]
        found += [Route(owner, tuple(stops))] if kind == "ring" else [Route(owner, (s,)) for s in stops]  # fmt: skip
    return [route for route in found if route.stops]


@functools.lru_cache(maxsize=64)
def build(kind: Kind, layout: Layout, members: int, rank: int, sight: Sight) -> Schedule:
    """A rank's table; `members` ranks of the layout that share their heads act as one."""
    blocks = layout.joined(members)
    every = routes(kind, needs_of(layout, members, sight))
    last = max((route.stops[-1].slot + 1 for route in every), default=0)
    slots = [Slot() for _ in range(last + 1)]
    own = cut(blocks[rank], blocks[rank], sight)
    slots[0].work.append(Work(rank, own, (0, blocks[rank].numel())))
    for route in every:
        _walk(route, rank, slots, blocks, sight)
    return Schedule(rank, tuple(slots), tuple(block.numel() for block in blocks))


@functools.lru_cache(maxsize=16)
def needs_of(layout: Layout, members: int, sight: Sight) -> list[list[Span | None]]:
    """For each rank, the slice of each block that holds all it sees."""
    blocks = layout.joined(members)
    reaches = [reach(block, sight) for block in blocks]
    return [[hull(intervals, block) for block in blocks] for intervals in reaches]


def _walk(
    route: Route, rank: int, slots: list[Slot], blocks: tuple[Tensor, ...], sight: Sight
) -> None:
    """Enter what a route means for one rank."""
    owner, stops = route
    before = owner
    for i, stop in enumerate(stops):
        ahead = _union([s.need for s in stops[i:]])
        slot = slots[stop.slot - 1]
        if before == rank:
            slot.sends.append(Message(owner, *ahead, stop.rank))
        if stop.rank == rank:
            slot.receives.append(Message(owner, *ahead, before))
            done = _union([s.need for s in stops[: i + 1]])
            pieces = cut(blocks[rank], blocks[owner], sight)
            slots[stop.slot].work.append(Work(owner, pieces, done))
        before = stop.rank
    for i, stop in enumerate(stops):
        done = _union([s.need for s in stops[: i + 1]])
        home = i + 1 == len(stops)
        after, when = (owner, stop.slot + 1) if home else (stops[i + 1].rank, stops[i + 1].slot)
        if stop.rank == rank:
            slots[when].grad_sends.append(Message(owner, *done, after))
        if after == rank:
            slots[when].grad_receives.append(Message(owner, *done, stop.rank))


def _union(spans: list[Span]) -> Span:
    return min(a for a, _ in spans), max(b for _, b in spans)
