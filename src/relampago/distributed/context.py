"""context_parallel: inside it, F.scaled_dot_product_attention runs over all ranks. The habits of torch's own.

torch's `context_parallel` replaces a function in a module, which misses `from torch.nn.functional import …`. Here a
`TorchFunctionMode` sees the call itself, however it was imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from relampago.distributed.attention import attention
from relampago.distributed.plan import ContextParallelPlan
from relampago.errors import InvalidInput, Unsupported


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] | None = None,
    **options: Any,
) -> Iterator[ContextParallelPlan]:
    """Shard buffers in place and spread F.scaled_dot_product_attention over a mesh; both end with the block.

    Args:
        mesh: a DeviceMesh or ProcessGroup.
        buffers: whole tensors (inputs, labels already shifted, position tables), all with the same number of tokens.
        buffer_seq_dims: the dimension of tokens in each.
        no_restore_buffers: those that may stay sharded.
        options: strategy, layout, documents and the like, as `ContextParallelPlan` takes them.

    Yields:
        The plan: shard, unshard, position_ids.

    Raises:
        InvalidInput: buffers that do not match.
    """
    if not buffers or len(buffers) != len(buffer_seq_dims):
        raise InvalidInput(
            f"buffers has {len(buffers)} tensors, buffer_seq_dims {len(buffer_seq_dims)}; expected as many, at least 1"
        )
    lengths = {b.shape[dim] for b, dim in zip(buffers, buffer_seq_dims, strict=True)}
    if len(lengths) != 1:
        raise InvalidInput(f"buffers have {sorted(lengths)} tokens; expected the same in all")
    plan = ContextParallelPlan(mesh, lengths.pop(), **options)
    kept = {id(t) for t in no_restore_buffers or ()}
    whole = [(b, b.data) for b in buffers]
    for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
        buffer.data = plan.shard(buffer.data, dim)
    try:
        with Sdpa(plan):
            yield plan
    finally:
        for buffer, data in whole:
            if id(buffer) not in kept:
                buffer.data = data


class Sdpa(TorchFunctionMode):
    """Calls of F.scaled_dot_product_attention, over a plan."""

    def __init__(self, plan: ContextParallelPlan) -> None:
        super().__init__()
        self.plan = plan

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return sdpa(self.plan, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def sdpa(
    plan: ContextParallelPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention (B, H, L, D), over a plan. is_causal counts global positions.

    Raises:
        InvalidInput: heads differ without enable_gqa.
        Unsupported: attn_mask or dropout_p.
    """
    if attn_mask is not None or dropout_p:
        raise Unsupported(
            "attn_mask and dropout_p: attention over several ranks does not know them"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidInput(
            f"key has {key.shape[1]} heads; expected {query.shape[1]}, as query, without enable_gqa"
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return attention(q, k, v, plan=plan, causal=is_causal, scale=scale).transpose(1, 2)


def unshard_buffers(
    plan: ContextParallelPlan, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """Whole tensors of sharded ones, as torch's `context_parallel_unshard`."""
    with torch.no_grad():
        return [plan.unshard(b, dim) for b, dim in zip(buffers, seq_dims, strict=True)]
