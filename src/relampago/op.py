"""The custom ops: what autograd, torch.compile and the FLOP counter see of relampago.

`relampago::forward`, which `accumulate` folds into other results; `backward`, which `accumulate_backward` adds to
others', with the gradients of score mods' tensors as `backward_args`; and the derivatives of both along tangents,
`tangent` and `backward_tangent`. They take tensors, the sizes that may vary under torch.compile, and one string of
static `Facts`. Description, choice and plan
happen inside, where sizes are concrete. Which op is the derivative of which stands in `derivatives.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from relampago.backends import Backend, Holding, TwiceDifferentiable
from relampago.errors import InvalidInput, Unsupported
from relampago.masks.blocks import Blocks
from relampago.masks.rules import Band
from relampago.merge import fold_
from relampago.plan import Plan
from relampago.problem import (
    Arrays,
    Device,
    Facts,
    Grads,
    Moving,
    Problem,
    Saved,
    Sums,
    Tangents,
    Wanted,
    accumulate_dtype,
    describe,
)
from relampago.quant import E4M3
from relampago.select import choose
from relampago.tape import again
from relampago.work import Work

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? cu_q, Tensor? cu_k, "
    "Tensor? lens_k, Tensor? page_table, Tensor? row_start, Tensor? row_end, Tensor? seed, Tensor? q_scale, "
    "Tensor? k_scale, Tensor? v_scale, Tensor[] blocks, "
    "Tensor[] mod_args, SymInt[] sizes, str facts"
)
_RESULTS = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"
_BACKWARD = f"{_RESULTS}, bool[] wanted, {INPUTS}"
_TANGENTS = "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tbias, Tensor? tsinks"
_TANGENT = f"{_TANGENTS}, {INPUTS}"
_MOVING = "Tensor? tdout, Tensor? tdlse, Tensor tout, Tensor tlse"
_BACKWARD_TANGENT = f"{_RESULTS}, {_MOVING}, bool[] wanted, {_TANGENTS}, {INPUTS}"
_GRADIENTS = "Tensor, Tensor, Tensor, Tensor, Tensor"
NAMES, BACKWARD_NAMES, TANGENT_NAMES, BACKWARD_TANGENT_NAMES = (
    tuple(part.split()[-1] for part in schema.split(", "))
    for schema in (INPUTS, _BACKWARD, _TANGENT, _BACKWARD_TANGENT)
)
library = torch.library.Library("relampago", "DEF")
library.define(f"forward({INPUTS}) -> (Tensor, Tensor)")
# anew: what stands in `whole` counts for nothing
library.define(f"accumulate(Tensor(a!) whole, Tensor(b!) whole_lse, bool anew, {INPUTS}) -> ()")
library.define(f"backward({_BACKWARD}) -> ({_GRADIENTS})")
# anew: what stands in dk and dv counts for nothing; delta: out and dlse are not read
library.define(
    f"accumulate_backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, bool anew, Tensor dout, Tensor out, "
    f"Tensor lse, Tensor? dlse, Tensor? delta, {INPUTS}) -> ()"
)
# the same with gradients of mod_args: `wanted` goes on with an entry for each
library.define(f"backward_args({_BACKWARD}) -> ({_GRADIENTS}, Tensor[])")
library.define(f"tangent({_TANGENT}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(f"backward_tangent({_BACKWARD_TANGENT}) -> ({_GRADIENTS})")
forward_op = torch.ops.relampago.forward.default
accumulate_op = torch.ops.relampago.accumulate.default
backward_op = torch.ops.relampago.backward.default
accumulate_backward_op = torch.ops.relampago.accumulate_backward.default
backward_args_op = torch.ops.relampago.backward_args.default
tangent_op = torch.ops.relampago.tangent.default
backward_tangent_op = torch.ops.relampago.backward_tangent.default


def gather(args: Sequence[Any]) -> tuple[Arrays, Facts]:
    """The op's flat arguments as `Arrays` and `Facts`; sizes = (offset, longest q, longest k)."""
    (q, k, v, bias, sinks, mask, cu_q, cu_k, lens_k, page_table, row_start, row_end, seed, q_scale, k_scale, v_scale,
     blocks, mod_args, sizes, text) = args  # fmt: skip
    facts = Facts.decode(text)
    x = Arrays(
        q=q,
        k=k,
        v=v,
        scale=q.shape[-1] ** -0.5 if facts.scale is None else facts.scale,
        band=Band(sizes[0], facts.left, facts.right, facts.prefix, row_start, row_end),
        len_q=sizes[1],
        len_k=sizes[2],
        cu_q=cu_q,
        cu_k=cu_k,
        lens_k=lens_k,
        page_table=page_table,
        bias=bias,
        mask=mask,
        sinks=sinks,
        seed=seed,
        blocks=Blocks(*blocks) if blocks else None,
        block=facts.block,
        mods=facts.mods,
        mod_args=tuple(mod_args),
        dropout_p=facts.dropout_p,
        shard=facts.shard,
        dtype=None if facts.dtype is None else getattr(torch, facts.dtype),
        precision=facts.precision,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return x, facts


def problem_of(
    call: tuple[Any, ...], device: Device | None = None, wanted: Wanted | None = None
) -> Problem:
    """The problem that the op's arguments amount to: the backward one if gradients are wanted."""
    x, facts = gather(call)
    return describe(x, facts, wanted=wanted, device=device)


def arrays_of(call: tuple[Any, ...]) -> Arrays:
    """The op's arguments as a backend gets them."""
    return gather(call)[0]


@functools.lru_cache(maxsize=4096)
def _decide(p: Problem, backend: str | None, plan: tuple[tuple[str, int], ...]):
    chosen = choose(p, backend)
    return chosen, Plan(**dict(plan)) if plan else chosen.plan(p)


def decide(
    x: Arrays, facts: Facts, statistic: str = "", moving: bool = False
) -> tuple[Problem, Backend, Plan]:
    """What a forward, a statistic or a tangent asks of which backend, and its plan."""
    _check_cu_seqlens(x)
    problem = describe(x, facts, statistic=statistic, moving=moving)
    return problem, *_decide(problem, facts.backend, facts.plan)


def decide_backward(x: Arrays, facts: Facts) -> tuple[Problem, Backend, Plan]:
    """Which backend takes the gradients of q, k and v, and its plan."""
    problem = describe(x, facts, wanted=Wanted())
    return problem, *_decide(problem, facts.backend, facts.plan)


@torch.library.impl(library, "forward", "CompositeExplicitAutograd")
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """What `relampago::forward` does, below dispatch and autograd."""
    return again("forward", args, _forward)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x, facts = gather(args)
    problem, backend, plan = decide(x, facts)
    out, lse = backend.forward(problem, plan, x)
    return out.to(x.out_dtype), lse


@torch.library.impl(library, "accumulate", "CompositeExplicitAutograd")
def accumulate(*args: Any) -> None:
    """What `relampago::accumulate` does."""
    again("accumulate", args, _accumulate)


def _accumulate(whole: Tensor, whole_lse: Tensor, anew: bool, *args: Any) -> tuple[()]:
    x, facts = gather(args)
    x.into, x.anew = (whole, whole_lse), anew
    problem, backend, plan = decide(x, facts)
    _refuse_held(whole, x, backend)
    out, lse = backend.forward(problem, plan, x)
    if out is whole:
        return ()
    if anew:
        whole.copy_(out)
        whole_lse.copy_(lse)
    else:
        fold_(whole, whole_lse, out, lse)
    return ()


def _refuse_held(t: Tensor, x: Arrays, backend: Backend) -> None:
    """Rows that one backend holds are no other's."""
    if t.dim() != x.q.dim() and not isinstance(backend, Holding):
        raise Unsupported(f"rows which another backend than {backend.name} holds")


@torch.library.impl(library, "backward", "CompositeExplicitAutograd")
def backward(*args: Any) -> tuple[Tensor, ...]:
    """What `relampago::backward` does."""
    return again("backward", args, _backward)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    *grads, _ = _backward_args(dout, dlse, out, lse, wanted, *args)
    return tuple(grads)


@torch.library.impl(library, "backward_args", "CompositeExplicitAutograd")
def _backward_args(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *args: Any
) -> tuple[Any, ...]:
    x, grads = gradients(dout, dlse, out, lse, wanted, args)
    return (
        *_returned(x, grads),
        [
            _absent(x.q) if grad is None else grad.to(source.dtype).contiguous()
            for grad, source in zip(grads.mod_args, x.mod_args, strict=False)
        ],
    )


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    call: Sequence[Any],
) -> tuple[Arrays, Grads]:
    """The arrays of a call, and their gradients as its backend gives them; `in_dtype` is what is left to do."""
    x, facts = gather(call)
    if facts.precision is not None and x.q.dtype != E4M3:
        x, facts = replace(x, precision=None), facts._replace(precision=None, plan=())
        if (
            not facts.shard
        ):  # straight through: out and LSE of what is differentiated, not of its FP8 likeness
            problem, backend, plan = decide(x, facts)
            out, lse = backend.forward(problem, plan, x)
            out = out.to(x.out_dtype)
    q, k, v, bias, sinks, *mod_args = wanted
    wish = Wanted(q, k, v, bias, sinks, tuple(mod_args))
    problem = describe(x, facts, wanted=wish)
    backend, plan = _decide(problem, facts.backend, facts.plan)
    grads = backend.backward(problem, plan, x, Saved(out, lse), dout, dlse, wish)
    return x, grads


