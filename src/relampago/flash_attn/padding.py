"""Padding as `flash_attn.bert_padding` has it: from padded batches to packed tokens and back. All differentiable."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor.

    Args:
        input: (N, …).
        indices: int64 (n,).

    Returns:
        (n, …).
    """
    assert input.ndim >= 2, f"input has {input.ndim} dimensions; expected at least 2"
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows put where they belong, zeros elsewhere.

    Args:
        values: (n, …).
        indices: int64 (n,), all different.
        first_axis_dim: N.

    Returns:
        (N, …).
    """
    assert indices.ndim == 1, f"indices has {indices.ndim} dimensions; expected 1"
    assert values.ndim >= 2, f"values has {values.ndim} dimensions; expected at least 2"
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a tensor, and the tensor for a residual connection.

    Args:
        input: (N, …).
        indices: int64 (n,).

    Returns:
        ((n, …), (N, …)).
    """
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, packed. Waits for the device: their number is a shape.

    Args:
        hidden_states: (B, L, …).
        attention_mask: bool or int (B, L), nonzero for a token.
        unused_mask: (B, L), nonzero for a place that is kept without being used.

    Returns:
        (tokens (T, …), their indices (T,) in the flattened batch, cu_seqlens int32 (B + 1,), the longest length,
        used lengths int32 (B,)).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cumulated(lengths),
        int(lengths.max()) if lengths.numel() else 0,
        attention_mask.sum(-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that hold several short sequences each, packed as sequences of their own.

    Args:
        hidden_states: (B, L, …).
        attention_mask_in_length: int (B, L): the lengths of a row's sequences, in order, then zeros.

    Returns:
        (tokens (T, …), their indices (T,), cu_seqlens int32 (sequences + 1,), the longest length).
    """
    lengths = attention_mask_in_length
    place = torch.arange(lengths.shape[-1], device=lengths.device)
    indices = (place < lengths.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    each = lengths[lengths != 0]
    longest = int(each.max()) if each.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulated(each), longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`; padding is zero.

    Args:
        hidden_states: (T, …).
        indices: (T,), as `unpad_input` gave them.
        batch: B.
        seqlen: L.

    Returns:
        (B, L, …).
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
