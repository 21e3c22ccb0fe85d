"""Casts to e4m3 with scales: value = values · scale, one scale per tensor, head, or block of a head's tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from relampago.errors import InvalidInput
from relampago.shapes import is_one_of

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BEYOND = 464.0  # what is above no longer rounds to it
BLOCK = 128  # tokens that share a scale: a tile of keys holds one or two of a kernel's, never parts of two
# A kernel's sums are in units of the last scale it met: their ratios must stay within fp32.
LEAST_SCALE, MOST_SCALE = 2.0**-40, 2.0**40

Per = Literal["tensor", "head", "block"]


class Quantised(NamedTuple):
    """A tensor in e4m3.

    Args:
        values: e4m3, shaped like the tensor.
        scales: fp32 (1, 1, 1) per tensor, (B, heads, 1) per head, (B, heads, blocks of `BLOCK` tokens) per block.
        saturated: int64 scalar: how many entries were beyond the range (±464, which rounds to ±448) and became ±448
            all the same; None if not asked for.
    """

    values: Tensor
    scales: Tensor
    saturated: Tensor | None = None


def quantise(
    x: Tensor,
    *,
    per: Per = "block",
    scales: Tensor | None = None,
    count: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Quantised:
    """Cast to e4m3, to the nearest, ties to even; what is beyond the range saturates. NaN stays NaN.

    Nothing waits for the device. Scales of one's own finding are the largest entry by 448, within 2^±40.

    Args:
        x: (B, L, heads, D), or packed (T, heads, D) with cu_seqlens.
        per: how many scales there are, if they are to be found.
        scales: fp32, given instead; of one of the three shapes of `Quantised`.
        count: also count what saturates.
        cu_seqlens: int32 (B + 1,), where packed sequences begin; rows of none become 0.
        max_seqlen: the longest packed sequence.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    _check(x, per, cu_seqlens, max_seqlen)
    where, batch, blocks = slots(x, cu_seqlens, max_seqlen)
    wide, owned = x.reshape(-1, *x.shape[-2:]).float(), where >= 0
    heads = x.shape[-2]
    if scales is None:
        scales = _found(wide, where, per, batch, blocks)
    else:
        check_scales("scales", scales, batch, heads, blocks, x.device)
    scaled = wide * of_rows(scales, where, batch, blocks).reciprocal()[..., None]
    scaled = torch.where(owned[:, None, None], scaled, 0.0)
    return Quantised(
        saturated(scaled).view(x.shape), scales, (scaled.abs() > BEYOND).sum() if count else None
    )


def saturated(scaled: Tensor) -> Tensor:
    """e4m3 of numbers that are divided by their scales already; what is beyond the range becomes ±448."""
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3)


def dequantise(
    values: Tensor,
    scales: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """The inverse of `quantise`, in fp32.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    _check(values, "block", cu_seqlens, max_seqlen)
    where, batch, blocks = slots(values, cu_seqlens, max_seqlen)
    check_scales("scales", scales, batch, values.shape[-2], blocks, values.device)
    rows = values.reshape(-1, *values.shape[-2:]).float()
    return (rows * of_rows(scales, where, batch, blocks)[..., None]).view(values.shape)


def slots(x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> tuple[Tensor, int, int]:
    """Each row's sequence · blocks + block, -1 for rows of no sequence; how many sequences; blocks of the longest."""
    if cu_seqlens is None:
        batch, length = x.shape[0], x.shape[1]
        blocks = max(1, -(-length // BLOCK))
        row = torch.arange(batch * length, device=x.device)
        return row // max(1, length) * blocks + row % max(1, length) // BLOCK, batch, blocks
    assert max_seqlen is not None
    batch, blocks = cu_seqlens.shape[0] - 1, max(1, -(-max_seqlen // BLOCK))
    row = torch.arange(x.shape[0], device=x.device)
    which = torch.searchsorted(cu_seqlens.long(), row, right=True) - 1
    owned = which < batch
    which = which.clamp(max=max(0, batch - 1))
    block = ((row - cu_seqlens.long()[which]) // BLOCK).clamp(max=blocks - 1)
    return torch.where(owned, which * blocks + block, -1), batch, blocks


def of_rows(scales: Tensor, where: Tensor, batch: int, blocks: int) -> Tensor:
    """Each row's scales, (rows, heads or 1)."""
    if scales.shape == (1, 1, 1) or batch == 0:
        return scales.new_ones(1, 1) if batch == 0 else scales.view(1, 1)
    where = where.clamp(min=0)
    block = where % blocks if scales.shape[2] > 1 else where * 0
    return scales[where // blocks, :, block]


def _found(wide: Tensor, where: Tensor, per: Per, batch: int, blocks: int) -> Tensor:
    """Scales by the largest entries."""
    heads = wide.shape[1]
    largest = wide.new_zeros(batch * blocks + 1, heads)  # the last for rows of no sequence
    if wide.numel():
        index = torch.where(where < 0, batch * blocks, where)
        most = wide.abs().nan_to_num(nan=0.0).amax(-1)
        largest.scatter_reduce_(0, index[:, None].expand(-1, heads), most, "amax")
    largest = largest[:-1].view(batch, blocks, heads).transpose(1, 2)
    if per == "head":
        largest = largest.amax(2, keepdim=True)
    elif per == "tensor":
        largest = largest.amax().view(1, 1, 1) if largest.numel() else wide.new_zeros(1, 1, 1)
    scales = largest * (1.0 / LARGEST)  # a division by a number rounds otherwise on CUDA
    return scales.clamp(LEAST_SCALE, MOST_SCALE).contiguous()


def _check(x: Tensor, per: str, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    rank = 4 if cu_seqlens is None else 3
    form = "(batch, length, heads, dim)" if rank == 4 else "(total, heads, dim) with cu_seqlens"
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != rank:
        what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(f"x is {what}; expected a float tensor {form}")
    if per not in ("tensor", "head", "block"):
        raise InvalidInput(f"per is {per!r}; expected 'tensor', 'head' or 'block'")
    if cu_seqlens is not None and max_seqlen is None:
        raise InvalidInput("max_seqlen is None; expected an int, with cu_seqlens")


def check_scales(
    name: str, scales: object, batch: int, heads: int, blocks: int, device: torch.device
) -> None:
    """Refuse scales that are no fp32 tensor of one of the three shapes."""
    shapes = ((1, 1, 1), (batch, heads, 1), (batch, heads, blocks))
    if not isinstance(scales, Tensor):
        raise InvalidInput(f"{name} is {scales!r}; expected a tensor of one of {shapes}")
    if not is_one_of(tuple(scales.shape), shapes):
        raise InvalidInput(f"{name} has shape {tuple(scales.shape)}; expected one of {shapes}")
    if scales.dtype != torch.float32 or scales.device != device:
        raise InvalidInput(
            f"{name} is {scales.dtype} on {scales.device}; expected torch.float32 on {device}"
        )
