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
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

from relampago import op
from relampago.backends import Backend
from relampago.derivatives import run_backward
from relampago.plan import Plan
from relampago.problem import Arrays, Problem
from relampago.tape import MOST, Like, kind_of, settings

PLAIN = (Tensor, Parameter)
# the tensors that such a call may have; those from lens_k on when it reads a cache
NAMES = ("q", "k", "v", "sinks", "cu_q", "cu_k", "lens_k", "page_table", "k_scale", "v_scale")
Given = Sequence[Any]  # a tensor or None for each of them, or for the first six


class Known:
    """What an earlier call amounted to, but for its tensors."""

    __slots__ = ("arrays", "backend", "call", "like", "plan", "present", "problem")

    def __init__(self, call: tuple[Any, ...], given: Given) -> None:
        x, facts = op.gather(call)
        self.problem, self.backend, self.plan = op.decide(x, facts)
        self.present = [name for name, t in zip(NAMES, given, strict=False) if t is not None]
        self.arrays = {n: getattr(x, n) for n in Arrays.__slots__ if n not in NAMES}
        self.call = [None if name in NAMES else v for name, v in zip(op.NAMES, call, strict=True)]
        self.like = Like() if self.problem.device.kind == "cuda" else None

    problem: Problem
    backend: Backend
    plan: Plan
    like: Like | None

    def __call__(self, given: Given) -> tuple[Tensor, Tensor]:
        """Out and LSE."""
        tensors = [t for t in given if t is not None]
        return self._anew(tensors) if self.like is None else self.like(tensors, self._anew)

    def _anew(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(self.present, tensors, strict=True))
        x = Arrays(**self.arrays, **given)
        out, lse = self.backend.forward(self.problem, self.plan, x)
        return out.to(x.out_dtype), lse

    def call_of(self, given: Given) -> list[Any]:
        """What the ops take."""
        call = self.call.copy()
        for at, t in zip(PLACES, given, strict=False):
            call[at] = t
        return call


PLACES = [op.NAMES.index(name) for name in NAMES]
_known: dict[Any, Known] = {}


class Attend(torch.autograd.Function):
    """The forward, with its gradient: as the op's own autograd, which takes some 200 µs of Python more."""

    @staticmethod
    def forward(ctx: Any, known: Known, *given: Any) -> tuple[Tensor, Tensor]:
        """Out and LSE."""
        results = known(given)
        ctx.known = known
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*results, *given)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the tensors; where they will be differentiated or someone watches, by the op."""
        out, lse, *given = ctx.saved_tensors
        q, k, v, sinks = ctx.needs_input_grad[1:5]
        wanted = [q, k, v, False, sinks]
        dout = torch.zeros_like(out) if dout is None else dout
        args = (dout, dlse, out, lse, wanted, *ctx.known.call_of(given))
        short = (
            not torch.is_grad_enabled() and unwatched() and _plain((dout, dlse, out, lse, *given))
        )
        grads = op.backward(*args) if short else run_backward(*args)
        dq, dk, dv, _, dsinks = (
            grad if need else None for grad, need in zip(grads, wanted, strict=True)
        )
        return None, dq, dk, dv, dsinks, None, None


def key_of(given: Given, options: tuple[Any, ...]) -> Any:
    """What a call is known by; None if it must go the op's way.

    Args:
        given: the call's tensors, as `NAMES` has them; those that are None differ from those that are not.
            cu_seqlens on the CPU make it None, since their values are checked at each call.
        options: hashable, and all else that the result depends on.
    """
    if not unwatched() or host_reads(given[4]) or host_reads(given[5]):
        return None
    parts: list[Any] = [options]
    for t in given:
        if t is None:
            parts.append(None)
        elif type(t) not in PLAIN or t.is_neg():
            return None
        else:
            parts += kind_of(t)
    parts.append(settings(given[0]))
    return tuple(parts)


def host_reads(cu_seqlens: Any) -> bool:
    """Whether the host reads its values: where it is on the CPU."""
    return cu_seqlens is not None and not (isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda)


def _plain(given: Given) -> bool:
    """Whether these are tensors and nothing else; autograd batches gradients without a word in `is_grads_batched`."""
    return all(
        t is None or (type(t) in PLAIN and not t.is_neg() and not is_legacy_batchedtensor(t))
        for t in given
    )


def unwatched() -> bool:
    """Whether no compiler, tracer, mode, transform, autocast or profiler is at work."""
    c = torch._C
    return not (
        torch.compiler.is_compiling()
        or c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or c._get_tracing_state() is not None
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or c._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
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
    q, k, v, sinks, *_ = given
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        return Attend.apply(known, *given)
    return known(given)
