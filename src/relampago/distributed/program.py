"""A rank's whole program: heads against tokens outside (Ulysses), a strategy for the context inside, sinks at the end.

ring, halo and all-gather are the inside alone; Ulysses is the outside around a context of one rank; USP (arXiv
2405.07719) is both. Everything here is a generator over `Links`, so it runs on process groups and on virtual ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relampago.distributed import allgather, exchange
from relampago.distributed.accumulate import Output, delta_of, sinks_gradient
from relampago.distributed.exchange import Scores
from relampago.distributed.heads import Exchange, Split
from relampago.distributed.layouts import Layout
from relampago.distributed.schedule import build
from relampago.distributed.sight import Sight
from relampago.distributed.transport import Links, Program
from relampago.problem import accumulate_dtype


class Course(NamedTuple):
    """What all ranks agree on: plain values."""

    layout: Layout
    context: str  # ring, halo or allgather: how the inside works
    split: Split  # how heads are dealt; to one rank without Ulysses
    chunk: int  # kv heads gathered at a time
    sight: Sight
    scores: Scores = Scores()

    @property
    def members(self) -> int:
        """How many ranks share their tokens for heads."""
        return self.split.size


class Saved(NamedTuple):
    """What a backward needs beside out: tensors as the inside saw them."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor  # (B, own heads, own tokens)


def forward(
    course: Course, links: Links, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Program:
    """Returns (out in q's dtype, lse, Saved)."""
    step = f"{name_of(course)} forward"
    dtype = q.dtype
    outer = _outer(course, links, q.device, step)
    if outer is not None:
        q, k, v = yield from outer.scatter("q, k, v", ("q", q), ("kv", k), ("kv", v))
        sinks = None if sinks is None else sinks[outer.split.queries(outer.link.rank)]
    total: Output = yield from _inner(course, links, q, k, v, step)
    out, lse = total.finish(sinks, dtype)
    saved = Saved(q, k, v, lse)
    if outer is not None:
        out = yield from outer.gather("out", "q", out)
        rows = yield from outer.gather("lse", "q", lse.transpose(1, 2)[..., None])
        lse = rows[..., 0].transpose(1, 2)
    return out, lse, saved


def backward(
    course: Course, links: Links, saved: Saved, sinks: Tensor | None, out: Tensor, dout: Tensor,
    dlse: Tensor | None,
) -> Program:  # fmt: skip
    """Returns (dq, dk, dv, dsinks), dq to dv in the inputs' dtype; dsinks is this rank's share of a sum over ranks."""
    step = f"{name_of(course)} backward"
    q, k, v, lse = saved
    delta = delta_of(out, dout, dlse, accumulate_dtype(q.dtype))
    outer = _outer(course, links, q.device, step)
    if outer is not None:
        (dout,) = yield from outer.scatter("dout", ("q", dout))
        (rows,) = yield from outer.scatter("delta", ("q", delta.transpose(1, 2)[..., None]))
        delta = rows[..., 0].transpose(1, 2).contiguous()
    dsinks = None
    if sinks is not None:
        own = slice(None) if outer is None else outer.split.queries(outer.link.rank)
        dsinks = torch.zeros_like(sinks)
        dsinks[own] = sinks_gradient(sinks[own], lse, delta)
    dq, dk, dv = yield from _inner_backward(course, links, saved, dout, delta, step)
    if outer is not None:
        dq = yield from outer.gather("dq", "q", dq.to(q.dtype))
        dkv = torch.cat([dk, dv], -1)
        dkv = dkv if outer.split.shared else dkv.to(k.dtype)  # nothing left to sum: round here
        dkv = yield from outer.gather("dk, dv", "kv", dkv)
        dk, dv = dkv[..., : k.shape[-1]], dkv[..., k.shape[-1] :]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def name_of(course: Course) -> str:
    """For messages."""
    if course.members == 1:
        return course.context
    return "ulysses" if course.layout.size == course.members else f"usp ({course.context})"


def _outer(course: Course, links: Links, device: torch.device, step: str) -> Exchange | None:
    if links.heads is None:
        return None
    return Exchange.of(course.layout, links.heads, links.context.rank, course.split, device, step)


def _inner(course: Course, links: Links, q, k, v, step: str) -> Program:
    link = links.context
    if course.context == "allgather":
        return (
            yield from allgather.forward(
                course.layout, course.members, course.sight, link, q, k, v, course.scores, course.chunk, step
            )
        )  # fmt: skip
    schedule = build(course.context, course.layout, course.members, link.rank, course.sight)
    return (yield from exchange.forward(schedule, link, q, k, v, course.scores, step))


def _inner_backward(course: Course, links: Links, saved: Saved, dout, delta, step: str) -> Program:
    link = links.context
    q, k, v, lse = saved
    if course.context == "allgather":
        return (
            yield from allgather.backward(
                course.layout, course.members, course.sight, link, q, k, v, dout, lse, delta, course.scores,
                course.chunk, step,
            )
        )  # fmt: skip
    schedule = build(course.context, course.layout, course.members, link.rank, course.sight)
    return (
        yield from exchange.backward(schedule, link, q, k, v, dout, lse, delta, course.scores, step)
    )
