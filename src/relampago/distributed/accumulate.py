"""Partial results put together, in fp32 (or fp64), and what gradients need of the whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relampago.problem import accumulate_dtype
from relampago.shards import with_sinks


class Output:
    """Running (out, lse) of some rows over parts of their keys. out (B, L, H, E), lse (B, H, L)."""

    def __init__(self, q: Tensor, dim_v: int) -> None:
        self.shape = (*q.shape[:-1], dim_v)
        self.like = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def start(self, out: Tensor, lse: Tensor) -> None:
        """Take over what all rows got from the first keys."""
        assert self.out is None
        self.out, self.lse = out, lse

    def put(self, rows: slice, heads: slice, out: Tensor, lse: Tensor) -> None:
        """Set some rows of some heads, which nothing else adds to."""
        self._need()
        assert self.out is not None
        assert self.lse is not None
        self.out[:, rows, heads] = out
        self.lse[:, heads, rows] = lse

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse), the sinks taken in."""
        self._need()
        assert self.out is not None
        assert self.lse is not None
        return with_sinks(self.out, self.lse, sinks, dtype)

    def _need(self) -> None:
        if self.out is None:
            dtype = accumulate_dtype(self.like.dtype)
            batch, length, heads = self.shape[:3]
            self.out = self.like.new_zeros(self.shape, dtype=dtype)
            self.lse = self.like.new_full((batch, heads, length), -math.inf, dtype=dtype)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(H,): this rank's rows' share. A sink's weight is exp(sink - lse), and what it takes away is delta."""
    weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
