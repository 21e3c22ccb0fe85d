"""Nested tensors, jagged and strided: sequences of different lengths, packed without a copy where they are jagged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.api import attention_varlen
from relampago.integrations.refusals import expect


class Packed(NamedTuple):
    """Sequences in one tensor."""

    rows: Tensor  # (T, heads, dim)
    cu_seqlens: Tensor  # int32 (B + 1,)
    longest: int


def attend_nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of nested tensors (B, heads, ragged, dim); the output is nested as query is.

    Causal is aligned to the top left: query and key must then have the same lengths, as PyTorch asks.

    Args:
        query: nested.
        key: nested.
        value: nested.
        attn_mask: None; PyTorch refuses one too.
        dropout_p: probability of dropping a weight.
        is_causal: row i sees keys 0..i of its sequence.
        scale: dim ** -0.5 if None.
    """
    expect(attn_mask is None, "attn_mask is given; expected None with nested tensors")
    for name, t in (("query", query), ("key", key), ("value", value)):
        expect(
            t.is_nested, "{} is dense; expected all of query, key and value nested, or none", name
        )
        expect(t.ndim == 4, "{} has {} dimensions; expected 4: (batch, heads, ragged, dim)", name, t.ndim)  # fmt: skip
    q, k, v = (packed(t) for t in (query, key, value))
    expect(
        q.rows.shape[1] % max(1, k.rows.shape[1]) == 0,
        "key has {} heads; expected a divisor of query's {}",
        k.rows.shape[1],
        q.rows.shape[1],
    )
    if is_causal:
        same = q.cu_seqlens is k.cu_seqlens or torch.equal(q.cu_seqlens, k.cu_seqlens)
        expect(same, "key has other lengths; expected query's with is_causal=True")
    out = attention_varlen(
        q.rows, k.rows, v.rows, q.cu_seqlens, k.cu_seqlens, q.longest, k.longest, causal=is_causal,
        scale=scale, dropout_p=dropout_p,
    )  # fmt: skip
    return unpacked(out, query)


def packed(t: Tensor) -> Packed:
    """A nested tensor's sequences."""
    if t.layout != torch.jagged:
        parts = [part.transpose(0, 1) for part in t.unbind()]
        lengths = torch.tensor([0, *(len(part) for part in parts)], dtype=torch.int32)
        cu = lengths.cumsum(0, dtype=torch.int32).to(t.device)
        return Packed(torch.cat(parts), cu, int(lengths.max()))
    by_row: Any = t.transpose(1, 2)  # (B, ragged, heads, dim)
    expect(by_row.lengths() is None, "a nested tensor has holes; expected a contiguous one")
    cu = by_row.offsets().to(torch.int32)
    return Packed(by_row.values(), cu, by_row._get_max_seqlen())


def unpacked(out: Tensor, like: Tensor) -> Tensor:
    """Rows (T, heads, dim) as a nested tensor with the sequences of `like`."""
    if like.layout != torch.jagged:
        parts = out.split([part.shape[1] for part in like.unbind()])
        return torch.nested.as_nested_tensor([part.transpose(0, 1) for part in parts])
    by_row: Any = like.transpose(1, 2)
    nested = torch.nested.nested_tensor_from_jagged(
        out,
        by_row.offsets(),
        min_seqlen=by_row._get_min_seqlen(),
        max_seqlen=by_row._get_max_seqlen(),
    )
    return nested.transpose(1, 2)
