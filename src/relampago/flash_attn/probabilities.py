"""S_dmask, which `return_attn_probs` adds for tests: the weights, negative where dropout struck. O(N²), on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.api import attention, attention_varlen
from relampago.flash_attn.options import sequence_of


def signed_probabilities(
    q: Tensor, k: Tensor, options: dict[str, Any], dropout_p: float, seed: Tensor
) -> Tensor:
    """The weights (B, H, Lq, Lk) in q's dtype, negative where they were dropped.

    Attention to one-hot values returns its own weights, so what is shown is what was done.

    Args:
        q: (B, Lq, H, D).
        k: (B, Lk, G, D).
        options: those of the call.
        dropout_p: its probability of dropping.
        seed: its seed.
    """
    keys, heads = k.shape[1], k.shape[2]
    one_hot = torch.eye(keys, dtype=q.dtype, device=q.device)[None, :, None]
    one_hot = one_hot.expand(k.shape[0], -1, heads, -1)
    with torch.no_grad():
        p = attention(q, k, one_hot, backend="reference", **options)
        kept = attention(
            q, k, one_hot, backend="reference", dropout_p=dropout_p, dropout_seed=seed, **options
        )
    return torch.where(kept == 0, -p, p).transpose(1, 2)


def signed_probabilities_packed(
    q: Tensor,
    k: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    options: dict[str, Any],
    dropout_p: float,
    seed: Tensor,
) -> Tensor:
    """The same for packed sequences: (B, H, longest q, longest k), 0 beyond a sequence's own lengths.

    Args:
        q: (Tq, H, D).
        k: (Tk, G, D).
        cu_seqlens: of q and k.
        longest: sequences of q and k.
        options: those of the call.
        dropout_p: its probability of dropping.
        seed: its seed.
    """
    (cu_q, cu_k), (rows, keys) = cu_seqlens, longest
    of_q, of_k = sequence_of(cu_q, q.shape[0]), sequence_of(cu_k, k.shape[0])
    row = torch.arange(q.shape[0], device=q.device) - cu_q[of_q]
    key = torch.arange(k.shape[0], device=k.device) - cu_k[of_k]
    one_hot = torch.nn.functional.one_hot(key.long().clamp(max=keys - 1), keys).to(q)
    one_hot = one_hot[:, None].expand(-1, k.shape[1], -1)
    arguments = (q, k, one_hot, cu_q, cu_k, rows, keys)
    with torch.no_grad():
        p = attention_varlen(*arguments, backend="reference", **options)
        kept = attention_varlen(
            *arguments, backend="reference", dropout_p=dropout_p, dropout_seed=seed, **options
        )
    signed = torch.where(kept == 0, -p, p)  # [Tq, H, longest k]
    found = signed.new_zeros(len(cu_q) - 1, rows, q.shape[1], keys)
    inside = row < rows
    found[of_q[inside], row[inside]] = signed[inside]
    return found.transpose(1, 2)
