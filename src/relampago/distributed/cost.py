"""What a rank computes and sends, beat by beat: the plan's formulas, without tensors.

A beat is what flies together with what is computed meanwhile. The tests hold the counters of a run to these numbers,
and the performance model puts times to them.

    per rank, even blocks of KV bytes (keys and values), Q bytes (queries), W = fp32 KV bytes, P ranks
    ring, all tokens seen     forward (P-1) KV              backward (P-1) (KV + W)
    all-gather                forward (P-1) KV              backward (P-1) (KV + W)
    Ulysses                   forward (P-1)/P (2 Q + KV) and LSE    backward the same, 2 Q more for dout and dq
    halo                      only what is seen
"""

from __future__ import annotations

from typing import NamedTuple

from relampago.distributed.allgather import pieces_of
from relampago.distributed.program import Course
from relampago.distributed.schedule import Message, Slot, build


class Sizes(NamedTuple):
    """What bytes depend on beside the course."""

    batch: int
    dim: int
    dim_v: int
    itemsize: int  # of the inputs
    wide: int = 4  # of accumulators


class Beat(NamedTuple):
    """One stretch of work.

    Args:
        pairs: visible pairs computed, per query head that the rank works on.
        calls: calls posted, which fly meanwhile.
        bytes: bytes they send.
        rows: rows of partial results folded into others.
        launches: pieces.
        heads: whether the calls go to the ranks that share heads (Ulysses), not along the context.
    """

    pairs: float
    calls: int
    bytes: int
    rows: int = 0
    launches: int = 0
    heads: bool = False


def beats(course: Course, rank: int, sizes: Sizes, *, backward: bool = False) -> list[Beat]:
    """A rank's forward or backward, in order."""
    context, inner = divmod(rank, course.members)
    if course.context == "allgather":
        middle = _allgather(course, rank, sizes, backward)
    else:
        schedule = build(course.context, course.layout, course.members, context, course.sight)
        slots = schedule.slots if backward else schedule.forward_slots
        middle = [_slot(course, slot, sizes, backward) for slot in slots]
    if course.members == 1:
        return middle
    before, after = _around(course, context, inner, sizes, backward)
    return [*before, *middle, *after]


def sent(course: Course, rank: int, sizes: Sizes, *, backward: bool = False) -> tuple[int, int]:
    """(calls, bytes) of a rank's forward or backward."""
    every = beats(course, rank, sizes, backward=backward)
    return sum(b.calls for b in every), sum(b.bytes for b in every)


def local_heads(course: Course) -> tuple[int, int]:
    """Query and kv heads that the inside works on."""
    split = course.split
    return len(split.queries(0)), len(split.keys(0))


def _slot(course: Course, slot: Slot, sizes: Sizes, backward: bool) -> Beat:
    width = local_heads(course)[1] * (sizes.dim + sizes.dim_v) * sizes.batch
    count = _keys(slot.sends) * sizes.itemsize * width
    messages = [*slot.sends, *slot.receives]
    if backward:
        count += _keys(slot.grad_sends) * sizes.wide * width
        messages += [*slot.grad_sends, *slot.grad_receives]
    pieces = [piece for work in slot.work for piece in work.pieces]
    rows = sum(piece.rows.stop - piece.rows.start for piece in pieces)
    return Beat(sum(p.pairs for p in pieces), bool(messages), count, rows, len(pieces))


def _keys(messages: list[Message]) -> int:
    return sum(m.stop - m.start for m in messages)


def _allgather(course: Course, rank: int, sizes: Sizes, backward: bool) -> list[Beat]:
    layout, heads = course.layout, course.split.heads_kv
    pieces = pieces_of(layout, 1, rank, course.sight)
    longest, mine = max(layout.counts), layout.counts[rank]
    width = (sizes.dim + sizes.dim_v) * sizes.batch
    found = [Beat(0, 0, 0)]
    for first in range(0, heads, course.chunk):
        part = min(course.chunk, heads - first)
        flying, after = found.pop(), found
        gather = longest * part * width * sizes.itemsize * (layout.size - 1)
        after.append(flying._replace(calls=flying.calls + 1, bytes=flying.bytes + gather))
        home = (layout.length - mine) * part * width * sizes.wide if backward else 0
        pairs = sum(p.pairs for p in pieces) * part / heads
        after.append(Beat(pairs, int(backward), home, 0, len(pieces)))
    return found


def _around(
    course: Course, context: int, inner: int, sizes: Sizes, backward: bool
) -> tuple[list[Beat], list[Beat]]:
    """Ulysses' all-to-alls before and after the inside."""
    split, layout = course.split, course.layout
    first = context * split.size
    counts = layout.counts[first : first + split.size]
    mine, theirs = counts[inner], sum(counts) - counts[inner]
    others = split.size - 1
    queries, keys = local_heads(course)
    batch, item, wide = sizes.batch, sizes.itemsize, sizes.wide
    kv = keys * (sizes.dim + sizes.dim_v)

    def to_heads(width: int, size: int) -> Beat:
        return Beat(0, 1, others * mine * width * size * batch, heads=True)

    def to_tokens(width: int, size: int) -> Beat:
        return Beat(0, 1, theirs * width * size * batch, heads=True)

    if not backward:
        before = [to_heads(queries * sizes.dim + kv, item)]
        return before, [to_tokens(queries * sizes.dim_v, item), to_tokens(queries, wide)]
    before = [to_heads(queries * sizes.dim_v, item), to_heads(queries, wide)]
    travel = wide if split.shared else item
    return before, [to_tokens(queries * sizes.dim, item), to_tokens(kv, travel)]
