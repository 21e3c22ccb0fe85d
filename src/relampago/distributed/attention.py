"""The public call over several ranks, and the custom ops behind it.

As ops they cross torch.compile(fullgraph=True), and a selective checkpoint that keeps an op's outputs does not repeat
its communication. Tensors cross the ops' border as they are; a plan crosses as a token, what a row sees as a string.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from relampago import defaults, validate
from relampago.distributed.exchange import Scores
from relampago.distributed.plan import ContextParallelPlan, plan_of
from relampago.distributed.program import Course, Forward, Saved, backward, forward
from relampago.distributed.sight import Sight
from relampago.distributed.transport import drive
from relampago.errors import InvalidInput, Unsupported
from relampago.lower import autocast
from relampago.mods import constant
from relampago.problem import accumulate_dtype

Settled = TypeVar("Settled")
library = torch.library.Library("relampago", "FRAGMENT")
library.define(
    "context_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, str plan, str options)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "context_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse,"
    " Tensor joint, Tensor rows, str plan, str options) -> (Tensor, Tensor, Tensor, Tensor)"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: ContextParallelPlan,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any:
    """`relampago.attention` over a sequence that is spread over ranks: each gives and gets its own tokens.

    Args:
        q: this rank's queries (B, L, H, D), L = plan.local_length(), in the order of plan.positions().
        k: its keys (B, L, G, D).
        v: its values (B, L, G, E).
        plan: who holds which tokens, and how they meet.
        causal: as in `relampago.attention`, by global positions, as all masks here.
        window: likewise.
        mask: `Causal`, `Window`, `Prefix`, `Document`, joined by `&`. Tensors in it are read by the host: give
            documents to the plan where that matters, or under torch.compile.
        scale: as in `relampago.attention`.
        softcap: likewise.
        sinks: (H,), the same on all ranks. Its gradient is this rank's share: sum it over ranks, as of any parameter.
        deterministic: as in `relampago.attention`; the order of sums over ranks is fixed in any case.
        return_lse: also return LSE (B, H, L), differentiable.
        return_max_logits: also return, as the last, each head's largest scale · q·kᵀ as in `relampago.attention`,
            (B, H): of all ranks' rows, the same on all. No gradient.
        backend: of the kernels.

    Returns:
        out (B, L, H, E), or (out, lse), (out, max_logits), (out, lse, max_logits): this rank's rows.

    Raises:
        InvalidInput: shapes that are not the plan's; on the first call, on every rank if on any.
        Unsupported: dropout, bias, score mods, dense masks.
        RankFailure: another rank died or hung; the message names it and the step.
    """
    check_plan(plan)

    def said() -> str:
        validate.numbers(scale, softcap, 0.0, None)
        seen = Sight.of(
            plan.length, causal=causal, window=window, mask=mask, documents=plan.documents
        )
        numbers = (None if number is None else constant(number) for number in (scale, softcap))
        strict = defaults.deterministic(deterministic)
        return repr((tuple(seen), (*numbers, strict, backend), bool(return_max_logits)))

    options = refusing(plan, said)
    q, k, v = autocast(q, k, v)
    out, lse, _, _, top = torch.ops.relampago.context_forward(q, k, v, sinks, plan.token, options)
    more = [lse] * return_lse + [top] * return_max_logits
    return (out, *more) if more else out


def check_plan(plan: Any) -> None:
    """Refuse what is no plan of this process's."""
    if not isinstance(plan, ContextParallelPlan):
        raise InvalidInput(f"plan is a {type(plan).__name__}; expected a ContextParallelPlan")
    if plan.virtual and plan.size > 1:
        raise InvalidInput(
            f"plan has {plan.size} virtual ranks; expected a mesh of processes (see Simulation)"
        )


@functools.lru_cache(maxsize=256)
def decode_options(text: str) -> tuple[Sight, Scores, bool]:
    """What the string says."""
    sight, scores, max_logits = ast.literal_eval(text)
    return Sight(*sight), Scores(*scores), max_logits


