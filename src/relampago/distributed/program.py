"""A rank's whole program: heads against tokens outside (Ulysses), a strategy for the context inside, sinks at the end.

ring, halo and all-gather are the inside alone; Ulysses is the outside around a context of one rank; USP (arXiv
2405.07719) is both. Everything here is a generator over `Links`, so it runs on process groups and on virtual ranks.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from relampago.distributed import allgather, exchange
from relampago.distributed.accumulate import Output, sinks_gradient
from relampago.distributed.exchange import Scores, Whole
from relampago.distributed.heads import Exchange, Split
from relampago.distributed.layouts import Layout
from relampago.distributed.schedule import build
from relampago.distributed.sight import Sight
from relampago.distributed.transport import Links, Program
from relampago.problem import accumulate_dtype
from relampago.shards import Merged, delta_of

Context = Literal["ring", "halo", "allgather"]


class Course(NamedTuple):
    """What all ranks agree on: plain values."""

    layout: Layout
    context: Context  # how the inside works
    split: Split  # how heads are dealt; to one rank without Ulysses
    chunk: int  # kv heads gathered at a time
    sight: Sight
    scores: Scores = Scores()
    max_logits: bool = False  # whether the forward looks for them

    @property
    def members(self) -> int:
        """How many ranks share their tokens for heads."""
        return self.split.size


class Saved(NamedTuple):
    """What Ulysses keeps for its backward, so that q, k and v travel once; empty tensors without Ulysses."""

    joint: Tensor  # q, k, v of all tokens, own heads, side by side: (B, tokens, width)
    lse: Tensor  # (B, own heads, tokens)


def forward(
    course: Course, links: Links, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Program:
    """Returns (out in q's dtype, lse, Saved, max logits (B, H) of all ranks' rows or None)."""
    step = f"{name_of(course)} forward"
    outer = outer_of(course, links, q.device, step)
    if outer is None:
        top = lowest(q) if course.max_logits else None
        total: Output | Merged = yield from _inner(course, links, q, k, v, step, top)
        out, lse = total.finish(sinks, q.dtype)
        if top is not None:
            top = yield from largest(links, top, step)
        return out, lse, Saved(q.new_empty(0), lse.new_empty(0)), top
    joint = yield from outer.scatter("q, k, v", ("q", q), ("kv", k), ("kv", v))
    inner_q, inner_k, inner_v = outer.parts(joint, *_widths(q, k, v))
    top = lowest(inner_q) if course.max_logits else None
    total = yield from _inner(course, links, inner_q, inner_k, inner_v, step, top)
    own = None if sinks is None else sinks[outer.split.queries(outer.link.rank)]
    out, rows = total.finish(own, q.dtype)
    out = yield from outer.gather("out", "q", out)
    lse = yield from outer.gather("lse", "q", rows.transpose(1, 2)[..., None])
    if top is not None:
        top = yield from largest(links, top, step)
    return out, lse[..., 0].transpose(1, 2).contiguous(), Saved(joint, rows), top


class Forward(NamedTuple):
    """The forward's inputs and results, as its backward takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    saved: Saved


