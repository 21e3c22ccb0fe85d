"""Shards of the keys: partial results and gradients, which sum up to those of a larger attention.

The bricks of ring attention and split-KV (FlashAttention, arXiv 2205.14135, section 3.1). Legend of shapes: see `api`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relampago import validate
from relampago.backends import Holding
from relampago.derivatives import run
from relampago.lower import prepare
from relampago.measure import forward_max
from relampago.merge import fold_
from relampago.op import (
    accumulate_backward_op,
    accumulate_op,
    backward_op,
    decide,
    decide_backward,
    gather,
)
from relampago.options import Options
from relampago.problem import Held, HeldOut, Saved, accumulate_dtype


def partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offset: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    top: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention to one shard of the keys, to be combined by `merge`: the brick of ring attention and split-KV.

    Args:
        q: (B, Lq, H, D).
        k: (B, Lk, G, D), one shard.
        v: (B, Lk, G, E).
        offset: position of row 0 minus position of this shard's key 0; None aligns bottom right. Masks are
            evaluated there, so that a shard sees what the whole would show it.
        into: (out, lse) that other shards gave these rows. This shard is merged into them in place, on GPUs within
            the kernel; they are what is returned. Out's and LSE's last dimensions must be contiguous.
        top: (B, H), raised in place to each head's largest logit in this shard, as `return_max_logits` of `attention`.
        options: those of `attention` (without return_lse). Give sinks to one shard only.

    Returns:
        (out, lse): out (B, Lq, H, E) in fp32 (fp64 for fp64 input), so that merging many parts costs no digits;
        LSE (B, H, Lq).

    Raises:
        InvalidInput: as `attention`.
        Unsupported: as `attention`.
    """
    call = prepare(q, k, v, Options(**options), offset=offset, shard=True)
    if into is None:
        return run(*call) if top is None else _raising(top, call)
    validate.several("into", into, ("out", "lse"))
    shapes = {"out": (*q.shape[:3], v.shape[3]), "lse": (q.shape[0], q.shape[2], q.shape[1])}
    found = {"out": into[0], "lse": into[1]}
    validate.into(found, shapes, q, k, v, call.bias, call.sinks, *call.mod_args)
    _add(into, top, call)
    return into


