"""Which op is the derivative of which, for autograd, forward-mode AD and torch.func (docs/derivatives.md).

    op                gradient (vjp)                          tangent (jvp)
    forward           backward                                tangent
    backward          tangent, backward_tangent               backward_tangent
    tangent           backward_tangent, backward              refused
    backward_tangent  refused                                 refused
    backward_args     refused                                 refused

Each rule calls ops by the `run` functions below, so that it can be differentiated and transformed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad

from relampago import transforms
from relampago.errors import Unsupported
from relampago.op import (
    NAMES,
    backward_args_op,
    backward_op,
    backward_tangent_op,
    forward_op,
    library,
    tangent_op,
)

MOVERS = 5  # q, k, v, bias and sinks: the inputs that have derivatives, first in every call
MOD_ARGS = NAMES.index("mod_args") - len(NAMES)  # from the end, as in every op
Given = tuple[Any, ...]


def run(*call: Any) -> tuple[Tensor, Tensor]:
    """The forward op; where a transform of torch.func or forward-mode AD is at work, in a form that they can take."""
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            raise Unsupported("forward-mode AD of attention under torch.compile; take it eagerly")
        if not _transformed():
            return forward_op(*call)
        _refuse_tables(call)
        return _in_graph(call)
    top = peek_interpreter_stack()
    if top is None and forward_ad._current_level < 0:
        return forward_op(*call)
    _refuse_tables(call)
    if top is not None and top.key() != TransformType.Jvp:
        return Forward.apply(None, *call)
    moving = _tangents(call)
    if all(t is None for t in moving):
        return Forward.apply(None, *call)
    if top is None:
        with torch.no_grad():
            known = tangent_op(*moving, *map(_still, call))
        return Forward.apply(known, *call)
    out, lse, tout, tlse = run_tangent(*moving, *map(_still, call))
    return forward_ad.make_dual(out, tout), forward_ad.make_dual(lse, tlse)


def _in_graph(call: Given) -> tuple[Tensor, Tensor]:
    """The forward op inside a transform that Dynamo traces: a node which the transform sees as it would eagerly."""
    return Forward.apply(None, *call)


def _transformed() -> bool:
    """Whether Dynamo is inside a transform of torch.func; then it is told to take `_in_graph` as it is."""
    if peek_interpreter_stack() is None:
        return False
    torch.compiler.allow_in_graph(_in_graph)
    return True


_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `mods._token`


def _tangents(call: Given) -> tuple[Tensor | None, ...]:
    """The tangents that the inputs carry at the present level of forward-mode AD."""
    *tensors, _, mod_args, _, _ = call
    rest = [t for t in (*tensors[MOVERS:], *mod_args) if isinstance(t, Tensor)]
    if any(forward_ad.unpack_dual(t).tangent is not None for t in rest if t.is_floating_point()):
        raise Unsupported(
            "forward-mode AD along a score mod's tensors, ALiBi's slopes or FP8 scales"
        )
    return tuple(None if t is None else forward_ad.unpack_dual(t).tangent for t in call[:MOVERS])


def _still(value: Any) -> Any:
    """An argument without its tangent: what kernels take."""
    return forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) else value


def _watched() -> bool:
    """Whether torch.func or forward-mode AD is at work: then an op goes by its `torch.autograd.Function`."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _refuse_tables(args: Given) -> None:
    """Score mods' tensors go in a list, whose gradients a `torch.autograd.Function` does not see."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in args[MOD_ARGS]):
        raise _tables_watched()


def _tables_watched() -> Unsupported:
    return Unsupported(
        "gradients of score mod arguments inside a transform of torch.func or under forward-mode AD are not known"
    )


def _unwatched(op: Any, args: Given) -> Any:
    """A backward op; one that nobody differentiates skips autograd's part, some 30 µs of Python."""
    if torch.is_grad_enabled():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _by_function(function: Any, args: Given) -> Any:
    _refuse_tables(args)
    return function.apply(None, *args)


def run_backward(*args: Any) -> tuple[Tensor, ...]:
    """The backward op, as `run`."""
    return _by_function(Backward, args) if _watched() else _unwatched(backward_op, args)


def run_backward_args(*args: Any) -> tuple[Any, ...]:
    """The backward op with gradients of score mods' tensors."""
    if _watched():
        raise _tables_watched()
    return _unwatched(backward_args_op, args)


def run_tangent(*args: Any) -> tuple[Tensor, ...]:
    """The forward's tangent, as `run`."""
    return _by_function(Tangent, args) if _watched() else tangent_op(*args)


def run_backward_tangent(*args: Any) -> tuple[Tensor, ...]:
    """The backward's tangent, as `run`."""
    if _watched():
        return _by_function(BackwardTangent, args)
    return backward_tangent_op(*args)


