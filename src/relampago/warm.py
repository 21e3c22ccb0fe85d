"""Warm calls: where nothing but the result is wanted, a call like an earlier one goes straight to its backend.

The op's way (dispatch, autograd, one string of facts) takes longer than a short kernel. It is left out where no one
could tell: plain tensors, no gradient, no transform or mode that watches ops. What validation, description, choice and
plan found is kept by the shapes, strides and options of the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

from relampago.backends import Backend
from relampago.op import decide, gather
from relampago.plan import Plan
from relampago.problem import Arrays, Problem

MOST = 4096  # calls that are kept
PLAIN = (Tensor, Parameter)


class Known(NamedTuple):
    """What an earlier call amounted to."""

    backend: Backend
    problem: Problem
    plan: Plan
    fields: dict[str, Any]  # of `Arrays`, but for the tensors


_known: dict[Any, Known] = {}


def key_of(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Any:
    """What a call is known by; None if it must go the op's way.

    Args:
        tensors: all that the call has; those that are None differ from those that are not.
        options: hashable, and all else that the result depends on.
    """
    if not _unwatched():
        return None
    parts: list[Any] = [options]
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is None:
            parts.append(None)
            continue
        if type(t) not in PLAIN or (grad and t.requires_grad) or t.is_neg():
            return None
        parts += (t.shape, t.stride(), t.dtype, t.device)
    return tuple(parts)


def _unwatched() -> bool:
    """Whether no tracer, mode, transform, autocast or profiler is at work."""
    c = torch._C
    return not (
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or c._get_tracing_state() is not None
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or c._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    )


def again(key: Any, tensors: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The result of a call whose like has been; None if there was none."""
    found = _known.get(key)
    return None if found is None else _run(found, Arrays(**found.fields, **tensors))


def first(key: Any, call: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
    """The result of a validated call, which is remembered."""
    x, facts = gather(call)
    problem, backend, plan = decide(x, facts)
    fields = {name: getattr(x, name) for name in Arrays.__slots__ if name not in tensors}
    if len(_known) >= MOST:
        _known.clear()
    known = _known[key] = Known(backend, problem, plan, fields)
    return _run(known, x)


def _run(known: Known, x: Arrays) -> tuple[Tensor, Tensor]:
    out, lse = known.backend.forward(known.problem, known.plan, x)
    return out.to(x.out_dtype), lse
