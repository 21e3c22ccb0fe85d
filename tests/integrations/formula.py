"""Attention as its formula reads, for the drop-ins' tests: what they should give is written here once more, by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def seen(
    rows: int,
    keys: int,
    *,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    first: int = 0,
    chunk: int = 0,
) -> Tensor:
    """Which keys each row sees, as flash-attn's documentation says: row i stands at i + keys - rows; -1 is no bound."""
    i = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)[None]
    mask = j >= first
    if causal:
        mask = mask & (j <= i)
    if left >= 0:
        mask = mask & (j >= i - left)
    if right >= 0:
        mask = mask & (j <= i + right)
    if chunk:
        mask = mask & (j.div(chunk, rounding_mode="floor") == i.div(chunk, rounding_mode="floor"))
    return mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    kept: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of (L, H, D) tensors in dtype; mask and bias broadcast to (H, Lq, Lk), kept is a dropout factor."""
    q, k, v = (t.to(dtype).transpose(-3, -2) for t in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        i = torch.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2]
        distance = (i - torch.arange(s.shape[-1])).abs()
        s = s - alibi.to(dtype)[..., None, None] * distance
    if bias is not None:
        s = s + bias.to(dtype)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    extended = s
    if sinks is not None:
        extended = torch.cat([s, sinks.to(dtype).view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    lse = extended.logsumexp(-1) if mask is None else _logsumexp(extended)
    p = (s - torch.where(lse.isfinite(), lse, 0)[..., None]).exp()
    if mask is not None:
        p = p.masked_fill(~mask, 0)  # and no NaN in the gradients of rows that see nothing
    if kept is not None:
        p = p * kept.to(dtype)
    return (p @ v).transpose(-3, -2), lse


def _logsumexp(s: Tensor) -> Tensor:
    """-inf for a row that sees nothing, without NaN in its gradient."""
    nothing = (s == -torch.inf).all(-1)
    return s.masked_fill(nothing[..., None], 0).logsumexp(-1).masked_fill(nothing, -torch.inf)


def both(
    *args: Any, dtype: torch.dtype, **kwargs: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Standard attention in dtype, and the fp64 oracle."""
    found = (attend(*args, dtype=d, **kwargs) for d in (dtype, torch.float64))
    standard, oracle = ({"out": out, "lse": lse} for out, lse in found)
    return standard, oracle