def keep(ctx: Any, args: Given, results: Sequence[Tensor]) -> list[Tensor]:
    """Save an op's arguments and results for the rules; tensors may stand in lists."""
    tensors: list[Tensor] = [*results]
    form: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            form.append(len(tensors))
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and all(isinstance(t, Tensor) for t in value):
            form.append(slice(len(tensors), len(tensors) + len(value)))
            tensors += value
        else:
            form.append((value,))
    ctx.set_materialize_grads(False)
    ctx.form, ctx.results = form, len(results)
    ctx.save_for_backward(*tensors)
    return tensors


def kept(ctx: Any) -> tuple[Given, tuple[Tensor, ...]]:
    """The arguments and results that `keep` saved."""
    tensors = ctx.saved_tensors
    args = tuple(
        place[0] if isinstance(place, tuple)
        else list(tensors[place]) if isinstance(place, slice) else tensors[place]
        for place in ctx.form
    )  # fmt: skip
    return args, tuple(tensors[: ctx.results])


def _gradients(ctx: Any, needs: Sequence[bool], found: dict[int, Any]) -> list[Any]:
    """Gradients of all arguments; lists of tensors get a list, as torch.library wants it."""
    return [
        found.get(i, [None] * (place.stop - place.start)) if isinstance(place, slice)
        else found.get(i) if needs[i] else None
        for i, place in enumerate(ctx.form)
    ]  # fmt: skip


def _like(t: Tensor | None, source: Tensor | None) -> Tensor | None:
    """A gradient as a tangent: of its source's dtype."""
    return None if t is None or source is None else t.to(source.dtype)


def differentiate(
    ctx: Any, needs: Sequence[bool], dout: Tensor | None, dlse: Tensor | None
) -> list[Any]:
    """Gradients of the forward's arguments, from those of out and LSE."""
    call, (out, lse) = kept(ctx)
    dout = torch.zeros_like(out) if dout is None else dout
    given, wanted = (dout, dlse, out, lse), list(needs[:MOVERS])
    tables = _tables(needs)
    if not any(tables):
        return _gradients(ctx, needs, dict(enumerate(run_backward(*given, wanted, *call))))
    *grads, dargs = run_backward_args(*given, [*wanted, *tables], *call)
    found: dict[int, Any] = dict(enumerate(grads))
    found[NAMES.index("mod_args")] = [
        t if need else None for t, need in zip(dargs, tables, strict=True)
    ]
    return _gradients(ctx, needs, found)


def _tables(needs: Sequence[Any]) -> Sequence[bool]:
    """Which of the score mods' tensors need a gradient; a `torch.autograd.Function` has a plain False."""
    return needs[MOD_ARGS] or ()


def _refuse_second(needs: Sequence[Any]) -> None:
    if any(_tables(needs)):
        refuse_tables()


def differentiate_backward(ctx: Any, needs: Sequence[bool], *u: Tensor | None) -> list[Any]:
    """Gradients of the backward's arguments, from those (u) of its gradients: double backward.

    The backward is the gradient of φ = ⟨dout, out⟩ + ⟨dlse, LSE⟩. By dout and dlse its derivative along u is the
    tangent of out and LSE along u; by the inputs the Hessian of φ times u, which is the backward's tangent along u.
    """
    _refuse_second(needs)
    (dout, dlse, out, lse, _, *call), _ = kept(ctx)
    along = [_like(t, source) for t, source in zip(u, call[:MOVERS], strict=True)]
    if all(t is None for t in along):
        return _gradients(ctx, needs, {})
    _, _, tout, tlse = run_tangent(*along, *call)
    found: dict[int, Any] = {0: tout.to(dout.dtype), 1: tlse}
    movers = list(needs[5 : 5 + MOVERS])
    if any(movers):
        grads = run_backward_tangent(
            dout, dlse, out, lse, None, None, tout, tlse, movers, *along, *call
        )
        found.update(enumerate(grads, 5))
    return _gradients(ctx, needs, found)


def differentiate_tangent(
    ctx: Any,
    needs: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    dtout: Tensor | None,
    dtlse: Tensor | None,
) -> list[Any]:
    """Gradients of the tangent's arguments, from those of its four results: reverse over forward.

    ⟨dtout, ṫ⟩ for the tangent ṫ = J(x)·t has the gradient J(x)ᵀ·dtout by t, and by x the backward's tangent along t;
    the gradients of out and LSE themselves enter as the tangents of dtout and dtlse.
    """
    _refuse_second(needs)
    (*args,), (out, lse, tout, tlse) = kept(ctx)
    along, call = args[:MOVERS], args[MOVERS:]
    still, movers = list(needs[:MOVERS]), list(needs[MOVERS : 2 * MOVERS])
    found: dict[int, Any] = {}
    if dtout is None and dtlse is None:
        dout = torch.zeros_like(out) if dout is None else dout
        grads = run_backward(dout, dlse, out, lse, movers, *call)
        found.update(enumerate(grads, MOVERS))
        return _gradients(ctx, needs, found)
    dtout = torch.zeros_like(out) if dtout is None else dtout
    if any(movers):
        grads = run_backward_tangent(
            dtout, dtlse, out, lse, dout, dlse, tout, tlse, movers, *along, *call
        )
        found.update(enumerate(grads, MOVERS))
    if any(still):
        grads = run_backward(dtout, dtlse, out, lse, still, *call)
        found.update((i, _like(g, t)) for i, (g, t) in enumerate(zip(grads, along, strict=True)))
    return _gradients(ctx, needs, found)


