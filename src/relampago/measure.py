"""The ops that measure: the forward with each head's largest logit, row statistics, column sums.

They stand beside `relampago::forward`, whose signature and warm path do not know of them: who asks for nothing pays
nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from relampago.backends import Measuring
from relampago.derivatives import differentiate, keep
from relampago.errors import Unsupported
from relampago.op import INPUTS, NAMES, decide, gather
from relampago.problem import Arrays, Facts, RowStatistics, accumulate_dtype, empty_lse
from relampago.work import Work

library = torch.library.Library("relampago", "FRAGMENT")
library.define(f"forward_max({INPUTS}) -> (Tensor, Tensor, Tensor)")
library.define(f"row_statistics(SymInt last, {INPUTS}) -> (Tensor, Tensor, Tensor)")
library.define(f"column_sums(Tensor lse, SymInt last, {INPUTS}) -> Tensor")


def forward_max(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Out, LSE and max logits of a validated call; the first two are differentiable."""
    _refuse_transforms("return_max_logits")
    return torch.ops.relampago.forward_max(*call)


def row_statistics(last: int, *call: Any) -> RowStatistics:
    """What the last rows of each sequence are like, of a validated call; other rows may be left out."""
    _refuse_transforms("row statistics")
    with torch.no_grad():
        return RowStatistics(*torch.ops.relampago.row_statistics(last, *call))


def column_sums(lse: Tensor, last: int, *call: Any) -> Tensor:
    """What each key receives, of a validated call."""
    _refuse_transforms("column sums")
    with torch.no_grad():
        return torch.ops.relampago.column_sums(lse, last, *call)


def _refuse_transforms(name: str) -> None:
    if torch.compiler.is_compiling():
        return
    if peek_interpreter_stack() is not None:
        raise Unsupported(f"{name} inside a transform of torch.func (vmap, grad, …) is not known")
    if forward_ad._current_level >= 0:
        raise Unsupported(f"{name} under forward-mode AD is not known")


@torch.library.impl(library, "forward_max", "CompositeExplicitAutograd")
def _forward_max(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, facts = gather(args)
    with torch.inference_mode(False):  # a backend leaves that mode, and then writes to it
        top = _lowest(x)
    if (
        x.mods or x.bias is not None
    ):  # the running maximum holds them too: the products have a pass of their own
        problem, backend, plan = decide(x, facts)
        top = _describe(*_products_only(x, facts), x.len_q).max_logits
    else:
        problem, backend, plan = decide(x, facts, "max logits")
        x.max_logits = top
    out, lse = backend.forward(problem, plan, x)
    return out.to(x.out_dtype), lse, top


@torch.library.impl(library, "row_statistics", "CompositeExplicitAutograd")
def _row_statistics(last: int, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, facts = gather(args)
    found = _describe(x, facts, last)
    if x.mods or x.bias is not None:
        found = found._replace(max_logits=_describe(*_products_only(x, facts), last).max_logits)
    return found


@torch.library.impl(library, "column_sums", "CompositeExplicitAutograd")
def _column_sums(lse: Tensor, last: int, *args: Any) -> Tensor:
    x, facts = gather(args)
    problem, backend, plan = decide(x, facts, "column sums")
    return cast(Measuring, backend).column_sums(problem, plan, x, lse, last)


def _describe(x: Arrays, facts: Facts, last: int) -> RowStatistics:
    problem, backend, plan = decide(x, facts, "row statistics")
    return cast(Measuring, backend).row_statistics(problem, plan, x, last)


def _products_only(x: Arrays, facts: Facts) -> tuple[Arrays, Facts]:
    """The same call without mods and bias: its scores are the scaled products."""
    return replace(x, mods=(), mod_args=(), bias=None), facts._replace(mods=())


def _lowest(x: Arrays) -> Tensor:
    shape = (x.batch, x.q.shape[-2])
    return x.q.new_full(shape, float("-inf"), dtype=accumulate_dtype(x.q.dtype))


@torch.library.register_fake("relampago::forward_max", lib=library)
def _forward_max_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, _ = gather(args)
    out = x.q.new_empty((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.out_dtype)
    return out, empty_lse(x), _lowest(x)


@torch.library.register_fake("relampago::row_statistics", lib=library)
def _row_statistics_fake(last: int, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, _ = gather(args)
    return empty_lse(x), empty_lse(x), _lowest(x)


@torch.library.register_fake("relampago::column_sums", lib=library)
def _column_sums_fake(lse: Tensor, last: int, *args: Any) -> Tensor:
    x, _ = gather(args)
    keys = x.k.shape[-3]
    shape = (x.batch, x.q.shape[-2], keys) if x.cu_k is None else (x.q.shape[-2], keys)
    return x.q.new_empty(shape, dtype=accumulate_dtype(x.q.dtype))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    keep(ctx, inputs, output[:2])
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
    return tuple(differentiate(ctx, ctx.needs_input_grad, dout, dlse))


torch.library.register_autograd(
    "relampago::forward_max", _differentiate, setup_context=_setup, lib=library
)


@register_flop_formula(torch.ops.relampago.forward_max)
def _forward_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _work(shapes).forward_flops


@register_flop_formula([torch.ops.relampago.row_statistics, torch.ops.relampago.column_sums])
def _product_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    work = _work(shapes[-len(NAMES) :])
    return 2 * work.pairs * work.dim  # one product of the forward's two


def _work(shapes: tuple[Any, ...]) -> Work:
    q, k, v, *_, sizes, text = shapes
    return Work.of_shapes(q, k, v, tuple(sizes), Facts.decode(text))
