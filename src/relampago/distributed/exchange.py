"""The strategies ring and halo: walk a schedule, computing on one block while others travel.

Blocks travel as one tensor (B, n, G, D + E), keys beside values, so that a hop is one message. Gradients of keys and
values travel in fp32: in bf16 their error grows with the ring (see docs/distributed.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    schedule: Schedule, link: Transport, q: Tensor, k: Tensor, v: Tensor, scores: Scores, step: str
) -> Program:
    """Returns the rows' `Merged`, before sinks."""
    dim = q.shape[-1]
    held = {schedule.rank: Block(0, pack(k, v))}
    slots = schedule.forward_slots
    every = [piece.rows for slot in slots for work in slot.work for piece in work.pieces]
    total = Merged(q, k, v, every, **scores._asdict())
    for number, slot in enumerate(slots):
        sends = [(m.peer, held[m.owner].take(m.start, m.stop)) for m in slot.sends]
        receives = [(m.peer, _shape(held[schedule.rank].kv, m)) for m in slot.receives]
        pending = _post(link, sends, receives, q, f"{step}, step {number}")
        for work in slot.work:
            block = held[work.owner]
            for piece in work.pieces:
                keys = block.take(piece.keys.start, piece.keys.stop)
                total.add(piece.rows, keys[..., :dim], keys[..., dim:], **piece.options(q.device))
        if pending is not None:
            arrived = yield pending
            held.update(_blocks(slot.receives, arrived))
        _forget(schedule, held, number)
    return total


def backward(schedule: Schedule, link: Transport, x: Whole, scores: Scores, step: str) -> Program:
    """Returns (dq, dk, dv): dq in q's dtype, the others in fp32."""
    q, rank = x.q, schedule.rank
    wide = accumulate_dtype(q.dtype)
    held = {rank: Block(0, pack(x.k, x.v))}
    grads: dict[int, Block] = {}  # of other ranks' keys
    rows, own, dim = x.rows(scores, x.k, x.v), None, q.shape[-1]
    for number, slot in enumerate(schedule.slots):
        sends = [(m.peer, held[m.owner].take(m.start, m.stop)) for m in slot.sends]
        sends += [(m.peer, grads.pop(m.owner).take(m.start, m.stop)) for m in slot.grad_sends]
        receives = [(m.peer, _shape(held[rank].kv, m)) for m in slot.receives]
        receives += [(m.peer, _shape(held[rank].kv, m, wide)) for m in slot.grad_receives]
        pending = _post(link, sends, receives, q, f"{step}, step {number}")
        shares = {w.owner: _share(w, held[w.owner], x, rows, w.owner == rank) for w in slot.work}
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
    return rows.finish(), own.kv[..., :dim], own.kv[..., dim:]


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


def _shape(kv: Tensor, message: Message, dtype: torch.dtype | None = None) -> Shape:
    return Shape((kv.shape[0], message.stop - message.start, *kv.shape[2:]), dtype or kv.dtype)


def _blocks(messages: list[Message], arrived: list[Tensor]) -> dict[int, Block]:
    return {m.owner: Block(m.start, t) for m, t in zip(messages, arrived, strict=True)}


def _forget(schedule: Schedule, held: dict[int, Block], number: int) -> None:
    """Drop the blocks that no later slot needs: two at a time are in memory, beside the rank's own."""
    for owner in [o for o in held if o != schedule.rank and schedule.last_use(o) <= number]:
        del held[owner]
