"""What a rank computes and sends for a statistic, as generators over `Links` like `program.py`: only keys travel.

Rows and columns walk as the strategy's forward and backward do. Chosen rows are few: their queries come to every rank,
whatever the strategy, and each rank answers for its own keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relampago import statistics
from relampago.distributed import allgather, exchange
from relampago.distributed.exchange import Block
from relampago.distributed.pieces import Piece, cut
from relampago.distributed.program import (
    Course,
    everyone,
    forward,
    largest,
    lowest,
    name_of,
    outer_of,
)
from relampago.distributed.schedule import Work, build
from relampago.distributed.transport import Links, Program
from relampago.problem import RowStatistics

Each = Callable[[slice, Piece, Tensor], None]


def rows(course: Course, links: Links, q: Tensor, k: Tensor, sinks: Tensor | None) -> Program:
    """Returns the `RowStatistics` of this rank's rows, with the max logits of all ranks' rows."""
    step = f"{name_of(course)} rows"
    outer = outer_of(course, links, q.device, step)
    if outer is None:
        total = yield from _inner_rows(course, links, q, k, sinks, step)
        lse, entropy = total.lse, total.entropy
    else:
        joint = yield from outer.scatter("q, k", ("q", q), ("kv", k))
        own_q, own_k = outer.parts(joint, ("q", q.shape[-1]), ("kv", k.shape[-1]))
        own = None if sinks is None else sinks[outer.split.queries(outer.link.rank)]
        total = yield from _inner_rows(course, links, own_q, own_k, own, step)
        both = torch.stack([total.lse, total.entropy], -1).transpose(1, 2)
        both = yield from outer.gather("lse, entropy", "q", both)
        lse, entropy = both.transpose(1, 2).unbind(-1)
    top = yield from largest(links, total.max_logits, step)
    return RowStatistics(lse.contiguous(), entropy.contiguous(), top)


def columns(
    course: Course, links: Links, q: Tensor, k: Tensor, sinks: Tensor | None, given: Tensor | None, last: int
) -> Program:  # fmt: skip
    """Returns (B, H, L): what each of this rank's keys receives from the sequence's last rows, given LSE or not."""
    lse: Any = given
    if given is None:  # one column of values costs less than an entropy
        _, lse, _, _ = yield from forward(course, links, q, k, k[..., :1], sinks)
    step = f"{name_of(course)} columns"
    outer = outer_of(course, links, q.device, step)
    if outer is None:
        sums = yield from _inner_columns(course, links, q, k, lse, last, step)
    else:
        joint = yield from outer.scatter("q, k", ("q", q), ("kv", k))
        own_q, own_k = outer.parts(joint, ("q", q.shape[-1]), ("kv", k.shape[-1]))
        own = yield from outer.scatter("lse", ("q", lse.transpose(1, 2)[..., None]))
        lse = own.transpose(1, 2).contiguous()
        sums = yield from _inner_columns(course, links, own_q, own_k, lse, last, step)
        sums = yield from outer.gather("sums", "q", sums)
    return sums[..., 0].transpose(1, 2).contiguous()


def chosen_weights(
    course: Course, links: Links, q: Tensor, k: Tensor, sinks: Tensor | None, at: Tensor
) -> Program:
    """Returns (B, H, R, L): the weights of the rows at some positions over this rank's keys."""
    at, order = at.unique(return_inverse=True)
    queries, lse, pieces = yield from _chosen(course, links, q, k, sinks, at)
    p = lse.new_zeros((*lse.shape, k.shape[1]))
    for piece in pieces:
        p[:, :, piece.rows, piece.keys] = statistics.weights(
            queries[:, piece.rows], k[:, piece.keys], _all(piece), lse=lse[:, :, piece.rows],
            **_options(course, piece, q),
        )  # fmt: skip
    return p[:, :, order.to(q.device)]


def chosen_keys(
    course: Course, links: Links, q: Tensor, k: Tensor, sinks: Tensor | None, at: Tensor, n: int
) -> Program:
    """Returns (weights, positions), each (B, H, R, n): the heaviest keys of all ranks', for rows as above."""
    at, order = at.unique(return_inverse=True)
    queries, lse, pieces = yield from _chosen(course, links, q, k, sinks, at)
    heaviest = lse.new_zeros((*lse.shape, n))
    keys = torch.full(heaviest.shape, -1, device=q.device)
    mine = course.layout.positions(rank_of(links)).to(q.device)
    for piece in pieces:
        weights, index = statistics.top_keys(
            queries[:, piece.rows], k[:, piece.keys], _all(piece), n, lse=lse[:, :, piece.rows],
            **_options(course, piece, q),
        )  # fmt: skip
        heaviest[:, :, piece.rows] = weights
        places = mine[piece.keys][index.clamp(min=0)]
        keys[:, :, piece.rows] = torch.where(index < 0, -1, places)
    step = "top keys of chosen rows"
    every = yield from everyone(links, heaviest, step)
    theirs = yield from everyone(links, keys, step)
    every, theirs = (torch.cat(t.unbind(0), -1) for t in (every, theirs))
    best = torch.where(theirs < 0, -1.0, every).topk(n, -1).indices  # a key of weight 0 is a key
    every, theirs = every.gather(-1, best), theirs.gather(-1, best)
    rows = order.to(q.device)
    return every[:, :, rows], theirs[:, :, rows]


def rank_of(links: Links) -> int:
    """This rank among all."""
    if links.heads is None:
        return links.context.rank
    return links.context.rank * links.heads.size + links.heads.rank