@torch.library.impl(library, "accumulate_backward", "CompositeExplicitAutograd")
def accumulate_backward(*args: Any) -> None:
    """What `relampago::accumulate_backward` does."""
    again("accumulate_backward", args, _accumulate_backward)


def _accumulate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, anew: bool, dout: Tensor, out: Tensor, lse: Tensor,
    dlse: Tensor | None, delta: Tensor | None, *args: Any,
) -> tuple[()]:  # fmt: skip
    x, facts = gather(args)
    x.sums = Sums(dq, dk, dv, anew)
    problem, backend, plan = decide_backward(x, facts)
    _refuse_held(dq, x, backend)
    grads = backend.backward(problem, plan, x, Saved(out, lse, delta), dout, dlse, Wanted())
    for total, grad, written in ((dq, grads.q, False), (dk, grads.k, anew), (dv, grads.v, anew)):
        assert grad is not None
        if grad is not total:
            total.copy_(grad) if written else total.add_(grad)
    return ()


@torch.library.impl(library, "tangent", "CompositeExplicitAutograd")
def _tangent(*args: Any) -> tuple[Tensor, ...]:
    x, facts = gather(args[5:])
    problem, backend, plan = decide(x, facts, moving=True)
    out, lse, tout, tlse = cast(TwiceDifferentiable, backend).tangent(
        problem, plan, x, Tangents(*args[:5])
    )
    return out.to(x.out_dtype), lse, tout.to(x.out_dtype), tlse


