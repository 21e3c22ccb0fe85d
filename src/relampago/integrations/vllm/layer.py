"""One attention layer of an engine: tokens go into pages, queries attend to them. Knows no vLLM: any engine will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relampago.api import attention_varlen
from relampago.cache import CacheView
from relampago.decode import attention_decode
from relampago.merge import merge
from relampago.quant.cast import saturated


@dataclass
class Batch:
    """Requests of one step: prompts, parts of prompts and single tokens side by side.

    Args:
        cu_seqlens_q: int32 (requests + 1,), where each request's tokens begin.
        lengths: int32 (requests,), keys each request has, those of this step included.
        table: int32 (requests, most), pages in order.
        tokens: rows of the batch that count.
        longest_q: the longest request of this step.
        causal: whether tokens see only what stands before them.
        shared: keys of a prefix that all requests share, whole pages; 0 for none.
    """

    cu_seqlens_q: Tensor
    lengths: Tensor
    table: Tensor
    tokens: int
    longest_q: int
    causal: bool = True
    shared: int = 0


@dataclass
class Layer:
    """What stays the same from step to step.

    Args:
        scale: factor of q·kᵀ.
        window: (left, right) in keys, None for unbounded; None for no window.
        softcap: bound of the scores, or None.
        alibi_slopes: (H,), or None.
        sinks: (H,), or None.
    """

    scale: float
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.options = {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
        }

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch to its pages. Nothing waits for the device: it can be captured in a graph.

        Args:
            q: (T, H, D), rows beyond the batch's tokens may be anything.
            k_pages: (pages, page, G, D), any strides.
            v_pages: (pages, page, G, E).
            batch: the step.
            k_scale: fp32 (G,), what keys are multiplied by, where pages are float8_e4m3fn.
            v_scale: likewise of values.

        Returns:
            (tokens, H, E).
        """
        q = q[: batch.tokens]

        def keys(lengths: Tensor, table: Tensor) -> CacheView:
            return CacheView(k_pages, v_pages, lengths, table, k_scale, v_scale)

        if batch.shared and self.window is None and self.alibi_slopes is None:
            return self._cascade(q, keys, k_pages.shape[1], batch)
        view = keys(batch.lengths, batch.table)
        words = {**self.options, "sinks": self.sinks, "causal": batch.causal}
        if batch.longest_q == 1 and batch.tokens == len(batch.lengths):
            return attention_decode(q[:, None], view, **words)[:, 0]
        return attention_decode(
            q, view, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=batch.longest_q, **words
        )

    def attend_unpaged(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Attention of a batch to this step's own tokens, as encoders have it.

        Args:
            q: (T, H, D).
            k: (T, G, D).
            v: (T, G, E).
            batch: the step.

        Returns:
            (tokens, H, E).
        """
        q, k, v = (t[: batch.tokens] for t in (q, k, v))
        cu, longest = batch.cu_seqlens_q, batch.longest_q
        words = {**self.options, "sinks": self.sinks, "causal": batch.causal}
        return attention_varlen(q, k, v, cu, cu, longest, longest, **words)

    def _cascade(
        self, q: Tensor, keys: Callable[[Tensor, Tensor], CacheView], page: int, batch: Batch
    ) -> Tensor:
        """All tokens attend to the shared prefix as one sequence, then each request to the rest; the parts merge."""
        tokens, n, device = batch.tokens, batch.shared // page, q.device
        common = torch.full((1,), n * page, dtype=torch.int32, device=device)
        prefix = keys(common, batch.table[:1, :n])
        rest = keys(batch.lengths - n * page, batch.table[:, n:])
        all_rows = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        first = attention_decode(
            q, prefix, cu_seqlens_q=all_rows, max_seqlen_q=tokens, causal=False, return_lse=True, **self.options
        )  # fmt: skip
        second = attention_decode(
            q, rest, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=batch.longest_q, causal=batch.causal,
            return_lse=True, sinks=self.sinks, **self.options,
        )  # fmt: skip
        return merge(first, second)[0]


def write(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Put tokens into pages, in place; into those of float8_e4m3fn divided by their scale, and saturated.

    Args:
        k: (T, G, D).
        v: (T, G, E).
        k_pages: (pages, page, G, D).
        v_pages: (pages, page, G, E).
        slots: int (tokens,), page · page size + place; -1 for padding, which goes to page 0, whom nobody owns.
        k_scale: fp32 (G,), where pages are float8_e4m3fn.
        v_scale: likewise of values.
    """
    n, page = slots.shape[0], k_pages.shape[1]
    slots = slots.clamp(min=0)
    where = (slots // page, slots % page)
    for new, pages, scale in ((k[:n], k_pages, k_scale), (v[:n], v_pages, v_scale)):
        if scale is None:
            pages.index_put_(where, new.to(pages.dtype))
        else:
            cast = saturated(new.float() / scale[:, None])
            pages.view(torch.uint8).index_put_(where, cast.view(torch.uint8))
