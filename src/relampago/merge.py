"""merge: the monoid of partial attentions. Split keys anywhere, attend to the parts, merge: the whole.

Split-KV decoding, ring attention and shared prefixes are all a fold of this (FlashAttention, arXiv 2205.14135,
section 3.1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relampago.errors import InvalidInput


def merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of the parts' keys, from each part's (out, lse).

    Args:
        parts: pairs out (B, Lq, H, E) with lse (B, H, Lq), or packed out (T, H, E) with lse (H, T). The same rows
            in each, disjoint keys. A part that shows a row nothing has lse -inf there and changes nothing.

    Returns:
        (out, lse) of the same shapes; out in the widest dtype of the parts. Differentiable.

    Raises:
        InvalidInput: no parts, or shapes that differ.
    """
    if not parts:
        raise InvalidInput("parts is empty; expected at least one pair (out, lse)")
    for number, part in enumerate(parts):
        pair = isinstance(part, tuple | list) and len(part) == 2
        if not pair or not all(isinstance(t, Tensor) for t in part):
            raise InvalidInput(
                f"parts[{number}] is a {type(part).__name__}; expected a pair (out, lse)"
            )
    first_out, first_lse = parts[0]
    for number, (out, lse) in enumerate(parts):
        for name, got, expected in (("out", out, first_out), ("lse", lse, first_lse)):
            if got.shape != expected.shape:
                raise InvalidInput(
                    f"parts[{number}]: {name} has shape {tuple(got.shape)}; "
                    f"expected {tuple(expected.shape)} as in parts[0]"
                )
        rows = tuple(out.shape[:-1])
        if lse.ndim < 2 or tuple(lse.transpose(-1, -2).shape) != rows:
            raise InvalidInput(
                f"parts[{number}]: lse has shape {tuple(lse.shape)}; "
                f"expected heads before rows, for out {tuple(out.shape)}"
            )
    if len(parts) == 1:
        return first_out, first_lse
    lses = torch.stack([lse for _, lse in parts])  # [parts, ..., H, L]
    m = lses.amax(0).detach()
    m = torch.where(m == -math.inf, 0.0, m)
    weights = (lses - m).exp()
    total = weights.sum(0)
    empty = total == 0
    lse = torch.where(empty, -math.inf, m + torch.where(empty, 1.0, total).log())
    shares = weights / torch.where(empty, 1.0, total)
    dtype = widest([out.dtype for out, _ in parts])
    out = sum(
        share.transpose(-1, -2).unsqueeze(-1) * part.to(share.dtype)
        for share, (part, _) in zip(shares, parts, strict=True)
    )
    assert isinstance(out, Tensor)
    return out.to(dtype), lse


def fold_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge` of two, into the first: one pass over out. A part that saw nothing (lse -inf) changes nothing."""
    whole = torch.logaddexp(lse, part_lse)
    share = (part_lse - whole).exp_().masked_fill_(whole == -math.inf, 0.0)
    out.lerp_(part, share.transpose(1, 2)[..., None])
    lse.copy_(whole)


def widest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The dtype that all promote to."""
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found