def backward(
    course: Course, links: Links, had: Forward, dout: Tensor, dlse: Tensor | None
) -> Program:
    """Returns (dq, dk, dv, dsinks) in the inputs' dtypes; dsinks is this rank's share of a sum over ranks."""
    step = f"{name_of(course)} backward"
    q, k, v, sinks, out, lse, saved = had
    outer = outer_of(course, links, q.device, step)
    if outer is None:
        delta = None if sinks is None else delta_of(out, dout, dlse, lse.dtype)
        x = Whole(q, k, v, dout, out, lse, dlse, delta)
        dq, dk, dv = yield from _inner_backward(course, links, x, step)
        dsinks = None
        if sinks is not None and delta is not None:
            dsinks = sinks_gradient(sinks, lse, delta)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks
    delta = delta_of(out, dout, dlse, lse.dtype)
    inner_q, inner_k, inner_v = outer.parts(saved.joint, *_widths(q, k, v))
    dout = yield from outer.scatter("dout", ("q", dout))
    (dout,) = outer.parts(dout, ("q", v.shape[-1]))
    rows = yield from outer.scatter("delta", ("q", delta.transpose(1, 2)[..., None]))
    delta = rows.transpose(1, 2).contiguous()
    x = Whole(inner_q, inner_k, inner_v, dout, dout, saved.lse, None, delta)
    dq, dk, dv = yield from _inner_backward(course, links, x, step)
    dsinks = None
    if sinks is not None:
        own = outer.split.queries(outer.link.rank)
        dsinks = torch.zeros_like(sinks)
        dsinks[own] = sinks_gradient(sinks[own], saved.lse, delta)
    dq = yield from outer.gather("dq", "q", dq)
    dkv = torch.cat([dk, dv], -1)
    dkv = dkv if outer.split.shared else dkv.to(k.dtype)  # nothing left to sum: round here
    dkv = yield from outer.gather("dk, dv", "kv", dkv)
    dk, dv = dkv[..., : k.shape[-1]], dkv[..., k.shape[-1] :]
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


def _widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[str, int], ...]:
    return ("q", q.shape[-1]), ("kv", k.shape[-1]), ("kv", v.shape[-1])


def name_of(course: Course) -> str:
    """For messages."""
    if course.members == 1:
        return course.context
    return "ulysses" if course.layout.size == course.members else f"usp ({course.context})"


def outer_of(course: Course, links: Links, device: torch.device, step: str) -> Exchange | None:
    """The all-to-all around the inside; None without Ulysses."""
    if links.heads is None:
        return None
    return Exchange.of(course.layout, links.heads, links.context.rank, course.split, device, step)


def everyone(links: Links, tensor: Tensor, step: str) -> Program:
    """Returns what each rank has, (ranks, …) in their order; the same shape on all."""
    found = tensor[None]
    if links.context.size > 1:
        (found,) = yield links.context.all_gather(tensor, step)
    if links.heads is None:
        return found
    (found,) = yield links.heads.all_gather(found, step)  # [heads, context, ...]
    return found.transpose(0, 1).flatten(0, 1)


def lowest(q: Tensor) -> Tensor:
    """(B, H): less than any logit."""
    return q.new_full((q.shape[0], q.shape[2]), -math.inf, dtype=accumulate_dtype(q.dtype))


def largest(links: Links, top: Tensor, step: str) -> Program:
    """Returns the largest of all ranks (B, H), from each one's own heads; ranks that share tokens have other heads."""
    every = yield from everyone(links, top, f"{step}, max logits")
    members = 1 if links.heads is None else links.heads.size
    heads = every.unflatten(0, (-1, members)).amax(0)  # [members, B, own heads]
    return heads.transpose(0, 1).flatten(1)


def _inner(course: Course, links: Links, q, k, v, step: str, top: Tensor | None) -> Program:
    link = links.context
    if course.context == "allgather":
        return (
            yield from allgather.forward(
                course.layout, course.members, course.sight, link, q, k, v, course.scores, course.chunk, step, top
            )
        )  # fmt: skip
    schedule = build(course.context, course.layout, course.members, link.rank, course.sight)
    return (yield from exchange.forward(schedule, link, q, k, v, course.scores, step, top))


def _inner_backward(course: Course, links: Links, x: Whole, step: str) -> Program:
    link = links.context
    if course.context == "allgather":
        return (
            yield from allgather.backward(
                course.layout, course.members, course.sight, link, x, course.scores, course.chunk, step
            )
        )  # fmt: skip
    schedule = build(course.context, course.layout, course.members, link.rank, course.sight)
    return (yield from exchange.backward(schedule, link, x, course.scores, step))
