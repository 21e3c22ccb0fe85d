"""torch.vmap over the ops: the new dimension joins the batch; where it cannot, the samples go one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relampago.mods import with_sequences
from relampago.op import (
    BACKWARD_NAMES,
    BACKWARD_TANGENT_NAMES,
    NAMES,
    TANGENT_NAMES,
    backward_op,
    backward_tangent_op,
    forward_op,
    library,
    tangent_op,
)
from relampago.problem import Facts

Batched = tuple[tuple[Tensor, ...], tuple[int | None, ...]]
BIAS_LIKE = ("bias", "tbias", "mask", "row_start", "row_end")  # a batch of their own, or 1 for all
SHARED = ("sinks", "tsinks", "seed")  # the same for all


def _fold(
    names: tuple[str, ...], args: tuple[Any, ...], dims: tuple[Any, ...], size: int
) -> list[Any]:
    """vmap: the new dimension joins the batch. Tensors without a batch of their own cannot differ along it."""
    given = dict(zip(names, zip(args, dims, strict=True), strict=True))
    if given["cu_q"][0] is not None or given["lens_k"][0] is not None:
        raise NotImplementedError("vmap over packed sequences or a cache")
    q, q_dim = given["q"]
    tokens = Facts.decode(given["facts"][0]).mods
    batch = q.shape[0 if q_dim is None else 1 if q_dim == 0 else 0]
    folded = []
    for name, (value, dim) in given.items():
        if isinstance(value, (list, tuple)) and any(isinstance(d, int) for d in dim or ()):
            raise NotImplementedError(f"vmap over {name}")
        if name == "blocks":  # the last are tiles, which have no batch
            lists = (_repeated(t, size) if t.shape[0] > 1 else t for t in value[:-1])
            folded.append([*lists, *value[-1:]])
        elif name == "mod_args":
            own = zip(value, with_sequences(tokens, value), strict=True)
            folded.append([_repeated(t, size) if has else t for t, has in own])
        elif not isinstance(value, Tensor):
            folded.append(value)
        elif name in SHARED:
            if dim is not None:
                raise NotImplementedError(f"vmap over {name}")
            folded.append(value)
        elif name not in BIAS_LIKE:
            folded.append(_stack(value, dim, size).flatten(0, 1))
        elif dim is None:
            folded.append(_repeated(value, size) if value.shape[0] > 1 else value)
        else:
            value = value.movedim(dim, 0)
            folded.append(value.expand(size, batch, *value.shape[2:]).flatten(0, 1))
    return folded


def _stack(value: Tensor, dim: int | None, size: int) -> Tensor:
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _repeated(value: Tensor, size: int) -> Tensor:
    """A batch that all samples share, once for each."""
    return _stack(value, None, size).flatten(0, 1)


def forward_vmap(run: Callable[..., Any], info: Any, dims: tuple[Any, ...], *args: Any) -> Batched:
    """The forward on samples."""
    return _batched(run, NAMES, info.batch_size, dims, args)


def tangent_vmap(run: Callable[..., Any], info: Any, dims: tuple[Any, ...], *args: Any) -> Batched:
    """The forward's tangent on samples, of the inputs or of the tangents."""
    return _batched(run, TANGENT_NAMES, info.batch_size, dims, args)


def backward_vmap(run: Callable[..., Any], info: Any, dims: tuple[Any, ...], *args: Any) -> Batched:
    """The backward on samples, of the inputs or of the gradients that it starts from."""
    return _batched(run, BACKWARD_NAMES, info.batch_size, dims, args)


def backward_tangent_vmap(
    run: Callable[..., Any], info: Any, dims: tuple[Any, ...], *args: Any
) -> Batched:
    """The backward's tangent on samples."""
    return _batched(run, BACKWARD_TANGENT_NAMES, info.batch_size, dims, args)


def _batched(
    run: Callable[..., Any],
    names: tuple[str, ...],
    size: int,
    dims: tuple[Any, ...],
    args: tuple[Any, ...],
) -> Batched:
    """Fold the samples into the batch if they can be; else one by one.

    Dropout draws by the place in the batch: samples that share their inputs must be drawn alike, so they are not
    folded, and samples that have inputs of their own were folded by the forward, so they must be here.
    """
    by_name = dict(zip(names, args, strict=True))
    inputs = dims[len(names) - len(NAMES) :]
    own = any(d is not None for dim in inputs for d in (dim if isinstance(dim, list) else [dim]))
    drawn = Facts.decode(by_name["facts"]).dropout_p > 0
    wanted = by_name.get("wanted", [False] * 5)
    shared = (wanted[4] and by_name["sinks"] is not None) or (
        wanted[3] and by_name["bias"] is not None and _is_shared(by_name["bias"], names, dims)
    )
    if not shared and (own or not drawn):
        try:
            return _unfolded(run(*_fold(names, args, dims, size)), size)
        except NotImplementedError:
            if drawn:
                raise
    elif own and drawn:
        raise NotImplementedError(
            "vmap over the gradient of a bias or sinks that the samples share, with dropout"
        )
    rows = [
        run(*(_one(value, dim, i) for value, dim in zip(args, dims, strict=True)))
        for i in range(size)
    ]
    return _stacked(rows)


def _is_shared(bias: Tensor, names: tuple[str, ...], dims: tuple[Any, ...]) -> bool:
    """Whether folding would add the samples' gradients of a bias."""
    return bias.shape[0] == 1 and dims[names.index("bias")] is None


def _one(value: Any, dim: Any, i: int) -> Any:
    if isinstance(value, Tensor):
        return value if dim is None else value.select(dim, i)
    if isinstance(dim, (list, tuple)):
        return [_one(part, d, i) for part, d in zip(value, dim, strict=True)]
    return value


def _stacked(rows: list[tuple[Tensor, ...]]) -> Batched:
    columns = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    return columns, (0,) * len(columns)


def _unfolded(results: tuple[Tensor, ...], size: int) -> Batched:
    """Split the batch again; what is absent, and so empty, has none."""
    there = [t.ndim > 1 for t in results]
    found = tuple(
        t.unflatten(0, (size, -1)) if has else t for t, has in zip(results, there, strict=True)
    )
    return found, tuple(0 if has else None for has in there)


def _register(name: str, rule: Callable[..., Batched], op: Any) -> None:
    torch.library.register_vmap(
        f"relampago::{name}", lambda info, dims, *args: rule(op, info, dims, *args), lib=library
    )


for _name, _rule, _op in (
    ("forward", forward_vmap, forward_op),
    ("backward", backward_vmap, backward_op),
    ("tangent", tangent_vmap, tangent_op),
    ("backward_tangent", backward_tangent_vmap, backward_tangent_op),
):
    _register(_name, _rule, _op)
