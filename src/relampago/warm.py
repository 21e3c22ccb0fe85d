"""Warm calls: a call like an earlier one goes straight to its backend, with gradients by an `autograd.Function`.

The ops' way (dispatch, torch.library's autograd, one string of facts) takes longer than a short kernel. It is left out
where no one could tell: plain tensors, no transform or mode that watches ops. What validation, description, choice and
plan found is kept by the shapes, strides and options of the call; on a GPU what it launched, too (`tape`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from relampago import op
from relampago.backends import Backend
from relampago.derivatives import run_backward
from relampago.plan import Plan
from relampago.problem import Arrays, Problem
from relampago.tape import MOST, Like, kind_of, like, settings

# the tensors that such a call may have; those from lens_k on when it reads a cache
NAMES = ("q", "k", "v", "sinks", "cu_q", "cu_k", "lens_k", "page_table", "k_scale", "v_scale")
Given = Sequence[Any]  # a tensor or None for each of them, or for the first six


class Known:
    """What an earlier call amounted to, but for its tensors."""

    __slots__ = (
        "arrays",
        "backend",
        "call",
        "like",
        "places",
        "plan",
        "present",
        "problem",
        "sinks",
    )

    def __init__(self, call: tuple[Any, ...], given: Given) -> None:
        x, facts = op.gather(call)
        self.problem, self.backend, self.plan = op.decide(x, facts)
        self.present = [name for name, t in zip(NAMES, given, strict=False) if t is not None]
        self.arrays = {n: getattr(x, n) for n in Arrays.__slots__ if n not in NAMES}
        self.call = [None if name in NAMES else v for name, v in zip(op.NAMES, call, strict=True)]
        self.places = [op.NAMES.index(name) for name in self.present]
        self.sinks = "sinks" in self.present  # the fourth then
        self.like = Like() if self.problem.device.kind == "cuda" else None

    problem: Problem
    backend: Backend
    plan: Plan
    like: Like | None

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Out and LSE of those tensors that the call has."""
        return self._anew(tensors) if self.like is None else self.like(tensors, self._anew)

    def _anew(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(self.present, tensors, strict=True))
        x = Arrays(**self.arrays, **given)
        out, lse = self.backend.forward(self.problem, self.plan, x)
        return out.to(x.out_dtype), lse

    def backward(self, wanted: tuple[bool, ...], given: Given) -> Sequence[Tensor | None] | None:
        """Gradients by `wanted` from dout, dlse, out, LSE and the call's own; None where these go the op's way."""
        dout, dlse = given[0], given[1]
        batched = is_legacy_batchedtensor  # autograd does so without a word in `is_grads_batched`
        if batched(dout) or (dlse is not None and batched(dlse)):
            return None
        kinds = kinds_of(given)
        if kinds is None:
            return None

        def anew(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
            dout, *rest = tensors
            dlse, out, lse, *own = (None, *rest) if absent else rest
            found = op.in_dtype(*op.gradients(dout, dlse, out, lse, wanted, self.call_of(own)))
            return tuple([t if need else None for t, need in zip(found, wanted, strict=True)])

        absent = dlse is None
        tensors = (dout, *given[2:]) if absent else given
        if self.like is None:
            return anew(tensors)
        return like((self, wanted, settings(dout), *kinds))(tensors, anew)

    def call_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What the ops take."""
        call = self.call.copy()
        for at, t in zip(self.places, tensors, strict=True):
            call[at] = t
        return call


_known: dict[Any, Known] = {}


class Attend(torch.autograd.Function):
    """The forward, with its gradient: as the op's own autograd, which takes some 200 µs of Python more."""

    @staticmethod
    def forward(ctx: Any, known: Known, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Out and LSE."""
        results = known(tensors)
        ctx.known = known
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*results, *tensors)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the tensors; where they will be differentiated or someone watches, by the op."""
        known, saved, needs = ctx.known, ctx.saved_tensors, ctx.needs_input_grad
        wanted = (*needs[1:4], False, known.sinks and needs[4])
        dout = torch.zeros_like(saved[0]) if dout is None else dout
        grads = None
        if not torch.is_grad_enabled() and unwatched():
            grads = known.backward(wanted, (dout, dlse, *saved))
        if grads is None:
            out, lse, *tensors = saved
            found = run_backward(dout, dlse, out, lse, list(wanted), *known.call_of(tensors))
            grads = [grad if need else None for grad, need in zip(found, wanted, strict=True)]
        dq, dk, dv, _, dsinks = grads
        others = (None,) * (len(needs) - 4 - known.sinks)
        return None, dq, dk, dv, *((dsinks,) if known.sinks else ()), *others


def key_of(given: Given, options: tuple[Any, ...]) -> Any:
    """What a call is known by; None if it must go the op's way.

    Args:
        given: the call's tensors, as `NAMES` has them; those that are None differ from those that are not.
            cu_seqlens on the CPU make it None, since their values are checked at each call.
        options: hashable, and all else that the result depends on.
    """
    if not unwatched() or host_reads(given[4]) or host_reads(given[5]):
        return None
    kinds = kinds_of(given)
    if kinds is None or given[0] is None:
        return None
    return (options, settings(given[0]), *kinds)


def kinds_of(given: Given) -> list[Any] | None:
    """Of each tensor what a call like it shares; None if one is more than a tensor."""
    kinds: list[Any] = []
    try:
        for t in given:
            if t is None:
                kinds.append(None)
            elif (type(t) is not Tensor and type(t) is not Parameter) or t.is_neg():
                return None
            else:
                kinds += kind_of(t)
    except RuntimeError:  # a sparse one, which has no strides
        return None
    return kinds


def host_reads(cu_seqlens: Any) -> bool:
    """Whether the host reads its values: where it is on the CPU."""
    return cu_seqlens is not None and not (isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda)


def unwatched() -> bool:
    """Whether no compiler, tracer, mode, transform, autocast or profiler is at work."""
    return not (
        is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or _is_any_autocast_enabled()
        or _profiler_enabled()
    )


def known_of(key: Any, given: Given, prepare: Callable[[], tuple[Any, ...]]) -> Known:
    """What a call with this key amounts to; `prepare` validates it where none like it has been."""
    try:
        known = _known.get(key)
    except TypeError:  # an option that has no hash, which no call may have
        prepare()
        raise
    if known is None:
        known = Known(prepare(), given)
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = known
    return known


def run(key: Any, given: Given, prepare: Callable[[], tuple[Any, ...]]) -> tuple[Tensor, Tensor]:
    """Out and LSE of the call with this key, see `known_of`."""
    known = known_of(key, given, prepare)
    tensors = [t for t in given if t is not None]
    return Attend.apply(known, *tensors) if recorded(tensors) else known(tensors)


def recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd would record what is done with these."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                return True
    return False
