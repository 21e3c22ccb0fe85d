"""The strategies ring and halo: walk a schedule, computing on one block while others travel.

Blocks travel as one tensor (B, n, G, D + E), keys beside values, so that a hop is one message. Gradients of keys and
values travel in fp32: in bf16 their error grows with the ring (see docs/distributed.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.distributed.pieces import Piece
from relampago.distributed.schedule import Message, Schedule, Span, Work
from relampago.distributed.transport import Program, Shape, Transport
from relampago.problem import accumulate_dtype
from relampago.shards import Merged, Rows


class Scores(NamedTuple):
    """How a score is made, the same on all ranks and in all pieces."""

    scale: float | None = None
    softcap: float | None = None
    deterministic: bool = False
    backend: str | None = None


class Whole(NamedTuple):
    """What a backward takes: this rank's tensors, with the whole attention's results and their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor  # not read where delta is known
    lse: Tensor
    dlse: Tensor | None  # likewise
    delta: Tensor | None  # (B, H, L)

    def rows(self, scores: Scores, k: Tensor, v: Tensor, heads: slice | None = None) -> Rows:
        """The rows of these heads, for shards whose keys and values are like k and v."""
        of = heads or slice(None)
        dlse, delta = (None if t is None else t[:, of] for t in (self.dlse, self.delta))
        return Rows(
            self.dout[:, :, of], self.q[:, :, of], k, v, self.out[:, :, of], self.lse[:, of],
            dlse=dlse, delta=delta, **scores._asdict(),
        )  # fmt: skip


class Block(NamedTuple):
    """Keys from `start` on of some rank's block: (B, n, G, D + E)."""

    start: int
    kv: Tensor

    @property
    def span(self) -> Span:
        """[start, stop)."""
        return self.start, self.start + self.kv.shape[1]

    def take(self, start: int, stop: int) -> Tensor:
        """Keys [start, stop)."""
        return self.kv[:, start - self.start : stop - self.start]

    def add(self, other: Block) -> None:
        """Add what another holds of some of these keys."""
        self.take(*other.span).add_(other.kv)


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys beside values, as they travel."""
    return torch.cat([k, v], -1)


def forward(
    schedule: Schedule, link: Transport, q: Tensor, k: Tensor, v: Tensor, scores: Scores, step: str,
    top: Tensor | None = None,
) -> Program:  # fmt: skip
    """Returns the rows' `Merged`, before sinks; `top` (B, H) rises to their largest logits."""
    dim = q.shape[-1]
    slots = schedule.forward_slots
    every = [piece.rows for slot in slots for work in slot.work for piece in work.pieces]
    total = Merged(q, k, v, every, top=top, **scores._asdict())

    def add(piece: Piece, kv: Tensor) -> None:
        total.add(piece.rows, kv[..., :dim], kv[..., dim:], **piece.options(q.device))

    yield from visit(schedule, link, pack(k, v), add, step)
    return total


def visit(
    schedule: Schedule, link: Transport, kv: Tensor, each: Callable[[Piece, Tensor], None], step: str
) -> Program:  # fmt: skip
    """Blocks like `kv` (B, n, G, W) travel, and each piece is given the keys it sees."""
    held = {schedule.rank: Block(0, kv)}
    for number, slot in enumerate(schedule.forward_slots):
        sends = [(m.peer, held[m.owner].take(m.start, m.stop)) for m in slot.sends]
        receives = [(m.peer, _shape(kv, m)) for m in slot.receives]
        pending = _post(link, sends, receives, kv, f"{step}, step {number}")
        for work in slot.work:
            block = held[work.owner]
            for piece in work.pieces:
                each(piece, block.take(piece.keys.start, piece.keys.stop))
        if pending is not None:
            arrived = yield pending
            held.update(_blocks(slot.receives, arrived))
        _forget(schedule, held, number)


def backward(schedule: Schedule, link: Transport, x: Whole, scores: Scores, step: str) -> Program:
    """Returns (dq, dk, dv): dq in q's dtype, the others in fp32."""
    rows, kv, dim = x.rows(scores, x.k, x.v), pack(x.k, x.v), x.q.shape[-1]
    like = kv.new_empty((kv.shape[0], 0, *kv.shape[2:]), dtype=accumulate_dtype(kv.dtype))

    def share(work: Work, block: Block) -> Block:
        return _share(work, block, x, rows, work.owner == schedule.rank)

    own = yield from collect(schedule, link, kv, like, share, step)
    return rows.finish(), own[..., :dim], own[..., dim:]