def _inner_rows(
    course: Course, links: Links, q: Tensor, k: Tensor, sinks: Tensor | None, step: str
) -> Program:
    top = lowest(q)
    lse = top.new_full((*top.shape, q.shape[1]), -math.inf)
    total = RowStatistics(lse, torch.zeros_like(lse), top)

    def each(of: slice, piece: Piece, keys: Tensor) -> None:
        part = statistics.rows(q[:, piece.rows, of], keys, **_options(course, piece, q))
        at = (slice(None), of, piece.rows)
        here = RowStatistics(total.lse[at], total.entropy[at], total.max_logits[:, of])
        for whole, found in zip(here, statistics.merge(here, part), strict=True):
            whole.copy_(found)

    yield from _visit(course, links, k, q.shape[2] // k.shape[2], each, step)
    if sinks is None:
        return total
    sink = sinks.to(lse)[None, :, None].expand(lse.shape)  # one more outcome of each row
    return statistics.merge(total, RowStatistics(sink, torch.zeros_like(lse), lowest(q)))


def _visit(course: Course, links: Links, k: Tensor, group: int, each: Each, step: str) -> Program:
    """Each piece is given its query heads and the keys it sees."""
    layout, members, sight, link = course.layout, course.members, course.sight, links.context
    if course.context == "allgather":
        none = k[..., :0]
        yield from allgather.visit(
            layout, members, sight, link, k, none, group, each, course.chunk, step
        )
    else:
        schedule = build(course.context, layout, members, link.rank, sight)
        yield from exchange.visit(
            schedule, link, k, lambda piece, keys: each(slice(None), piece, keys), step
        )


def _inner_columns(
    course: Course, links: Links, q: Tensor, k: Tensor, lse: Tensor, last: int, step: str
) -> Program:
    """Returns (B, n, H, 1) in fp32, as gradients travel."""
    layout, members, sight, link = course.layout, course.members, course.sight, links.context
    group, mine = q.shape[2] // k.shape[2], layout.joined(members)[link.rank]
    first = int(torch.searchsorted(mine, layout.length - last))  # of this rank's rows that count

    def add(into: Tensor, of: slice, piece: Piece, keys: Tensor) -> None:
        """Into (B, keys, heads, 1)."""
        counted = piece.rows.stop - max(piece.rows.start, first)
        if counted > 0:
            into += statistics.column_sums(
                q[:, piece.rows, of], keys, lse=lse[:, of, piece.rows], last=counted,
                **_options(course, piece, q),
            ).transpose(1, 2)[..., None]  # fmt: skip

    def zeros(count: int, heads: int) -> Tensor:
        return lse.new_zeros((k.shape[0], count, heads, 1))

    if course.context == "allgather":

        def share(part: slice, keys: Tensor) -> Tensor:
            of = slice(part.start * group, part.stop * group)
            found = zeros(layout.length, of.stop - of.start)
            for piece in allgather.pieces_of(layout, members, link.rank, sight):
                add(found[:, piece.keys], of, piece, keys[:, piece.keys])
            return found

        none = k[..., :0]
        return (
            yield from allgather.collect(layout, members, link, k, none, share, course.chunk, step)
        )

    def of_block(work: Work, block: Block) -> Block:
        start, stop = work.grads
        found = Block(start, zeros(stop - start, q.shape[2]))
        for piece in work.pieces:
            into, keys = (b.take(piece.keys.start, piece.keys.stop) for b in (found, block))
            add(into, slice(None), piece, keys)
        return found

    schedule = build(course.context, layout, members, link.rank, sight)
    return (yield from exchange.collect(schedule, link, k, zeros(0, q.shape[2]), of_block, step))


def _chosen(
    course: Course, links: Links, q: Tensor, k: Tensor, sinks: Tensor | None, at: Tensor
) -> Program:
    """Returns the queries at ascending positions (B, R, H, D), their LSE (B, H, R), and the pieces of own keys."""
    layout, rank = course.layout, rank_of(links)
    mine = layout.positions(rank)
    own = torch.isin(at, mine)
    rows = q.new_zeros((q.shape[0], at.numel(), *q.shape[2:]))
    rows[:, own.to(q.device)] = q[:, torch.searchsorted(mine, at[own]).to(q.device)]
    every = yield from everyone(links, rows, "queries of chosen rows")
    owner = torch.stack([torch.isin(at, layout.positions(r)) for r in range(layout.size)])
    owner = owner.int().argmax(0).to(q.device)
    queries = every[owner, :, torch.arange(at.numel(), device=q.device)].transpose(0, 1)
    pieces = cut(at, mine, course.sight)
    lse = lowest(q)[..., None].expand(-1, -1, at.numel()).clone()
    for piece in pieces:
        lse[:, :, piece.rows] = statistics.rows(
            queries[:, piece.rows], k[:, piece.keys], **_options(course, piece, q)
        ).lse
    every = yield from everyone(links, lse, "LSE of chosen rows")
    if sinks is not None:
        every = torch.cat([every, sinks.to(lse)[None, None, :, None].expand(1, *lse.shape)])
    return queries.contiguous(), every.logsumexp(0), pieces


def _all(piece: Piece) -> range:
    return range(piece.rows.stop - piece.rows.start)


def _options(course: Course, piece: Piece, q: Tensor) -> dict[str, Any]:
    """Of a statistic of one piece. Order does not matter to it, so `deterministic` is no option."""
    scale, softcap, _, backend = course.scores
    return {"scale": scale, "softcap": softcap, "backend": backend, **piece.options(q.device)}
