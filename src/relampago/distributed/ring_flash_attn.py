"""The names and signatures of ring-flash-attn 0.1: `from relampago.distributed.ring_flash_attn import …`.

Tensors are this rank's: q (B, L, H, D), or packed (T, H, D) with the local cu_seqlens (each a 1/P of the global one).
ring lies contiguous, zigzag in two chunks, stripe in every P-th token; the varlen forms deal out each sequence by
itself. Windows, which the original refuses, work. Dropout and ALiBi do not, and say so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relampago.distributed.attention import attention
from relampago.distributed.exchange import pack
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.transport import GroupTransport, Shape, check_group
from relampago.errors import InvalidInput, Unsupported
from relampago.lower import prepare
from relampago.op import backward_op, forward_op
from relampago.options import Options, Packing
from relampago.problem import accumulate_dtype


@functools.lru_cache(maxsize=32)
def _plan(
    group: Any, length: int, layout: str, strategy: str, documents: Any
) -> ContextParallelPlan:
    return ContextParallelPlan(group, length, strategy=strategy, layout=layout, documents=documents)


def _window(size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    left, right = (None if side < 0 else side for side in size)
    return None if left is None and right is None else (left, right)


def _refuse(dropout_p: float, alibi_slopes: Any) -> None:
    if dropout_p or alibi_slopes is not None:
        raise Unsupported(
            "dropout_p and alibi_slopes: attention over several ranks does not know them"
        )


def _group(group: Any) -> dist.ProcessGroup:
    return check_group(dist.group.WORLD if group is None else group)


def _family(layout: str, name: str) -> tuple[Callable[..., Any], ...]:
    """The plain, kvpacked and qkvpacked function of a layout."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        """Attention over the ranks of a group; q, k, v (B, L, heads, D) are this rank's. out, or (out, lse, None)."""
        _refuse(dropout_p, alibi_slopes)
        group = _group(group)
        window = _window(window_size)
        strategy = "ring" if window is None else "halo"
        plan = _plan(group, q.shape[1] * dist.get_world_size(group), layout, strategy, None)
        out, lse = attention(
            q, k, v, plan=plan, causal=causal, window=window, scale=softmax_scale, deterministic=deterministic,
            return_lse=True,
        )  # fmt: skip
        return (out, lse, None) if return_attn_probs else out

    def kvpacked(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        """With kv (B, L, 2, heads, D)."""
        return func(q, kv[:, :, 0], kv[:, :, 1], *args, **kwargs)

    def qkvpacked(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
        """With qkv (B, L, 3, heads, D)."""
        return func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **kwargs)

    return _named(name, func, kvpacked, qkvpacked)


def _varlen(layout: str, name: str) -> tuple[Callable[..., Any], ...]:
    """The packed forms of a layout."""
    parts = 2 if layout == "documents_zigzag" else 1

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        """Packed sequences; q, k, v (T, heads, D) and cu_seqlens are this rank's. out, or (out, lse (H, T), None)."""
        _refuse(dropout_p, alibi_slopes)
        group = _group(group)
        local = cu_seqlens.tolist()
        lengths = [b - a for a, b in itertools.pairwise(local)]
        if local[:1] != [0] or local[-1] != q.shape[0] or any(n % parts or n < 0 for n in lengths):
            raise InvalidInput(
                f"cu_seqlens is {local[:16]}; expected 0 to {q.shape[0]}, each length a multiple of {parts}"
            )
        size = dist.get_world_size(group)
        starts = tuple(n * size for n, length in zip(local, lengths, strict=False) if length)
        window = _window(window_size)
        strategy = "ring" if window is None else "halo"
        plan = _plan(group, q.shape[0] * size, layout, strategy, starts or None)
        out, lse = attention(
            q[None], k[None], v[None], plan=plan, causal=causal, window=window, scale=softmax_scale,
            deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        return (out[0], lse[0], None) if return_attn_probs else out[0]

    def kvpacked(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        """With kv (T, 2, heads, D)."""
        return func(q, kv[:, 0], kv[:, 1], *args, **kwargs)

    def qkvpacked(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
        """With qkv (T, 3, heads, D)."""
        return func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *args, **kwargs)

    return _named(name, func, kvpacked, qkvpacked)


def _named(name: str, *functions: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    for function, suffix in zip(
        functions, ("func", "kvpacked_func", "qkvpacked_func"), strict=True
    ):
        function.__name__ = function.__qualname__ = f"{name}_{suffix}"
    return functions


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _family(
    "contiguous", "ring_flash_attn"
)
(
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
) = _family("zigzag", "zigzag_ring_flash_attn")
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _family(
    "striped", "stripe_flash_attn"
)
(
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("documents_contiguous", "ring_flash_attn_varlen")
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("documents_zigzag", "zigzag_ring_flash_attn_varlen")


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What a rank's contiguous part of a packed batch needs: (cu_q, cu_k, max_q, max_k, its slice of all keys).

    Args:
        cu_seqlens: the global one, (n + 1,) int32; its end must be a multiple of world_size.
        causal: whether keys after the rank's last row may be left out.
        rank: the rank.
        world_size: ranks.
    """
    edges = cu_seqlens.tolist()
    total = edges[-1]
    if total % world_size:
        raise InvalidInput(
            f"cu_seqlens ends at {total}; expected a multiple of the {world_size} ranks"
        )
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    touched = [(a, b) for a, b in itertools.pairwise(edges) if a < last and b > first]
    rows = [0, *(min(b, last) - first for _, b in touched)]
    start = touched[0][0] if touched else first
    ends = [min(b, last) if causal else b for _, b in touched]
    keys = [0, *(end - start for end in ends)]
    like = {"dtype": torch.int32, "device": cu_seqlens.device}
    cu_q, cu_k = torch.tensor(rows, **like), torch.tensor(keys, **like)
    longest = [max((b - a for a, b in itertools.pairwise(e)), default=0) for e in (rows, keys)]
    return cu_q, cu_k, longest[0], longest[1], slice(start, start + keys[-1])


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """All-gather of keys, heads_k_stride kv heads at a time, then packed attention: Llama 3's way.

    q, k, v (T, heads, D) are this rank's contiguous part; the other arguments come from
    `llama3_flash_attn_prepare_cu_seqlens`. out (T, H, E), or (out, lse (H, T), None).
    """
    _refuse(dropout_p, alibi_slopes)
    if not isinstance(heads_k_stride, int) or heads_k_stride < 1 or k.shape[1] % heads_k_stride:
        raise InvalidInput(
            f"heads_k_stride is {heads_k_stride!r}; expected a divisor of k's {k.shape[1]} heads"
        )
    link = GroupTransport(_group(group), 600.0)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = Options(
        causal=causal, window=_window(window_size), scale=softmax_scale, deterministic=deterministic
    )
    outs, lses = [], []
    ratio = q.shape[1] // k.shape[1]
    for h in range(0, k.shape[1], heads_k_stride):
        part = slice(h, h + heads_k_stride)
        rows = slice(h * ratio, (h + heads_k_stride) * ratio)
        out, lse = _Llama3.apply(
            q[:, rows], k[:, part], v[:, part], packing, options, local_k_slice, link
        )  # type: ignore[misc]
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, 1), torch.cat(lses, 0)
    return (out, lse, None) if return_attn_probs else out


class _Llama3(torch.autograd.Function):
    """Some heads: gather, attend; backward: gather again, and sum the ranks' shares in fp32."""

    @staticmethod
    def _call(
        q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options, keys: slice, link: Any
    ) -> Any:
        (every,) = link.all_gather(pack(k, v), "llama3").wait()
        kv = every.flatten(0, 1)[keys]
        k, v = kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]
        return prepare(q, k, v, options, packing=packing, shard=True), every.shape

    @staticmethod
    def forward(ctx: Any, q, k, v, packing, options, keys, link):
        call, _ = _Llama3._call(q, k, v, packing, options, keys, link)
        out, lse = forward_op(*call)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (packing, options, keys, link)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dout, dlse = gradients
        q, k, v, out, lse = ctx.saved_tensors
        *_, keys, link = ctx.rest
        call, shape = _Llama3._call(q, k, v, *ctx.rest)
        dq, dk, dv, _, _ = backward_op(
            dout, dlse, out, lse, [True, True, True, False, False], *call
        )
        whole = q.new_zeros((shape[0] * shape[1], *shape[2:]), dtype=accumulate_dtype(q.dtype))
        whole[keys] = pack(dk, dv)
        shares = list(whole.view(shape).unbind(0))
        mine = Shape(tuple(shape[1:]), whole.dtype)
        got = link.all_to_all(shares, [mine] * link.size, "llama3 gradients").wait()
        total = torch.stack(got).sum(0)
        dk, dv = total[..., : k.shape[-1]], total[..., k.shape[-1] :]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
