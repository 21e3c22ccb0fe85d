"""Rotary embeddings as `flash_attn.layers.rotary` has them (RoFormer, arXiv 2104.09864), in plain torch.

Rotations are computed in fp32 (fp64 for fp64) and rounded once. In-place forms write to their argument, as the names
say, and are known to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.flash_attn.options import sequence_of
from relampago.integrations.refusals import expect, refuses


class _Rotate(torch.autograd.Function):
    """x turned by the angles' cos and sin; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        turned = rotated(x, cos, sin, interleaved)
        if not inplace:
            return turned
        ctx.mark_dirty(x)
        return x.copy_(turned)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        cos, sin = ctx.saved_tensors
        return rotated(grads[0], cos, -sin, ctx.interleaved), None, None, None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first dims of each head; cos and sin (…, L, dims / 2) broadcast over heads of x (…, L, heads, D)."""
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    head = x[..., : 2 * half].to(wide)
    if interleaved:
        a, b = head[..., ::2], head[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = head[..., :half], head[..., half:]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def at_positions(table: Tensor, positions: Tensor) -> Tensor:
    """Rows of a table of cos or sin; positions beyond it take the last, as nothing there is ever used."""
    return table[positions.clamp(0, table.shape[0] - 1)]


def rotate_at(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Turn each token by its position.

    Args:
        x: (…, L, heads, D).
        cos: (positions, dims / 2), dims at most D.
        sin: likewise.
        positions: int, (…, L) or a suffix of that.
        interleaved: turn pairs (0, 1), (2, 3), …; else the first half with the second.
        inplace: write the result to x.
    """
    return _Rotate.apply(
        x, at_positions(cos, positions), at_positions(sin, positions), interleaved, inplace
    )  # type: ignore[return-value]


@refuses
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turn the first dims of each head by the token's position.

    Args:
        x: (B, L, heads, D), or packed (T, heads, D) with cu_seqlens.
        cos: (positions, dims / 2).
        sin: likewise.
        interleaved: pairs of neighbours (GPT-J) instead of halves (GPT-NeoX).
        inplace: write the result to x.
        seqlen_offsets: the first token's position, for all or per sequence (B,).
        cu_seqlens: int32 (B + 1,), where sequences begin.
        max_seqlen: the longest sequence; needed by flash-attn's kernel only.

    Returns:
        x's shape and dtype.

    Raises:
        Refused: an argument is wrong; a RuntimeError.
    """
    rank = 4 if cu_seqlens is None else 3
    expect(x.ndim == rank, "x has {} dimensions; expected {}", x.ndim, rank)
    _check_tables(x, cos, sin)
    _check_offsets(seqlen_offsets, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    if cu_seqlens is None:
        step = torch.arange(x.shape[1], device=x.device)
        offset = seqlen_offsets
        positions = step + (offset[:, None] if isinstance(offset, Tensor) else offset)
    else:
        which = sequence_of(cu_seqlens, x.shape[0])
        positions = torch.arange(x.shape[0], device=x.device) - cu_seqlens[which]
        offset = seqlen_offsets
        positions = positions + (offset[which] if isinstance(offset, Tensor) else offset)
    return rotate_at(x, cos, sin, positions, interleaved=interleaved, inplace=inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """`apply_rotary_emb` from position 0, or with a row of cos and sin per token of each sequence.

    Args:
        x: (B, L, heads, D).
        cos: (L, dims / 2) or (B, L, dims / 2).
        sin: likewise.
        interleaved: as in `apply_rotary_emb`.

    Returns:
        x's shape and dtype.
    """
    return rotated(x, cos, sin, interleaved)


@refuses
def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turn queries and keys of a packed tensor, in place.

    Args:
        qkv: (B, L, 3, H, D), or (B, L, H + 2·G, D) with num_heads_q.
        cos: (positions, dims / 2).
        sin: likewise.
        cos_k: for keys, if they differ (XPos).
        sin_k: likewise.
        interleaved: as in `apply_rotary_emb`.
        seqlen_offsets: as in `apply_rotary_emb`.
        num_heads_q: H, where heads are packed side by side.

    Returns:
        qkv.

    Raises:
        Refused: an argument is wrong.
    """
    if qkv.ndim == 5:
        expect(
            qkv.shape[2] == 3, "qkv has shape {}; expected 3 in the third place", tuple(qkv.shape)
        )
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        expect(
            qkv.ndim == 4 and num_heads_q is not None,
            "num_heads_q is {}; expected an int, with qkv of 4 dimensions",
            num_heads_q,
        )
        assert num_heads_q is not None
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        expect(
            heads_k > 0 and qkv.shape[2] == num_heads_q + 2 * heads_k,
            "qkv has {} heads; expected num_heads_q = {} and twice as many as keys have",
            qkv.shape[2],
            num_heads_q,
        )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


