"""The strategies ring and halo: walk a schedule, computing on one block while others travel.

Blocks travel as one tensor (B, n, G, D + E), keys beside values, so that a hop is one message. Gradients of keys and
values travel in fp32: in bf16 their error grows with the ring (see docs/distributed.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relampago.api import partial, partial_backward
from relampago.distributed.accumulate import Output
from relampago.distributed.schedule import Message, Schedule
from relampago.distributed.transport import Program, Shape, Transport
from relampago.problem import accumulate_dtype


class Scores(NamedTuple):
    """How a score is made, the same on all ranks and in all pieces."""

    scale: float | None = None
    softcap: float | None = None
    deterministic: bool = False
    backend: str | None = None


class Whole(NamedTuple):
    """What a backward takes: this rank's tensors, with the whole attention's LSE and delta (B, H, L)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor

    def part(self, rows: slice, heads: slice, keys: Tensor) -> dict[str, Tensor]:
        """The arguments of `partial_backward` for some rows and heads against keys beside values.

        delta goes in as -dlse, beside an out of zeros that takes no memory: so out is read once, not at every step.
        """
        dim = self.q.shape[-1]
        return {
            "dout": self.dout[:, rows, heads],
            "q": self.q[:, rows, heads],
            "k": keys[..., :dim],
            "v": keys[..., dim:],
            "out": self.dout.new_zeros(()).expand(self.dout.shape)[:, rows, heads],
            "lse": self.lse[:, heads, rows],
            "dlse": -self.delta[:, heads, rows],
        }


EVERY = slice(None)


class Block(NamedTuple):
    """Keys from `start` on of some rank's block: (B, n, G, D + E)."""

    start: int
    kv: Tensor

    def take(self, start: int, stop: int) -> Tensor:
        """Keys [start, stop)."""
        return self.kv[:, start - self.start : stop - self.start]


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys beside values, as they travel."""
    return torch.cat([k, v], -1)


def forward(
    schedule: Schedule, link: Transport, q: Tensor, k: Tensor, v: Tensor, scores: Scores, step: str
) -> Program:
    """Returns the `Output`, before sinks."""
    dim = q.shape[-1]
    held = {schedule.rank: Block(0, pack(k, v))}
    total = Output(q, v.shape[-1])
    for number, slot in enumerate(schedule.forward_slots):
        sends = [(m.peer, held[m.owner].take(m.start, m.stop)) for m in slot.sends]
        receives = [(m.peer, _shape(held[schedule.rank].kv, m)) for m in slot.receives]
        pending = _post(link, sends, receives, q, f"{step}, step {number}")
        for work in slot.work:
            block = held[work.owner]
            for piece in work.pieces:
                keys = block.take(piece.keys.start, piece.keys.stop)
                into = total.into(piece.rows)
                part = partial(
                    q[:, piece.rows], keys[..., :dim], keys[..., dim:], into=into,
                    **piece.options(q.device), **scores._asdict(),
                )  # fmt: skip
                if into is None:
                    total.start(*part)
        if pending is not None:
            arrived = yield pending
            held.update(_blocks(slot.receives, arrived))
        _forget(schedule, held, number)
    return total


def backward(schedule: Schedule, link: Transport, x: Whole, scores: Scores, step: str) -> Program:
    """Returns (dq, dk, dv) in fp32."""
    q, dim, rank = x.q, x.q.shape[-1], schedule.rank
    wide = accumulate_dtype(q.dtype)
    held = {rank: Block(0, pack(x.k, x.v))}
    grads: dict[int, Block] = {}
    dq = torch.zeros_like(q, dtype=wide)
    for number, slot in enumerate(schedule.slots):
        sends = [(m.peer, held[m.owner].take(m.start, m.stop)) for m in slot.sends]
        sends += [(m.peer, grads.pop(m.owner).take(m.start, m.stop)) for m in slot.grad_sends]
        receives = [(m.peer, _shape(held[rank].kv, m)) for m in slot.receives]
        receives += [(m.peer, _shape(held[rank].kv, m, wide)) for m in slot.grad_receives]
        pending = _post(link, sends, receives, q, f"{step}, step {number}")
        for work in slot.work:
            block = held[work.owner]
            shape = _shape(block.kv, Message(work.owner, *work.grads, rank))
            into = Block(work.grads[0], block.kv.new_zeros(shape.shape, dtype=wide))
            grads[work.owner] = into
            for piece in work.pieces:
                rows, keys = piece.rows, block.take(piece.keys.start, piece.keys.stop)
                part = partial_backward(
                    **x.part(rows, EVERY, keys), **piece.options(q.device), **scores._asdict()
                )
                dq[:, rows] += part[0]
                target = into.take(piece.keys.start, piece.keys.stop)
                target[..., :dim] += part[1]
                target[..., dim:] += part[2]
        if pending is not None:
            arrived = yield pending
            held.update(_blocks(slot.receives, arrived[: len(slot.receives)]))
            for message, tensor in zip(
                slot.grad_receives, arrived[len(slot.receives) :], strict=True
            ):
                grads[message.owner].take(message.start, message.stop).add_(tensor)
        _forget(schedule, held, number)
    own = grads[rank].kv
    return dq, own[..., :dim], own[..., dim:]


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