def move_forward(known: Any, call: Given, along: Given) -> tuple[Tensor, ...]:
    """Tangents of out and LSE, from those of the forward's arguments."""
    return Tangent.apply(known, *along[:MOVERS], *call)[2:]


def move_backward(_: Any, args: Given, along: Given) -> tuple[Tensor, ...] | None:
    """Tangents of the backward's results, from those of its arguments: forward over reverse; None for zeros."""
    dout, dlse, out, lse, wanted, *call = args
    tdout, tdlse, tout, tlse, _, *rest = along
    moving = rest[:MOVERS]
    if all(t is None for t in moving):
        if tdout is None and tdlse is None:
            return None
        tdout = torch.zeros_like(dout) if tdout is None else tdout
        return run_backward(tdout, tdlse, out, lse, wanted, *call)
    if tout is None or tlse is None:
        _, _, tout, tlse = run_tangent(*moving, *call)
    return run_backward_tangent(
        dout, dlse, out, lse, tdout, tdlse, tout, tlse, wanted, *moving, *call
    )


def refuse_third(*_: Any) -> NoReturn:
    """No op is the derivative of a second one."""
    raise Unsupported("third derivatives of attention: relampago gives the first and the second")


def refuse_tables(*_: Any) -> NoReturn:
    """Gradients of score mods' tensors would need the mods' mixed derivatives."""
    raise Unsupported("second derivatives by score mod arguments; detach them")


def refuse_twice_forward(*_: Any) -> NoReturn:
    """A tangent along two directions would need sums of its own."""
    raise Unsupported(
        "forward-mode AD over forward-mode AD of attention; forward over reverse, reverse over forward and reverse "
        "over reverse give second derivatives (torch.func.hessian is forward over reverse)"
    )


def _function(op: Any, gradient: Callable[..., Any], move: Callable[..., Any], batch: Any) -> Any:
    """An op as torch.func and forward-mode AD take it: PyTorch's own autograd for custom ops refuses both.

    Its first argument is what is known of the results already, or None: forward-mode AD computes output and tangent in
    one pass, of which each takes its part.
    """

    results = len(op._schema.returns)

    def forward(known: tuple[Tensor, ...] | None, *args: Any) -> tuple[Tensor, ...]:
        return (
            op(*map(_still, args)) if known is None else tuple(t.detach() for t in known[:results])
        )

    def setup_context(ctx: Any, inputs: Given, output: tuple[Tensor, ...]) -> None:
        known, *args = inputs
        ctx.known = known
        ctx.save_for_forward(*keep(ctx, tuple(args), output))

    def backward(ctx: Any, *grads: Tensor | None) -> Given:
        found = gradient(ctx, ctx.needs_input_grad[1:], *grads)
        return None, *(None if isinstance(g, list) else g for g in found)

    def jvp(ctx: Any, _: Any, *along: Any) -> tuple[Tensor, ...]:
        args, found = kept(ctx)
        args, along = (tuple(map(_still, given)) for given in (args, along))
        return move(ctx.known, args, along) or tuple(map(torch.zeros_like, found))

    def vmap(info: Any, dims: Given, _: Any, *args: Any) -> Any:
        return batch(lambda *joined: function.apply(None, *joined), info, dims[1:], *args)

    rules: tuple[Any, ...] = (forward, setup_context, backward, jvp, vmap)
    methods = {rule.__name__: staticmethod(rule) for rule in rules}
    function: Any = type(op._opname, (torch.autograd.Function,), methods)
    return function


def _register(name: str, gradient: Callable[..., Any]) -> None:
    """The op's own autograd, for calls that no transform watches."""
    torch.library.register_autograd(
        f"relampago::{name}",
        lambda ctx, *grads: tuple(gradient(ctx, ctx.needs_input_grad, *grads)),
        setup_context=lambda ctx, inputs, output: keep(ctx, inputs, output) and None,
        lib=library,
    )


Forward = _function(forward_op, differentiate, move_forward, transforms.forward_vmap)
Backward = _function(backward_op, differentiate_backward, move_backward, transforms.backward_vmap)
Tangent = _function(
    tangent_op, differentiate_tangent, refuse_twice_forward, transforms.tangent_vmap
)
BackwardTangent = _function(
    backward_tangent_op, refuse_third, refuse_third, transforms.backward_tangent_vmap
)
for _name, _gradient in (
    ("forward", differentiate),
    ("backward", differentiate_backward),
    ("tangent", differentiate_tangent),
    ("backward_tangent", refuse_third),
):
    _register(_name, _gradient)
torch.library.register_autograd("relampago::backward_args", refuse_tables, lib=library)
