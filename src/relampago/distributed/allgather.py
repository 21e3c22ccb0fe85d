"""The strategy all-gather: every rank gets all keys, some kv heads at a time, the next while it computes.

One exact call per row and head, no merging: any layout, any mask. Memory is two chunks of heads of the whole
sequence. Gradients go back by an all-to-all and a sum in fp32, in the order of ranks: as many bytes as a
reduce-scatter, and the same digits in each run.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from relampago.distributed.accumulate import Output
from relampago.distributed.exchange import Scores, Whole, pack
from relampago.distributed.layouts import Layout
from relampago.distributed.pieces import Piece, cut
from relampago.distributed.sight import Sight
from relampago.distributed.transport import Pending, Program, Shape, Transport
from relampago.problem import accumulate_dtype
from relampago.shards import partial


@functools.lru_cache(maxsize=64)
def pieces_of(layout: Layout, members: int, rank: int, sight: Sight) -> tuple[Piece, ...]:
    """A rank's rows against the whole sequence in order."""
    return cut(layout.joined(members)[rank], torch.arange(layout.length), sight)


@functools.lru_cache(maxsize=64)
def order_of(layout: Layout, members: int, device: torch.device) -> Tensor:
    """Where each position lies in the padded blocks of all ranks, one after another."""
    blocks = layout.joined(members)
    longest = max(block.numel() for block in blocks)
    order = torch.empty(layout.length, dtype=torch.int64)
    for rank, block in enumerate(blocks):
        order[block] = rank * longest + torch.arange(block.numel())
    return order.to(device)


@functools.lru_cache(maxsize=64)
def places_of(layout: Layout, members: int, device: torch.device) -> list[Tensor]:
    """The positions of each rank's tokens, kept on the device."""
    return [block.to(device) for block in layout.joined(members)]


class Stream:
    """The whole sequence's keys and values, some kv heads at a time; the next are under way while these are used."""

    def __init__(
        self,
        layout: Layout,
        members: int,
        link: Transport,
        k: Tensor,
        v: Tensor,
        heads: int,
        step: str,
    ) -> None:
        self.link, self.k, self.v, self.step = link, k, v, step
        self.longest = max(block.numel() for block in layout.joined(members))
        self.order = order_of(layout, members, k.device)
        self.parts = [slice(h, min(h + heads, k.shape[2])) for h in range(0, k.shape[2], heads)]
        self.coming = self._post(0)

    def take(self, number: int) -> Program:
        """Returns the number-th heads (B, S, heads, D + E), in the order of positions."""
        (arrived,) = yield self.coming
        if number + 1 < len(self.parts):
            self.coming = self._post(number + 1)
        return arrived.flatten(0, 1).index_select(0, self.order).transpose(0, 1)

    def _post(self, number: int) -> Pending:
        part = self.parts[number]
        kv = pack(self.k[:, :, part], self.v[:, :, part])
        padded = torch.nn.functional.pad(kv, (0, 0, 0, 0, 0, self.longest - kv.shape[1]))
        return self.link.all_gather(padded.transpose(0, 1), f"{self.step}, heads {part.start}")


def forward(
    layout: Layout,
    members: int,
    sight: Sight,
    link: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    heads: int,
    step: str,
) -> Program:
    """Returns the `Output`, before sinks; `heads` kv heads at a time."""
    dim, group = q.shape[-1], q.shape[2] // k.shape[2]
    pieces = pieces_of(layout, members, link.rank, sight)
    total = Output(q, v.shape[-1])
    stream = Stream(layout, members, link, k, v, heads, step)
    for number, part in enumerate(stream.parts):
        kv = yield from stream.take(number)
        of = slice(part.start * group, part.stop * group)
        for piece in pieces:
            keys = kv[:, piece.keys]
            out, lse = partial(
                q[:, piece.rows, of], keys[..., :dim], keys[..., dim:],
                **piece.options(q.device), **scores._asdict(),
            )  # fmt: skip
            total.put(piece.rows, of, out, lse)
    return total


def backward(
    layout: Layout,
    members: int,
    sight: Sight,
    link: Transport,
    x: Whole,
    scores: Scores,
    heads: int,
    step: str,
) -> Program:
    """Returns (dq, dk, dv): dq in q's dtype, the others in fp32.

    Keys are gathered again: saving them would cost P times the memory.
    """
    q, k, v = x.q, x.k, x.v
    dim, group, wide = q.shape[-1], q.shape[2] // k.shape[2], accumulate_dtype(q.dtype)
    pieces = pieces_of(layout, members, link.rank, sight)
    where = places_of(layout, members, q.device)
    dq = torch.empty_like(q)
    dkv = q.new_empty((*k.shape[:3], dim + v.shape[-1]), dtype=wide)
    stream = Stream(layout, members, link, k, v, heads, step)
    homeward: list[tuple[slice, Pending]] = []
    for number, part in enumerate(stream.parts):
        kv = yield from stream.take(number)
        into = torch.zeros_like(kv, dtype=wide)
        of = slice(part.start * group, part.stop * group)
        rows = x.rows(scores, kv[..., :dim], kv[..., dim:], of)
        for piece in pieces:
            keys, target = kv[:, piece.keys], into[:, piece.keys]
            rows.add(
                piece.rows, keys[..., :dim], keys[..., dim:],
                into=(target[..., :dim], target[..., dim:]), **piece.options(q.device),
            )  # fmt: skip
        dq[:, :, of] = rows.finish()
        shares = [into.index_select(1, at) for at in where]
        mine = Shape(tuple(shares[link.rank].shape), wide)
        name = f"{step}, gradients of heads {part.start}"
        homeward.append((part, link.all_to_all(shares, [mine] * link.size, name)))
        if number:  # the heads before these had all this time to arrive
            before, pending = homeward.pop(0)
            dkv[:, :, before] = _sum((yield pending))
    for before, pending in homeward:
        dkv[:, :, before] = _sum((yield pending))
    return dq, dkv[..., :dim], dkv[..., dim:]


def _sum(shares: list[Tensor]) -> Tensor:
    """In the order of ranks, whatever came first."""
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total