@torch.library.impl(library, "backward_tangent", "CompositeExplicitAutograd")
def _backward_tangent(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tdout: Tensor | None,
    tdlse: Tensor | None,
    tout: Tensor,
    tlse: Tensor,
    wanted: list[bool],
    *args: Any,
) -> tuple[Tensor, ...]:
    x, facts = gather(args[5:])
    if x.shard:
        raise Unsupported(
            "second derivatives of one shard of a larger attention (`partial`, `partial_backward`)"
        )
    q, k, v, bias, sinks = wanted
    wish = Wanted(q, k, v, bias, sinks)
    problem = describe(x, facts, wanted=wish, moving=True)
    backend, plan = _decide(problem, facts.backend, facts.plan)
    moving = Moving(Tangents(*args[:5]), tout, tlse, tdout, tdlse)
    grads = cast(TwiceDifferentiable, backend).backward_tangent(
        problem, plan, x, moving, Saved(out, lse), dout, dlse, wish
    )
    return _returned(x, grads)


def _returned(x: Arrays, grads: Grads) -> tuple[Tensor, ...]:
    """Gradients of the inputs as an op returns them: contiguous, as its fake says, however the inputs lie."""
    return tuple(_absent(x.q) if grad is None else grad.contiguous() for grad in in_dtype(x, grads))


def in_dtype(x: Arrays, grads: Grads) -> list[Tensor | None]:
    """Gradients of the inputs in the dtype that they are held in."""
    inputs = (x.q, x.k, x.v, x.bias, x.sinks)
    return [
        None if source is None or grad is None else grad.to(x.dtype or source.dtype)
        for grad, source in zip(grads[:5], inputs, strict=True)
    ]


