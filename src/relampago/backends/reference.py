"""Dense attention, eager, as the formula reads: the specification, the oracle and "standard attention".

`dense` is the mathematics of one sequence, differentiable by autograd. It materialises the N×N matrix on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from relampago import dropout
from relampago.masks.rules import visible
from relampago.mods import TORCH_MATH, Argument, Rule, bind, rule_of, scores_of, values
from relampago.plan import Plan
from relampago.problem import (
    Arrays,
    Grads,
    Moving,
    Problem,
    RowStatistics,
    Saved,
    Tangents,
    Wanted,
    accumulate_dtype,
    empty_lse,
    refuse_backward,
)
from relampago.quant import emulation


class Reference:
    """The backend `reference`: runs anything, slowly, in O(N²) memory."""

    name = "reference"

    def why_not(self, p: Problem) -> str | None:
        if p.batch_invariant:
            return "takes products of whole matrices, whose rounding depends on their sizes"
        return refuse_backward(p)

    def plan(self, p: Problem) -> Plan:
        return Plan(block_q=1, block_k=1)  # no tiles

    def forward(self, p: Problem, plan: Plan, x: Arrays) -> tuple[Tensor, Tensor]:
        x.check_cache()
        dtype = accumulate_dtype(x.q.dtype)
        if x.max_logits is not None:
            for b in range(x.batch):
                x.max_logits[b] = Sequence(x, b, dtype).max_logits()
        return emulation.run(x, lambda lowered: attend(lowered, accumulate_dtype(lowered.q.dtype)))

    def row_statistics(self, p: Problem, plan: Plan, x: Arrays, last: int) -> RowStatistics:
        return describe_rows(x, accumulate_dtype(x.q.dtype))

    def column_sums(self, p: Problem, plan: Plan, x: Arrays, lse: Tensor, last: int) -> Tensor:
        return sum_columns(x, lse, last, accumulate_dtype(x.q.dtype))

    def backward(
        self,
        p: Problem,
        plan: Plan,
        x: Arrays,
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        dtype = accumulate_dtype(x.q.dtype)
        dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (x.q, x.k, x.v))
        dbias = None if x.bias is None else torch.zeros_like(x.bias, dtype=dtype)
        dsinks = None if x.sinks is None else torch.zeros_like(x.sinks, dtype=dtype)
        dargs = tuple(
            torch.zeros_like(t, dtype=dtype) if wish else None
            for t, wish in zip(x.mod_args, wanted.mod_args, strict=False)
        )
        for b in range(x.batch):
            rows, keys = x.rows(b), x.keys(b)
            one = Sequence(x, b, dtype)
            lse = saved.lse[b] if x.cu_q is None else saved.lse[:, rows]
            dl = None if dlse is None else dlse[b] if x.cu_q is None else dlse[:, rows]
            do = _heads_first(dout[rows]).to(dtype)
            if saved.delta is not None:
                delta = saved.delta[b].to(dtype)[..., None]
            else:
                delta = (do * _heads_first(saved.out[rows]).to(dtype)).sum(-1, keepdim=True)
                delta = delta if dl is None else delta - dl.to(dtype)[..., None]
            dq[rows], dk[keys], dv[keys] = one.differentiate(do, delta, lse, dbias, dsinks, dargs)
        return Grads(dq, dk, dv, dbias, dsinks, dargs)

    def tangent(
        self, p: Problem, plan: Plan, x: Arrays, t: Tangents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = accumulate_dtype(x.q.dtype)
        out, lse = attend(x, dtype)
        tout, tlse = torch.zeros_like(out), torch.zeros_like(lse)
        for b in range(x.batch):
            one = Sequence(x, b, dtype)
            o, l = one.tangent(one.part_of(t))
            rows = x.rows(b)
            tout[rows] = o.transpose(0, 1)
            (tlse[b] if x.cu_q is None else tlse[:, rows]).copy_(l)
        return out, lse, tout, tlse

    def backward_tangent(
        self,
        p: Problem,
        plan: Plan,
        x: Arrays,
        moving: Moving,
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        dtype = accumulate_dtype(x.q.dtype)
        dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (x.q, x.k, x.v))
        dbias = None if x.bias is None else torch.zeros_like(x.bias, dtype=dtype)
        dsinks = None if x.sinks is None else torch.zeros_like(x.sinks, dtype=dtype)
        still = (saved.out, saved.lse, dout, dlse)
        for b in range(x.batch):
            rows, keys = x.rows(b), x.keys(b)
            one = Sequence(x, b, dtype)
            dq[rows], dk[keys], dv[keys] = one.differentiate_along(
                one.part_of(moving.inputs),
                one.results_of(still),
                one.results_of((moving.out, moving.lse, moving.dout, moving.dlse)),
                dbias,
                dsinks,
            )
        return Grads(dq, dk, dv, dbias, dsinks)


def attend(x: Arrays, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every sequence by `dense`; products and softmax in `dtype`. Differentiable."""
    outs, lses = [], []
    out = x.q.new_zeros(*x.q.shape[:-1], x.v.shape[-1], dtype=dtype)
    lse = empty_lse(x)
    for b in range(x.batch):
        rows = x.rows(b)
        o, l = Sequence(x, b, dtype).attend()
        outs.append(o.transpose(0, 1))
        lses.append(l)
        if x.cu_q is not None:
            out[rows] = outs[b]
            lse[:, rows] = l
    if x.cu_q is None and outs:
        return torch.stack(outs), torch.stack(lses)
    return out, lse


