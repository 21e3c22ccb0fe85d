"""scaled_dot_product_attention: PyTorch's signature and semantics, on relampago.

What differs from `relampago.attention`: heads stand before lengths, causal is aligned to the top left, sizes broadcast
as in a matrix product, and a bad call is a RuntimeError.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from relampago.answer import answer
from relampago.integrations.refusals import Refused, expect, refuses
from relampago.integrations.sdpa.ragged import attend_nested
from relampago.lower import autocast
from relampago.options import Options
from relampago.shapes import broadcasts


@refuses
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (N, …, Hq, L, E), or nested.
        key: (N, …, H, S, E), or nested.
        value: (N, …, H, S, Ev), or nested.
        attn_mask: bool (True takes part) or float (added to the scores), broadcasts to (N, …, Hq, L, S); or a
            `torch.nn.attention.bias` mask. A float mask gets its gradient.
        dropout_p: probability of dropping a weight; it is applied whether or not a module is in training.
        is_causal: row i sees keys 0..i, whatever the lengths: aligned to the top left.
        scale: E ** -0.5 if None.
        enable_gqa: Hq may be a multiple of H; key and value heads repeat.

    Returns:
        (N, …, Hq, L, Ev), in query's dtype. A row that sees no key gives 0.

    Raises:
        Refused: an argument is wrong; a RuntimeError, as PyTorch's.
    """
    expect(
        0.0 <= dropout_p <= 1.0,
        "dropout_p is {}; expected a probability between 0 and 1",
        dropout_p,
    )
    expect(
        attn_mask is None or not is_causal,
        "attn_mask is given; expected None with is_causal=True",
    )
    if query.is_nested or key.is_nested or value.is_nested:
        return attend_nested(query, key, value, attn_mask, dropout_p, is_causal, scale)
    offset = 0
    if isinstance(attn_mask, CausalBias):
        is_causal = True
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            offset = key.shape[-2] - query.shape[-2]
        attn_mask = None
    like = query.dtype
    alike = key.dtype == value.dtype == like
    if not alike or (attn_mask is not None and attn_mask.dtype not in (torch.bool, like)):
        query, key, value = autocast(query, key, value)  # PyTorch casts before it compares
    q, k, v, lead = aligned(query, key, value, enable_gqa)
    bias = mask = None
    if attn_mask is not None:
        attn_mask = fitting(attn_mask, q, k, lead)
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    all_dropped = dropout_p == 1.0
    options = Options(
        causal=is_causal, scale=scale, bias=bias, mask=mask, dropout_p=0.0 if all_dropped else dropout_p
    )  # fmt: skip
    out = answer(q, k, v, options, offset=offset)[0].transpose(1, 2)
    out = out * 0.0 if all_dropped else out
    rank = max(query.ndim, key.ndim, value.ndim)
    return out if rank == 4 else out.reshape((*lead, *out.shape[1:])[-rank:])


def aligned(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q, k and v as (B, length, heads, dim), and the batch dimensions that B joins."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        kind, rank = (t.dtype, t.device), t.ndim
        expect(
            kind[0] == query.dtype,
            "{} has dtype {}; expected {}, as query",
            name,
            kind[0],
            query.dtype,
        )
        expect(
            kind[1] == query.device,
            "{} is on {}; expected {}, as query",
            name,
            kind[1],
            query.device,
        )
        expect(rank >= 2, "{} has {} dimensions; expected at least 2: (length, dim)", name, rank)
    for name, t, other, place, word in (
        ("key", key, query, -1, "head dim"),
        ("value", value, key, -2, "length"),
    ):
        n, m = t.shape[place], other.shape[place]
        expect(n == m, "{} has {} {}; expected {}", name, word, n, m)
    tensors = [_padded(t) for t in (query, key, value)]
    leads = [tuple(t.shape[:-3]) for t in tensors]
    lead = leads[0]
    if leads[1] != lead or leads[2] != lead:
        lead = broadcast("key or value", leads)
        tensors = [t.expand(*lead, *t.shape[-3:]) for t in tensors]
    tensors = same_heads(*tensors, enable_gqa=enable_gqa)
    if len(lead) > 1:
        tensors = [t.flatten(0, len(lead) - 1) for t in tensors]
    q, k, v = (t.transpose(1, 2) for t in tensors)
    return q, k, v, lead


def same_heads(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> list[Tensor]:
    """Heads as relampago wants them: k and v alike, and theirs a divisor of q's; heads of 1 broadcast."""
    heads, heads_k, heads_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if heads == heads_k == heads_v:
        return [q, k, v]
    if enable_gqa:
        for name, n in (("key", heads_k), ("value", heads_v)):
            expect(
                n > 0 and heads % n == 0,
                "{} has {} heads; expected a divisor of query's {}",
                name,
                n,
                heads,
            )
        if heads_k != heads_v:
            k = k.repeat_interleave(heads // heads_k, -3)
            v = v.repeat_interleave(heads // heads_v, -3)
        return [q, k, v]
    most = broadcast("key or value", [(heads,), (heads_k,), (heads_v,)], " (or enable_gqa=True)")[0]
    q = q.expand(*q.shape[:-3], most, *q.shape[-2:])
    if not heads_k == heads_v == 1:
        k, v = (t.expand(*t.shape[:-3], most, *t.shape[-2:]) for t in (k, v))
    return [q, k, v]


def fitting(mask: Tensor, q: Tensor, k: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to (B, H, L, S), with B the product of lead."""
    fits = mask.dtype in (torch.bool, torch.float32, q.dtype)
    expect(
        fits, "attn_mask has dtype {}; expected bool, float or {}, as query", mask.dtype, q.dtype
    )
    expect(
        mask.device == q.device, "attn_mask is on {}; expected {}, as query", mask.device, q.device
    )
    full = (*lead, q.shape[2], q.shape[1], k.shape[1])
    shape, mask = tuple(mask.shape), _padded(mask)
    padded = (1,) * (len(full) - mask.ndim) + tuple(mask.shape)
    held = broadcasts(padded, full)
    expect(held, "attn_mask has shape {}; expected one that broadcasts to {}", shape, full)
    if len(lead) == 1:
        return mask
    if math.prod(padded[:-3]) == 1:
        return mask.reshape(1, *padded[-3:])
    return mask.reshape(padded).expand(*lead, *padded[-3:]).flatten(0, len(lead) - 1)


def broadcast(name: str, shapes: list[tuple[int, ...]], hint: str = "") -> tuple[int, ...]:
    """The shape that all broadcast to."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        rest = f"expected ones that broadcast with {shapes[0]}{hint}"
        raise Refused(f"{name} has sizes {shapes[1:]}; {rest}") from None


def _padded(t: Tensor) -> Tensor:
    """At least (1, 1, length, dim)."""
    return t if t.ndim >= 4 else t.reshape((1,) * (4 - t.ndim) + tuple(t.shape))


def covers(*tensors: Any) -> bool:
    """Whether the function knows these tensors; subclasses with rules of their own (DTensor) keep PyTorch's."""
    for t in tensors:
        kind = type(t)
        if kind is Tensor or not isinstance(t, Tensor) or t.is_nested or kind is CausalBias:
            continue
        plain = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
        if kind.__torch_function__ not in plain or kind.__name__ == "DTensor":
            return False
    return True
