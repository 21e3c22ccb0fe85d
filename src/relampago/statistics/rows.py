"""What each row's softmax is like: LSE, entropy, and each head's largest logit; parts of the keys merge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.errors import InvalidInput
from relampago.measure import row_statistics
from relampago.problem import RowStatistics
from relampago.statistics.call import lower


def rows(q: Tensor, k: Tensor, *, offset: int | None = None, **options: Any) -> RowStatistics:
    """LSE and entropy of each row, and the largest logit of each head, in one pass over the keys. No gradient.

    Args:
        q: queries (B, Lq, H, D), or packed (Tq, H, D) with cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
        k: keys (B, Lk, G, D) or (Tk, G, D); may be a part of all keys, see `merge`.
        offset: position of row 0 minus position of key 0, as in `partial`; None aligns bottom right.
        options: causal, window, mask, scale, softcap, alibi_slopes, score_mod, bias, sinks, backend: as in
            `attention`. A sink is one more outcome of its row.

    Returns:
        lse (B, H, Lq) or (H, Tq), and entropy -Σ p log p in nats, of the same shape; 0 where a row sees nothing.
        max_logits (B, H): the largest scale · q·kᵀ that the masks show, before softcap, mods and bias; -inf where
        nothing is visible. All in fp32 (fp64 for fp64 input).

    Raises:
        InvalidInput: an argument is wrong; the message names it.
        Unsupported: no backend can run the call.
    """
    call = lower(q, k, options, offset=offset)
    return row_statistics(call.sizes[1], *call)


def merge(*parts: RowStatistics) -> RowStatistics:
    """The statistics of the whole from those of disjoint parts of the keys, for the same rows.

    LSE joins as in `relampago.merge`. By the chain rule of entropy (Shannon 1948, section 6, property 3), that of the
    whole is the parts' own, weighted by their shares, plus the entropy of the shares.

    Args:
        parts: from `rows` on each part, with its offset. Give sinks to one part only.

    Raises:
        InvalidInput: no parts, or shapes that differ.
    """
    if not parts:
        raise InvalidInput("parts is empty; expected at least one RowStatistics")
    for number, part in enumerate(parts):
        for name, got, first in zip(part._fields, part, parts[0], strict=True):
            if got.shape != first.shape:
                raise InvalidInput(
                    f"parts[{number}]: {name} has shape {tuple(got.shape)}; "
                    f"expected {tuple(first.shape)} as in parts[0]"
                )
    lses, entropies, tops = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = torch.logsumexp(lses, 0)
    shares = torch.softmax(lses, 0).masked_fill(lses == -torch.inf, 0.0)
    entropy = (shares * entropies + torch.special.entr(shares)).sum(0)
    return RowStatistics(lse, entropy, tops.amax(0))