@refuses
def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Turn the keys of a packed tensor, in place.

    Args:
        kv: (B, L, 2, G, D).
        cos: (positions, dims / 2).
        sin: likewise.
        interleaved: as in `apply_rotary_emb`.
        seqlen_offsets: as in `apply_rotary_emb`.

    Returns:
        kv.

    Raises:
        Refused: an argument is wrong.
    """
    shape = tuple(kv.shape)
    expect(kv.ndim == 5 and shape[2] == 2, "kv has shape {}; expected (B, L, 2, G, D)", shape)
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        expect(
            table.ndim == 2 and table.shape == cos.shape and 2 * table.shape[1] <= x.shape[-1],
            "{} is {}; expected (positions, dims / 2), dims at most {}",
            name,
            tuple(table.shape),
            x.shape[-1],
        )
        expect(table.device == x.device, "{} is on {}; expected {}", name, table.device, x.device)


def _check_offsets(offsets: Any, batch: int) -> None:
    if isinstance(offsets, Tensor):
        got, holds = tuple(offsets.shape), tuple(offsets.shape) == (batch,)
        holds = holds and not offsets.is_floating_point()
    else:
        got, holds = offsets, isinstance(offsets, int | torch.SymInt)
    expect(holds, "seqlen_offsets is {!r}; expected an int or ints ({},)", got, batch)


class RotaryEmbedding(torch.nn.Module):
    """`flash_attn.layers.rotary.RotaryEmbedding`: tables kept and grown as needed; XPos (arXiv 2212.10554) with a base.

    Args:
        dim: how many dims of each head are turned.
        base: of the angles' geometric series.
        interleaved: as in `apply_rotary_emb`.
        scale_base: XPos' base; None for plain rotations.
        device: where the frequencies live.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        step = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-step / dim), persistent=False)
        scale = None if scale_base is None else (step + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Turn queries and keys in place.

        Args:
            qkv: (B, L, 3, H, D), or (B, L, H + 2·G, D) with num_heads_q; the queries (B, L, H, D) if kv is given.
            kv: (B, L, 2, G, D), or None.
            seqlen_offset: the first token's position, for all or per sequence (B,).
            max_seqlen: up to which position tables are needed, where offsets are a tensor.
            num_heads_q: H, where heads are packed side by side.

        Returns:
            qkv, or (q, kv).
        """
        needed = max_seqlen
        if needed is None and isinstance(seqlen_offset, int):
            needed = qkv.shape[1] + seqlen_offset
        cos, sin, cos_k, sin_k = self._tables_for(needed, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _tables_for(self, needed: int | None, like: Tensor) -> tuple[Tensor, ...]:
        """cos and sin for queries, then for keys: at least `needed` rows; all there are if None."""
        kept = self._tables
        fits = kept and kept[0].device == like.device and kept[0].dtype == like.dtype
        if fits and (needed is None or needed <= kept[0].shape[0]):
            return kept
        expect(needed is not None, "max_seqlen is None; expected an int where offsets are a tensor")
        length = int(needed or 0)
        place = torch.arange(length, device=like.device, dtype=torch.float32)
        step = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float32)
        angle = torch.outer(place, self.base ** (-step / self.dim))
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is None:
            cos, sin = cos.to(like.dtype), sin.to(like.dtype)
            self._tables = (cos, sin, cos, sin)
        else:
            assert isinstance(self.scale, Tensor)
            power = (place - length // 2) / self.scale_base
            scale = self.scale.to(like.device) ** power[:, None]
            tables = (cos * scale, sin * scale, cos / scale, sin / scale)
            self._tables = tuple(table.to(like.dtype) for table in tables)
        return self._tables
