"""torch.func over the ops: vmap joins the batch; grad, vjp and their compositions work through `Transformable`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from relampago.errors import Unsupported
from relampago.op import NAMES, differentiate, forward_op, library, setup_context


def run(*call: Any) -> tuple[Tensor, Tensor]:
    """The forward op, in a form that torch.func can transform while one of its transforms is active."""
    if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
        if any(t.requires_grad for t in call[NAMES.index("mod_args")]):
            raise Unsupported(
                "gradients of score mod arguments inside a transform of torch.func are not known"
            )
        return Transformable.apply(*call)  # type: ignore[return-value]
    return forward_op(*call)


class Transformable(torch.autograd.Function):
    """The op as torch.func wants it: PyTorch's own autograd for custom ops refuses grad and jacrev."""

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:  # noqa: D102
        return forward_op(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: D102
        setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # noqa: D102
        return tuple(None if isinstance(g, list) else g for g in differentiate(ctx, *grads))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *call: Any):  # noqa: D102
        return _forward_vmap(info, dims, *call)


def _fold(args: tuple[Any, ...], dims: tuple[Any, ...], size: int) -> list[Any]:
    """vmap: the new dimension joins the batch. Tensors without a batch of their own cannot differ along it."""
    names = dict(zip(NAMES, zip(args, dims, strict=True), strict=True))
    if names["cu_q"][0] is not None:
        raise NotImplementedError("vmap over packed sequences: give it a padded batch")
    folded = []
    for name, (value, dim) in names.items():
        if isinstance(value, (list, tuple)) and any(isinstance(d, int) for d in dim or ()):
            raise NotImplementedError(f"vmap over {name}")
        if not isinstance(value, Tensor):
            folded.append(value)
        elif name in ("q", "k", "v"):
            folded.append(_stack(value, dim, size).flatten(0, 1))
        elif dim is None:
            per_batch = name in ("bias", "mask", "row_start", "row_end") and value.shape[0] > 1
            folded.append(_stack(value, None, size).flatten(0, 1) if per_batch else value)
        elif name in ("bias", "mask", "row_start", "row_end"):
            batch = args[0].shape[0 if dims[0] is None else 1 if dims[0] == 0 else 0]
            value = value.movedim(dim, 0)
            folded.append(value.expand(size, batch, *value.shape[2:]).flatten(0, 1))
        else:
            raise NotImplementedError(f"vmap over {name}")
    return folded


def _stack(value: Tensor, dim: int | None, size: int) -> Tensor:
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _forward_vmap(info: Any, dims: tuple[Any, ...], *args: Any):
    out, lse = run(*_fold(args, dims, info.batch_size))
    return (out.unflatten(0, (info.batch_size, -1)), lse.unflatten(0, (info.batch_size, -1))), (
        0,
        0,
    )


def _backward_vmap(info: Any, dims: tuple[Any, ...], *args: Any):
    size = info.batch_size
    per_batch = [
        None if a is None else _stack(a, d, size).flatten(0, 1)
        for a, d in zip(args[:4], dims[:4], strict=True)
    ]
    folded = _fold(args[5:], dims[5:], size)
    dq, dk, dv, dbias, dsinks = torch.ops.relampago.backward(*per_batch, args[4], *folded)
    bias, sinks = folded[3], folded[4]
    if (bias is not None and args[4][3] and bias.shape[0] == 1) or (
        sinks is not None and args[4][4]
    ):
        raise NotImplementedError(
            "vmap over the gradient of a bias or sinks that the samples share"
        )
    if dbias.numel():
        dbias = dbias.unflatten(0, (size, -1))
    outs = tuple(g.unflatten(0, (size, -1)) for g in (dq, dk, dv))
    return (*outs, dbias, dsinks), (0, 0, 0, 0 if dbias.numel() else None, None)


torch.library.register_vmap("relampago::forward", _forward_vmap, lib=library)
torch.library.register_vmap("relampago::backward", _backward_vmap, lib=library)