def course_of(
    plan: ContextParallelPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Any, text: str, **options: Any
) -> Course:  # fmt: skip
    """A call's course, from what its string says."""
    sight, scores, max_logits = decode_options(text)
    course = plan.course(q, k, v, sight, scores, sinks=sinks, **options)
    return course._replace(max_logits=max_logits)


def refusing(plan: ContextParallelPlan, settle: Callable[[], Settled]) -> Settled:
    """What checks the call; the other ranks are told where it is refused."""
    try:
        return settle()
    except (InvalidInput, Unsupported) as error:
        plan.agree(refusal=str(error))
        raise


def agreed(
    plan: ContextParallelPlan, q: Tensor, k: Tensor, v: Tensor, text: str, settle: Callable[[], Settled],
    kept: bool = True,
) -> Settled:  # fmt: skip
    """What checks the call, and agreement on it with the other ranks where there is none yet, or none is kept."""
    found = refusing(plan, settle)
    plan.agree(
        f"batch {q.shape[0]}, heads {q.shape[2]}/{k.shape[2]}, dims {q.shape[3]}/{v.shape[3]}, {q.dtype}, {text}",
        kept=kept,
    )
    return found


@torch.library.impl(library, "context_forward", "CompositeExplicitAutograd")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, token: str, options: str
) -> tuple[Tensor, ...]:
    plan = plan_of(token)
    course = agreed(plan, q, k, v, options, lambda: course_of(plan, q, k, v, sinks, options))
    out, lse, saved, top = drive(forward(course, plan.links(course), q, k, v, sinks))
    return out, lse, saved.joint, saved.lse, lse.new_empty(0) if top is None else top


@torch.library.impl(library, "context_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    joint: Tensor, rows: Tensor, token: str, options: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    plan = plan_of(token)
    course = course_of(plan, q, k, v, sinks, options)
    had = Forward(q, k, v, sinks, out, lse, Saved(joint, rows))
    *grads, dsinks = drive(backward(course, plan.links(course), had, dout, dlse))
    grads = [grad.contiguous() for grad in grads]  # as the fake says, however the inputs lie
    return (*grads, q.new_empty(0) if dsinks is None else dsinks.contiguous())


@torch.library.register_fake("relampago::context_forward", lib=library)
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, token: str, options: str
) -> tuple[Tensor, ...]:
    plan = plan_of(token)
    wide = accumulate_dtype(q.dtype)
    batch, length, heads = q.shape[:3]
    with unset_fake_temporarily():  # layouts and the model read positions, and keep them
        course = course_of(plan, q, k, v, None, options, checked=False)
        blocks = course.layout.joined(course.members)
    joint, rows = (0,), (0,)
    if course.members > 1:
        split = course.split
        inner = plan.rank % split.size
        tokens = blocks[plan.rank // split.size].numel()
        own = len(split.queries(inner)) * q.shape[3]
        own += len(split.keys(inner)) * (k.shape[3] + v.shape[3])
        joint, rows = (batch, tokens, own), (batch, len(split.queries(inner)), tokens)
    return (
        q.new_empty((batch, length, heads, v.shape[3])),
        q.new_empty((batch, heads, length), dtype=wide),
        q.new_empty(joint),
        q.new_empty(rows, dtype=wide),
        q.new_empty((batch, heads) if course.max_logits else (0,), dtype=wide),
    )


@torch.library.register_fake("relampago::context_backward", lib=library)
def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    like = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, token, options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, sinks, *output[:4])
    ctx.token, ctx.options = token, options
    ctx.plan = plan_of(token)  # the plan lives as long as the graph


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    q, k, v, sinks, out, *others = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    *grads, dsinks = torch.ops.relampago.context_backward(
        dout, dlse, q, k, v, sinks, out, *others, ctx.token, ctx.options
    )
    return (*grads, None if sinks is None else dsinks, None, None)


torch.library.register_autograd(
    "relampago::context_forward", _differentiate, setup_context=_setup_context, lib=library
)