def _raising(top: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a validated call; `top` rises to its largest logits."""
    out, lse, found = forward_max(*call)
    torch.maximum(top, found, out=top)
    return out, lse


def _add(into: tuple[Tensor, Tensor], top: Tensor | None, call: Any) -> None:
    """Merge a validated call's result into others; no kernel does that and looks for the largest logits at once."""
    if top is None:
        accumulate_op(*into, False, *call)
    else:
        fold_(*into, *_raising(top, call))


def partial_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    offset: int | None = None,
    into: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """One shard's share of the gradients of a larger attention.

    Args:
        dout: gradient of the merged output (B, Lq, H, E).
        q: (B, Lq, H, D).
        k: (B, Lk, G, D), one shard.
        v: (B, Lk, G, E).
        out: the merged output (B, Lq, H, E).
        lse: the merged LSE (B, H, Lq).
        dlse: gradient of the merged LSE, if it was used.
        offset: as in `partial`.
        into: (dq, dk, dv), to which this shard's gradients are added in place, on GPUs within the kernels, and which
            are what is returned; dk and dv may be None together, and are then returned anew. Last dimensions must be
            contiguous.
        options: as in `partial`.

    Returns:
        (dq, dk, dv) in fp32 (fp64 for fp64 input); sum dq over shards.

    Raises:
        InvalidInput: as `attention`.
        Unsupported: as `attention`.
    """
    call = prepare(q, k, v, Options(**options), offset=offset, shard=True)
    _check_rows(dout, out, lse, dlse, q, v)
    if into is None:
        dq, dk, dv, _, _ = backward_op(
            dout, dlse, out, lse, [True, True, True, False, False], *call
        )
        return dq, dk, dv
    validate.several("into", into, ("dq", "dk", "dv"))
    dq, dk, dv = into
    alone = (dk is None) == (dv is None)
    validate.require([("into", "has one of dk and dv", "both or none", alone)])
    anew = dk is None or dv is None
    if dk is None or dv is None:
        dk, dv = new_gradients(k, v)
    found = {"dq": dq, "dk": dk, "dv": dv}
    shapes = {"dq": tuple(q.shape), "dk": tuple(k.shape), "dv": tuple(v.shape)}
    given = (k, v, dout, out, lse, dlse, call.bias, call.sinks, *call.mod_args)
    validate.into(found, shapes, q, *given)
    accumulate_backward_op(dq, dk, dv, anew, dout, out, lse, dlse, None, *call)
    return dq, dk, dv


def new_gradients(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for dK and dV, side by side as k and v travel: (B, Lk, G, D) and (B, Lk, G, E) of one tensor."""
    dim = k.shape[-1]
    both = k.new_empty((*k.shape[:3], dim + v.shape[-1]), dtype=accumulate_dtype(k.dtype))
    return both[..., :dim], both[..., dim:]


class Merged:
    """The rows of a forward by shards, merged as they come: `partial` where a backend can hold the result best.

    Args:
        q: (B, Lq, H, D), all rows.
        k: keys of some shard.
        v: its values.
        rows: which rows each shard to come will be given, in order; only if the first are all of them, and all begin
            and end where blocks do, can a backend hold them.
        top: as in `partial`, of all shards; no backend holds rows then.
        options: what is the same for all shards.

    Raises:
        InvalidInput: as `partial`.
        Unsupported: as `attention`.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[slice], *, top: Tensor | None = None, **options: Any
    ) -> None:  # fmt: skip
        self.q, self.top, self.options = q, top, options
        self._x, facts = gather(prepare(q, k, v, Options(**options), shard=True))
        self._how = problem, backend, plan = decide(self._x, facts)
        self._held: HeldOut | None = None
        self._plain: tuple[Tensor, Tensor] | None = None
        every = slice(0, q.shape[1])
        if top is None and isinstance(backend, Holding) and rows and rows[0] == every:
            held = backend.hold_out(problem, plan, self._x)
            fits = held is not None and all(_fits(r, held.unit, every.stop) for r in rows)
            self._held = held if fits else None
        self._anew = True

    def add(
        self, rows: slice, k: Tensor, v: Tensor, *, offset: int | None = None, **options: Any
    ) -> None:
        """Rows [rows.start, rows.stop) against one shard; the first time all of them, where they are held."""
        q = self.q[:, rows]
        call = prepare(q, k, v, Options(**self.options, **options), offset=offset, shard=True)
        anew, self._anew = self._anew, False
        if self._held is not None:
            accumulate_op(*self._held.part(rows.start, rows.stop), anew, *call)
        elif anew and rows == slice(0, self.q.shape[1]):
            self._plain = run(*call) if self.top is None else _raising(self.top, call)
        else:
            out, lse = self._rest()
            _add((out[:, rows], lse[:, :, rows]), self.top, call)

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out (B, Lq, H, E) in a dtype, LSE (B, H, Lq)), the sinks taken in."""
        if self._held is None:
            return with_sinks(*self._rest(), sinks, dtype)
        problem, backend, plan = self._how
        assert isinstance(backend, Holding)
        kept = dtype if sinks is None else self._held.out.dtype
        out = backend.release_out(problem, plan, self._x, self._held, kept)
        return with_sinks(out, self._held.lse[..., : self.q.shape[1]].contiguous(), sinks, dtype)

    def _rest(self) -> tuple[Tensor, Tensor]:
        """What no backend holds."""
        if self._plain is None:
            (batch, length, heads, _), dtype = self.q.shape, accumulate_dtype(self.q.dtype)
            out = self.q.new_zeros((batch, length, heads, self._x.v.shape[-1]), dtype=dtype)
            self._plain = out, out.new_full((batch, heads, length), -math.inf)
        return self._plain


def with_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out in a dtype, lse) with one more score per row, without a value. Writes to out."""
    if sinks is not None:
        whole = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
        out.mul_((lse - whole).exp().transpose(1, 2)[..., None])
        lse = whole
    return out.to(dtype), lse


def _fits(rows: slice, unit: int, length: int) -> bool:
    """Whether rows begin and end where a block does, or the last one."""
    return rows.start % unit == 0 and (rows.stop % unit == 0 or rows.stop == length)


