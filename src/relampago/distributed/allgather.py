"""The strategy all-gather: every rank gets all keys, some kv heads at a time, the next while it computes.

One exact call per row and head, no merging: any layout, any mask. Memory is two chunks of heads of the whole
sequence. Gradients go back by an all-to-all and a sum in fp32, in the order of ranks: as many bytes as a
reduce-scatter, and the same digits in each run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
    layout: Layout, members: int, sight: Sight, link: Transport, q: Tensor, k: Tensor, v: Tensor, scores: Scores,
    heads: int, step: str, top: Tensor | None = None,
) -> Program:  # fmt: skip
    """Returns the `Output`, before sinks; `heads` kv heads at a time; `top` (B, H) rises to the largest logits."""
    dim, total = q.shape[-1], Output(q, v.shape[-1])

    def put(of: slice, piece: Piece, kv: Tensor) -> None:
        out, lse = partial(
            q[:, piece.rows, of], kv[..., :dim], kv[..., dim:], top=None if top is None else top[:, of],
            **piece.options(q.device), **scores._asdict(),
        )  # fmt: skip
        total.put(piece.rows, of, out, lse)

    group = q.shape[2] // k.shape[2]
    yield from visit(layout, members, sight, link, k, v, group, put, heads, step)
    return total


def visit(
    layout: Layout, members: int, sight: Sight, link: Transport, k: Tensor, v: Tensor, group: int,
    each: Callable[[slice, Piece, Tensor], None], heads: int, step: str,
) -> Program:  # fmt: skip
    """Each piece is given its query heads, of which `group` share a kv head, and the keys and values it sees."""
    stream = Stream(layout, members, link, k, v, heads, step)
    for number, part in enumerate(stream.parts):
        kv = yield from stream.take(number)
        of = slice(part.start * group, part.stop * group)
        for piece in pieces_of(layout, members, link.rank, sight):
            each(of, piece, kv[:, piece.keys])


def backward(
    layout: Layout, members: int, sight: Sight, link: Transport, x: Whole, scores: Scores, heads: int, step: str
) -> Program:  # fmt: skip
    """Returns (dq, dk, dv): dq in q's dtype, the others in fp32.

    Keys are gathered again: saving them would cost P times the memory.
    """
    q, k, v = x.q, x.k, x.v
    dim, group, wide = q.shape[-1], q.shape[2] // k.shape[2], accumulate_dtype(q.dtype)
    pieces = pieces_of(layout, members, link.rank, sight)
    dq = torch.empty_like(q)

    def share(part: slice, kv: Tensor) -> Tensor:
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
        return into

    dkv = yield from collect(layout, members, link, k, v, share, heads, step)
    return dq, dkv[..., :dim], dkv[..., dim:]


def collect(
    layout: Layout, members: int, link: Transport, k: Tensor, v: Tensor, share: Callable[[slice, Tensor], Tensor],
    heads: int, step: str,
) -> Program:  # fmt: skip
    """What all ranks have for each key, summed up where it lies.

    Args:
        layout: of tokens.
        members: ranks that share their tokens.
        link: the ranks.
        k: this rank's keys (B, n, G, D).
        v: its values.
        share: this rank's part (B, S, h, W) for all tokens and some kv heads, given which, and their keys and values.
        heads: kv heads at a time.
        step: for messages.

    Returns:
        the sums for this rank's own keys, (B, n, Σ h, W).
    """
    where = places_of(layout, members, k.device)
    stream = Stream(layout, members, link, k, v, heads, step)
    homeward: Pending | None = None
    found: list[Tensor] = []
    for number, part in enumerate(stream.parts):
        into = share(part, (yield from stream.take(number)))
        shares = [into.index_select(1, at) for at in where]
        mine = Shape(tuple(shares[link.rank].shape), into.dtype)
        name = f"{step}, back to heads {part.start}"
        before, homeward = homeward, link.all_to_all(shares, [mine] * link.size, name)
        if before is not None:  # the heads before these had all this time to arrive
            found.append(_sum((yield before)))
    assert homeward is not None
    found.append(_sum((yield homeward)))
    return torch.cat(found, 2)


def _sum(shares: list[Tensor]) -> Tensor:
    """In the order of ranks, whatever came first."""
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total