def describe_rows(x: Arrays, dtype: torch.dtype) -> RowStatistics:
    """Each row's LSE and entropy, and each head's largest score, as softmax reads it; computed in `dtype`."""
    lse = empty_lse(x).to(dtype)
    found = RowStatistics(lse, torch.zeros_like(lse), lse.new_empty(x.batch, x.q.shape[-2]))
    for b in range(x.batch):
        one, rows = Sequence(x, b, dtype), x.rows(b)
        at = b if x.cu_q is None else (slice(None), rows)
        found.lse[at], found.entropy[at] = one.lse(one.scores()[-1]), one.entropy()
        found.max_logits[b] = one.max_logits()
    return found


def sum_columns(x: Arrays, lse: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """The weights that each key receives from the last rows of its sequence, (B, H, Lk) or (H, Tk)."""
    keys, heads = x.k.shape[-3], x.q.shape[-2]
    shape = (x.batch, heads, keys) if x.cu_k is None else (heads, keys)
    sums = x.q.new_zeros(shape, dtype=dtype)
    for b in range(x.batch):
        one = Sequence(x, b, dtype)
        p = one.shares(one.scores()[-1], lse[b] if x.cu_q is None else lse[:, x.rows(b)])
        at = b if x.cu_k is None else (slice(None), *x.keys(b))
        sums[at] = p[:, max(0, p.shape[1] - last) :].sum(1)
    return sums


def add_at(target: Tensor, index: tuple[Any, ...], change: Tensor) -> None:
    """Add change [H, Lq, Lk] to the entries of target that index, which broadcasts to it, names."""
    places = [
        torch.as_tensor(i, device=change.device).expand(*[1] * 3) if isinstance(i, int) else i
        for i in index
    ]
    shared = [d for d in range(3) if all(i.shape[d] == 1 for i in places)]
    change = change.sum(shared, keepdim=True) if shared else change
    target.index_put_(tuple(i.expand(change.shape) for i in places), change, accumulate=True)


def _heads_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1)