def _absent(like: Tensor) -> Tensor:
    """Stands for a gradient that does not exist: an op always returns tensors."""
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _check_cu_seqlens(x: Arrays) -> None:
    """Values can be read without waiting for a device only on the CPU; GPU kernels clamp to the tensors instead."""
    for name, cu, total in (("q", x.cu_q, x.q.shape[0]), ("k", x.cu_k, x.k.shape[0])):
        if cu is None or cu.device.type != "cpu":
            continue
        lengths = cu.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        most = x.len_q if name == "q" else x.len_k
        if int(cu[0]) != 0:
            problem = (f"starts at {int(cu[0])}", "0")
        elif lengths.numel() and int(lengths.min()) < 0:
            problem = (f"decreases: {cu.tolist()[:16]}", "a non-decreasing sequence")
        elif int(cu[-1]) > total:
            problem = (f"ends at {int(cu[-1])}", f"at most the {total} rows of {name}")
        elif longest > most:
            raise InvalidInput(
                f"max_seqlen_{name} is {most}; expected at least {longest}, the longest in cu_seqlens_{name}"
            )
        else:
            continue
        raise InvalidInput(f"cu_seqlens_{name} {problem[0]}; expected {problem[1]}")


@torch.library.register_fake("relampago::forward", lib=library)
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, _ = gather(args)
    out = x.q.new_empty((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.out_dtype)
    if x.cu_q is None:
        shape = (x.q.shape[0], x.q.shape[2], x.q.shape[1])
    else:
        shape = (x.q.shape[1], x.q.shape[0])
    return out, x.q.new_empty(shape, dtype=accumulate_dtype(x.q.dtype))


@torch.library.register_fake("relampago::tangent", lib=library)
def _tangent_fake(*args: Any) -> tuple[Tensor, ...]:
    return (*_forward_fake(*args[5:]), *_forward_fake(*args[5:]))


@torch.library.register_fake("relampago::backward_tangent", lib=library)
def _backward_tangent_fake(*args: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(args[8], args[14:])


@torch.library.register_fake("relampago::backward", lib=library)
def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(args[4], args[5:])


def _gradients_fake(wanted: list[bool], call: tuple[Any, ...]) -> tuple[Tensor, ...]:
    x, _ = gather(call)
    present = (True, True, True, x.bias is not None and wanted[3], x.sinks is not None)
    inputs = (x.q, x.k, x.v, x.bias, x.sinks)
    return tuple(
        source.new_empty(source.shape, dtype=x.dtype or source.dtype)
        if source is not None and there
        else _absent(x.q)
        for there, source in zip(present, inputs, strict=True)
    )


@torch.library.register_fake("relampago::accumulate", lib=library)
def _accumulate_fake(*args: Any) -> None:
    return None


@torch.library.register_fake("relampago::accumulate_backward", lib=library)
def _accumulate_backward_fake(*args: Any) -> None:
    return None


@torch.library.register_fake("relampago::backward_args", lib=library)
def _backward_args_fake(*args: Any) -> tuple[Any, ...]:
    wanted, call = args[4], args[5:]
    x, _ = gather(call)
    return (
        *_gradients_fake(wanted, call),
        [
            source.new_empty(source.shape) if there else _absent(x.q)
            for there, source in zip(wanted[5:], x.mod_args, strict=True)
        ],
    )


@register_flop_formula(torch.ops.relampago.forward)
def _forward_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return Work.of_shapes(*_sizes(shapes)).forward_flops


@register_flop_formula(torch.ops.relampago.accumulate)
def _accumulate_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return Work.of_shapes(*_sizes(shapes[3:])).forward_flops


@register_flop_formula(torch.ops.relampago.accumulate_backward)
def _accumulate_backward_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return Work.of_shapes(*_sizes(shapes[9:])).backward_flops


@register_flop_formula(torch.ops.relampago.tangent)
def _tangent_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    given = [shape is not None for shape in shapes[:3]]
    return Work.of_shapes(*_sizes(shapes[5:])).tangent_flops(*given)


@register_flop_formula(torch.ops.relampago.backward_tangent)
def _backward_tangent_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    given = [shape is not None for shape in (*shapes[9:12], shapes[4])]
    return Work.of_shapes(*_sizes(shapes[14:])).backward_tangent_flops(*given)


@register_flop_formula([torch.ops.relampago.backward, torch.ops.relampago.backward_args])
def _backward_flops(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return Work.of_shapes(*_sizes(shapes[5:])).backward_flops


def _sizes(shapes: tuple[Any, ...]):
    q, k, v, *_, sizes, text = shapes
    return q, k, v, tuple(sizes), Facts.decode(text)