def collect(
    schedule: Schedule, link: Transport, kv: Tensor, like: Tensor, share: Callable[[Work, Block], Block], step: str
) -> Program:  # fmt: skip
    """Blocks travel, and what all ranks have for each block's keys follows it, summed up, and comes home.

    Args:
        schedule: this rank's.
        link: the ranks.
        kv: this rank's block (B, n, G, W).
        like: what is summed up, for no key: (B, 0, …).
        share: this rank's part for a block, over `work.grads` or what it sees of them; its own block's is whole.
        step: for messages.

    Returns:
        the sums for this rank's own keys, (B, n, …).
    """
    rank, held = schedule.rank, {schedule.rank: Block(0, kv)}
    grads: dict[int, Block] = {}  # of other ranks' keys
    own: Block | None = None
    for number, slot in enumerate(schedule.slots):
        sends = [(m.peer, held[m.owner].take(m.start, m.stop)) for m in slot.sends]
        sends += [(m.peer, grads.pop(m.owner).take(m.start, m.stop)) for m in slot.grad_sends]
        receives = [(m.peer, _shape(kv, m)) for m in slot.receives]
        receives += [(m.peer, _shape(like, m)) for m in slot.grad_receives]
        pending = _post(link, sends, receives, kv, f"{step}, step {number}")
        shares = {work.owner: share(work, held[work.owner]) for work in slot.work}
        own = shares.pop(rank, own)
        arrived: list[Tensor] = []
        if pending is not None:
            arrived = yield pending
            held.update(_blocks(slot.receives, arrived[: len(slot.receives)]))
        came = zip(slot.grad_receives, arrived[len(slot.receives) :], strict=True)
        for message, tensor in came:
            block = Block(message.start, tensor)
            if message.owner == rank:
                assert own is not None
                own.add(block)
            else:
                grads[message.owner] = block
        for work in slot.work:
            if work.owner != rank:
                grads[work.owner] = _joined(work.grads, shares[work.owner], grads.get(work.owner))
        _forget(schedule, held, number)
    assert own is not None
    return own.kv


def _share(work: Work, block: Block, x: Whole, rows: Rows, whole: bool) -> Block:
    """This rank's part of a block's gradients, of the keys it sees or more; of all in `work.grads` if `whole`."""
    dim, (start, stop) = x.q.shape[-1], work.grads
    anew = len(work.pieces) == 1 and (not whole or work.pieces[0].keys == slice(start, stop))
    if anew:  # kernels write what they would add to zeros
        start, stop = work.pieces[0].keys.start, work.pieces[0].keys.stop
    wide = accumulate_dtype(x.q.dtype)
    make = block.kv.new_empty if anew else block.kv.new_zeros
    found = Block(start, make((block.kv.shape[0], stop - start, *block.kv.shape[2:]), dtype=wide))
    for piece in work.pieces:
        keys, into = (b.take(piece.keys.start, piece.keys.stop) for b in (block, found))
        rows.add(
            piece.rows, keys[..., :dim], keys[..., dim:], into=(into[..., :dim], into[..., dim:]),
            anew=anew, **piece.options(x.q.device),
        )  # fmt: skip
    return found


def _joined(span: Span, share: Block, came: Block | None) -> Block:
    """A block's gradients over a span of its keys: what came from the ranks before, and this one's part."""
    parts = sorted([b for b in (came, share) if b is not None], key=lambda b: b.span != span)
    total, *rest = parts
    if total.span != span:
        kv, rest = share.kv, parts
        total = Block(span[0], kv.new_zeros(kv.shape[0], span[1] - span[0], *kv.shape[2:]))
    for part in rest:
        total.add(part)
    return total


def _post(link: Transport, sends, receives, like: Tensor, step: str):
    return link.exchange(sends, receives, like.device, step) if sends or receives else None


def _shape(like: Tensor, message: Message) -> Shape:
    return Shape((like.shape[0], message.stop - message.start, *like.shape[2:]), like.dtype)


def _blocks(messages: list[Message], arrived: list[Tensor]) -> dict[int, Block]:
    return {m.owner: Block(m.start, t) for m, t in zip(messages, arrived, strict=True)}


def _forget(schedule: Schedule, held: dict[int, Block], number: int) -> None:
    """Drop the blocks that no later slot needs: two at a time are in memory, beside the rank's own."""
    for owner in [o for o in held if o != schedule.rank and schedule.last_use(o) <= number]:
        del held[owner]