class Sequence:
    """One sequence, heads first, kv heads repeated to query heads; all of its rows, or those that are chosen."""

    def __init__(self, x: Arrays, b: int, dtype: torch.dtype, chosen: Tensor | None = None) -> None:
        rows, keys = x.rows(b), x.keys(b)
        self.x, self.b, self.band, self.dtype = x, b, x.band_of(b), dtype
        self.chosen = slice(None) if chosen is None else chosen
        self.q = _heads_first(x.q[rows][self.chosen]).to(dtype)  # [H, Lq, D]
        self.k = _heads_first(x.k[keys]).to(dtype).repeat_interleave(x.group, 0)  # [H, Lk, D]
        self.v = _heads_first(x.v[keys]).to(dtype).repeat_interleave(x.group, 0)  # [H, Lk, E]
        device = x.q.device
        self.head = torch.arange(self.q.shape[0], device=device).view(-1, 1, 1)
        self.row = torch.arange(x.lengths(b)[0], device=device)[self.chosen].view(1, -1, 1)
        self.key = torch.arange(self.k.shape[1], device=device).view(1, 1, -1)

    def attend(self) -> tuple[Tensor, Tensor]:
        scores = self.scores()[-1]
        lse = self.lse(scores)
        p = self.weights(scores, lse)
        return (p * self.kept(p)) @ self.v, lse

    def scores(self) -> list[Tensor]:
        """Scaled products, then after each mod; the last one with bias and mask: softmax reads it."""
        steps = [self.q @ self.k.transpose(-1, -2) * self.x.scale]  # [H, Lq, Lk]
        for rule, arguments in self.mods():
            place, args = self.row + self.band.offset, values(arguments)
            found = rule.fn(steps[-1], place, self.key, self.head, args, TORCH_MATH)
            steps.append(scores_of(found, steps[-1]).to(self.dtype))
        last = (
            steps[-1] if self.x.bias is None else steps[-1] + self.part(self.x.bias).to(self.dtype)
        )
        return [*steps, last.masked_fill(~self.seen(), -math.inf)]

    def mods(self) -> Iterator[tuple[Rule, list[Any]]]:
        """Each mod with its arguments."""
        rules, place = [rule_of(token) for token in self.x.mods], self.row + self.band.offset
        return bind(rules, self.x.mod_args, self.b, self.head, place, self.key, self.row)

    def part(self, t: Tensor) -> Tensor:
        """This sequence's part of something that broadcasts to (B, H, Lq, Lk)."""
        t = t[self.b if t.shape[0] > 1 else 0, ..., : self.key.shape[2]]
        return t if t.shape[1] == 1 else t[:, : self.x.lengths(self.b)[0]][:, self.chosen]

    def seen(self) -> Tensor:
        band = self.band
        seen = visible(self.row, self.key, band.offset, band.left, band.right, band.prefix)
        if band.row_start is not None and band.row_end is not None:
            b = self.b if band.row_start.shape[0] > 1 else 0
            start, end = (t[b][self.chosen][:, None] for t in (band.row_start, band.row_end))
            seen = seen & (self.key >= start) & (self.key < end)
        if self.x.mask is not None:
            seen = seen & self.part(self.x.mask)
        if self.x.blocks is not None and self.x.block is not None:
            seen = seen & self.tiles(*self.x.block)
        return seen

    def tiles(self, block_q: int, block_k: int) -> Tensor:
        """A BlockSparse as a dense mask (H or 1, Lq, Lk)."""
        blocks, row = self.x.blocks, self.row.flatten()
        assert blocks is not None
        b, i = (self.b if blocks.count.shape[0] > 1 else 0), row // block_q
        index, pattern = blocks.index[b][:, i], blocks.pattern[b][:, i]  # [H or 1, Lq, most]
        listed = torch.arange(index.shape[-1], device=row.device) < blocks.count[b][:, i, None]
        head, at, _ = listed.nonzero(as_tuple=True)
        which = pattern[listed]
        lines = blocks.tiles[which.clamp(min=0), row[at] % block_q] | (which < 0)[:, None]
        keys = blocks.q_count.shape[2]
        dense = blocks.tiles.new_zeros(index.shape[0], row.shape[0], keys, block_k)
        dense[head, at, index[listed]] = lines
        return dense.flatten(2)[..., : self.key.shape[2]]

    def lse(self, scores: Tensor) -> Tensor:
        """log Σ exp over the visible keys and the sink; -inf for a row that sees nothing."""
        if self.x.sinks is not None:
            sink = self.x.sinks.to(self.dtype).view(-1, 1, 1).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], -1)
        if scores.shape[-1] == 0:
            return scores.new_full(scores.shape[:-1], -math.inf)
        m = scores.amax(-1, keepdim=True).detach()
        m = torch.where(m == -math.inf, torch.zeros_like(m), m)
        total = (scores - m).exp().sum(-1, keepdim=True)
        nothing = total == 0
        lse = m + torch.where(nothing, torch.ones_like(total), total).log()
        return lse.masked_fill(nothing, -math.inf).squeeze(-1)

    def weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        """softmax, normalised by a sum of its own so that a huge LSE costs no digits."""
        m = scores.amax(-1, keepdim=True) if scores.shape[-1] else lse[..., None]
        if self.x.sinks is not None:
            m = torch.maximum(m, self.x.sinks.to(self.dtype).view(-1, 1, 1))
        m = torch.where(m == -math.inf, torch.zeros_like(m), m).detach()
        p = (scores - m).exp()
        total = p.sum(-1, keepdim=True)
        if self.x.precision == "fp8":
            p = emulation.rounded(p)
        if self.x.sinks is not None:
            total = total + (self.x.sinks.to(self.dtype).view(-1, 1, 1) - m).exp()
        return p / torch.where(total == 0, torch.ones_like(total), total)

    def shares(self, scores: Tensor, lse: Tensor) -> Tensor:
        """The weights that rows give to keys: of a larger attention where LSE is that one's."""
        p = (scores - lse[..., None]).exp() if self.x.shard else self.weights(scores, lse)
        return p.masked_fill(~self.seen() | (lse == -math.inf)[..., None], 0)

    def max_logits(self) -> Tensor:
        """The largest score of each head, (H,); -inf where there is none."""
        scores = self.scores()[-1].flatten(1)
        return torch.cat([scores, scores.new_full((scores.shape[0], 1), -math.inf)], 1).amax(1)

    def entropy(self) -> Tensor:
        """-Σ p log p of each row's keys, and of its sink if it has one; 0 for a row that sees nothing."""
        scores = self.scores()[-1]
        if self.x.sinks is not None:
            sink = self.x.sinks.to(self.dtype).view(-1, 1, 1).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], -1)
        nothing = (scores == -math.inf).all(-1)
        return torch.special.entr(torch.softmax(scores, -1)).sum(-1).masked_fill(nothing, 0.0)

    def kept(self, p: Tensor) -> Tensor | float:
        """The dropout factor: 0 or 1 / (1 - dropout_p)."""
        x = self.x
        if not x.dropout_p or x.seed is None:
            return 1.0
        stream = self.b * self.q.shape[0] + self.head
        keep = dropout.kept(x.seed, stream, self.row, self.key, x.dropout_p)
        return keep.to(p.dtype) / (1 - x.dropout_p)

    def differentiate(
        self,
        dout: Tensor,
        delta: Tensor,
        lse: Tensor,
        dbias: Tensor | None,
        dsinks: Tensor | None,
        dargs: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """FA2 (arXiv 2307.08691) section 2.3.2 without tiles; adds to dbias, dsinks, dargs, returns dq, dk, dv.

        delta (H, L, 1) is rowsum(dout · out) - dlse.
        """
        steps = self.scores()
        p = self.shares(steps[-1], lse)
        keep = self.kept(p)
        dv = (p * keep).transpose(-1, -2) @ dout
        ds = p * ((dout @ self.v.transpose(-1, -2)) * keep - delta)
        if dbias is not None:
            target = self.part(dbias)
            target += ds.sum_to_size(target.shape)
        if dsinks is not None and self.x.sinks is not None:
            sink = self.x.sinks.to(self.dtype).view(-1, 1)
            dsinks -= ((sink - lse).exp() * delta.squeeze(-1)).sum(-1)
        place = self.row + self.band.offset
        for step, (rule, arguments) in reversed(list(zip(steps[:-2], self.mods(), strict=True))):
            args = values(arguments)
            for argument, darg in zip(arguments, rule.dargs, strict=True):
                target = (
                    dargs[argument.number] if dargs and isinstance(argument, Argument) else None
                )
                if target is not None and darg is not None:
                    change = ds * darg(step, place, self.key, self.head, args, TORCH_MATH)
                    add_at(target, argument.index, change)
            assert rule.dfn is not None, "why_not refuses a backward without dfn"
            ds = ds * rule.dfn(step, place, self.key, self.head, args, TORCH_MATH)
        dq = ds @ self.k * self.x.scale
        dk = ds.transpose(-1, -2) @ self.q * self.x.scale
        fold = (-1, self.x.group)
        dk, dv = dk.unflatten(0, fold).sum(1), dv.unflatten(0, fold).sum(1)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def part_of(self, t: Tangents) -> Tangents:
        """This sequence's tangents, laid out as its tensors; the bias's and the sinks' as they come."""
        rows, keys = self.x.rows(self.b), self.x.keys(self.b)
        q, k, v = (
            None if whole is None else _heads_first(whole[place]).to(self.dtype)
            for whole, place in ((t.q, rows), (t.k, keys), (t.v, keys))
        )
        k, v = (None if s is None else s.repeat_interleave(self.x.group, 0) for s in (k, v))
        return Tangents(q, k, v, t.bias, t.sinks)

    def results_of(self, given: tuple[Tensor | None, ...]) -> list[Tensor]:
        """This sequence's part of (out, lse, dout, dlse), heads first, LSE's as [H, Lq, 1]; 0 for None."""
        rows, shape = self.x.rows(self.b), self.q.shape[:2]
        found = []
        for i, t in enumerate(given):
            if t is None:
                found.append(self.q.new_zeros(*shape, 1 if i % 2 else self.v.shape[-1]))
            elif i % 2:
                found.append((t[self.b] if self.x.cu_q is None else t[:, rows])[..., None])
            else:
                found.append(_heads_first(t[rows]))
        return [t.to(self.dtype) for t in found]

    def rate(self, steps: list[Tensor], t: Tangents, second: bool) -> tuple[Tensor, Any, Any]:
        """The scores' tangent, the mods' slope, and if second that slope's own tangent."""
        x, place = self.x, self.row + self.band.offset
        rate = torch.zeros_like(steps[0])
        if t.q is not None:
            rate = rate + t.q @ self.k.transpose(-1, -2) * x.scale
        if t.k is not None:
            rate = rate + self.q @ t.k.transpose(-1, -2) * x.scale
        slope, bend = 1.0, 0.0
        for step, (rule, arguments) in zip(steps[:-2], self.mods(), strict=True):
            args = values(arguments)
            assert rule.dfn is not None, "why_not refuses tangents without dfn"
            own = rule.dfn(step, place, self.key, self.head, args, TORCH_MATH)
            if second:
                assert rule.ddfn is not None, "why_not refuses second derivatives without ddfn"
                twice = rule.ddfn(step, place, self.key, self.head, args, TORCH_MATH)
                bend = bend * own + slope * twice * rate
            slope, rate = slope * own, rate * own
        if t.bias is not None:
            rate = rate + self.part(t.bias).to(self.dtype)
        return rate, slope, bend

    def lost(self, lse: Tensor) -> Tensor | None:
        """The sink's weight, [H, Lq, 1]; None without sinks."""
        if self.x.sinks is None:
            return None
        return (self.x.sinks.to(self.dtype).view(-1, 1, 1) - lse).exp()

    def tangent(self, t: Tangents) -> tuple[Tensor, Tensor]:
        """Tangents of out [H, Lq, E] and LSE [H, Lq]."""
        steps = self.scores()
        lse = self.lse(steps[-1])
        p = self.shares(steps[-1], lse)
        rate, _, _ = self.rate(steps, t, second=False)
        tlse = (p * rate).sum(-1, keepdim=True)
        if t.sinks is not None and (lost := self.lost(lse[..., None])) is not None:
            tlse = tlse + lost * t.sinks.to(self.dtype).view(-1, 1, 1)
        keep = self.kept(p)
        tout = (p * (rate - tlse) * keep) @ self.v
        if t.v is not None:
            tout = tout + (p * keep) @ t.v
        return tout, tlse.squeeze(-1)

    def differentiate_along(
        self,
        t: Tangents,
        still: list[Tensor],
        moving: list[Tensor],
        dbias: Tensor | None,
        dsinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative of `differentiate` along t (docs/derivatives.md); both lists hold out, lse, dout, dlse."""
        out, lse, dout, dlse = still
        tout, tlse, tdout, tdlse = moving
        steps = self.scores()
        p = self.shares(steps[-1], lse.squeeze(-1))
        keep = self.kept(p)
        rate, slope, bend = self.rate(steps, t, second=True)
        tp = p * (rate - tlse)
        dp, tdp = dout @ self.v.transpose(-1, -2), tdout @ self.v.transpose(-1, -2)
        if t.v is not None:
            tdp = tdp + dout @ t.v.transpose(-1, -2)
        delta = (dout * out).sum(-1, keepdim=True) - dlse
        tdelta = (tdout * out + dout * tout).sum(-1, keepdim=True) - tdlse
        gap = dp * keep - delta
        ds, tds = p * gap, tp * gap + p * (tdp * keep - tdelta)
        if dbias is not None:
            target = self.part(dbias)
            target += tds.sum_to_size(target.shape)
        if dsinks is not None and (lost := self.lost(lse)) is not None:
            own = 0.0 if t.sinks is None else t.sinks.to(self.dtype).view(-1, 1, 1)
            dsinks -= (lost * ((own - tlse) * delta + tdelta)).sum((1, 2))
        ds, tds = ds * slope, tds * slope + ds * bend
        dq, dk = tds @ self.k, tds.transpose(-1, -2) @ self.q
        if t.k is not None:
            dq = dq + ds @ t.k
        if t.q is not None:
            dk = dk + ds.transpose(-1, -2) @ t.q
        dv = (tp * keep).transpose(-1, -2) @ dout + (p * keep).transpose(-1, -2) @ tdout
        fold = (-1, self.x.group)
        dk, dv = (dk * self.x.scale).unflatten(0, fold).sum(1), dv.unflatten(0, fold).sum(1)
        return (dq * self.x.scale).transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