class Rows:
    """The rows of a backward by shards: `partial_backward` without what it would do anew for each shard.

    Delta is computed once, dQ is added up where a backend can hold it best, and leaves in q's dtype.

    Args:
        dout: as in `partial_backward`, as are q, out, lse and dlse.
        q: all rows.
        k: keys of some shard.
        v: its values.
        out: the merged output; read only where delta is None.
        lse: the merged LSE.
        dlse: gradient of the merged LSE, likewise.
        delta: rowsum(dout · out) - dlse (B, H, Lq), if it is known.
        options: what is the same for all shards.

    Raises:
        InvalidInput: as `partial_backward`.
        Unsupported: as `attention`.
    """

    def __init__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        dlse: Tensor | None = None, delta: Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.dout, self.q, self.options = dout, q, options
        self.out, self.lse, self.dlse, self.delta = out, lse, dlse, delta
        _check_rows(dout, out, lse, dlse, q, v)
        self._x, facts = gather(prepare(q, k, v, Options(**options), shard=True))
        self._how = decide_backward(self._x, facts)
        self._plain: Tensor | None = None
        problem, backend, plan = self._how
        self._held: Held | None = None
        if isinstance(backend, Holding):
            saved = Saved(out, lse, delta)
            self._held = backend.hold(problem, plan, self._x, saved, dout, dlse)

    def add(
        self, rows: slice, k: Tensor, v: Tensor, *, offset: int | None = None,
        into: tuple[Tensor, Tensor] | None = None, anew: bool = False, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(dk, dv) of one shard by rows [rows.start, rows.stop), whose dQ is added up here.

        Args:
            rows: which rows, as a slice.
            k: as in `partial_backward`, as are v and offset.
            v: the shard's values.
            offset: position of the slice's first row minus that of the shard's first key.
            into: (dk, dv) to add to; None returns new ones.
            anew: write to `into`, whatever stands there.
            options: what is this shard's alone, its mask above all.
        """
        q, dout = self.q[:, rows], self.dout[:, rows]
        call = prepare(q, k, v, Options(**self.options, **options), offset=offset, shard=True)
        dk, dv = into or new_gradients(k, v)
        held = self._part(rows)
        if held is None:
            dq, lse = self._rest()[:, rows], self.lse[:, :, rows]
            delta = self._delta()[:, :, rows]
        else:
            dq, lse, delta, _ = held
        anew = anew or into is None
        accumulate_backward_op(dq, dk, dv, anew, dout, dout, lse, None, delta, *call)
        return dk, dv

    def finish(self) -> Tensor:
        """dQ of all rows, in q's dtype."""
        if self._held is None:
            return self._rest().to(self.q.dtype)
        problem, backend, plan = self._how
        assert isinstance(backend, Holding)
        if self._plain is None:
            return backend.release(problem, plan, self._x, self._held)
        return (backend.release(problem, plan, self._x, self._held) + self._plain).to(self.q.dtype)

    def _part(self, rows: slice) -> Held | None:
        """The rows as the backend holds them, unless they begin or end in the middle of what it copies whole."""
        if self._held is None:
            return None
        fits = _fits(rows, self._held.unit, self.q.shape[1])
        return self._held.part(rows.start, rows.stop) if fits else None

    def _rest(self) -> Tensor:
        """dQ of rows that no backend holds."""
        if self._plain is None:
            dtype = accumulate_dtype(self.q.dtype)
            self._plain = torch.zeros(self.q.shape, dtype=dtype, device=self.q.device)
        return self._plain

    def _delta(self) -> Tensor:
        if self.delta is None:
            self.delta = delta_of(self.out, self.dout, self.dlse, self.lse.dtype)
        return self.delta


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """rowsum(dout · out) - dlse, (B, H, L): all that a backward needs of out, once and not for each shard."""
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse).contiguous()


def _check_rows(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, q: Tensor, v: Tensor
) -> None:
    """What rows of a larger attention gave and get."""
    rows = (q.shape[0], q.shape[2], q.shape[1])
    shape, wide = (*q.shape[:3], v.shape[3]), (accumulate_dtype(q.dtype),)
    named = [("dout", dout, shape, validate.FLOATS), ("out", out, shape, validate.FLOATS)]
    named += [("lse", lse, rows, wide), ("dlse", dlse, rows, wide)]
    for name, t, form, dtypes in named:
        if t is None and name == "dlse":
            continue
        validate.require([(name, ("is a {}", type(t).__name__), "a tensor", isinstance(t, Tensor))])
        validate.require(
            [
                (name, ("is {}", t.layout), "strided", t.layout == torch.strided),
                (name, ("has shape {}", tuple(t.shape)), form, tuple(t.shape) == form),
                (name, ("has dtype {}", t.dtype), ("one of {}", dtypes), t.dtype in dtypes),
                (name, ("is on {}", t.device), ("{}, as q", q.device), t.device == q.device),
            ]
        )
