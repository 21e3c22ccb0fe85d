"""The random-sign Hadamard rotation, FlashAttention-3's incoherent processing (arXiv 2407.08608, section 3.3).

Q and K multiplied by one orthogonal matrix have the same scores; an outlier is spread over its head dim, so that
rounding to e4m3 costs less. A dim that is no power of two is rotated in parts: 96 as 64 + 32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from relampago.errors import InvalidInput


def rotate(x: Tensor, *, inverse: bool = False) -> Tensor:
    """x times the rotation of its last dimension, in x's dtype; computed in fp32 or better.

    The signs are fixed per dim, the same in all calls: tensors rotated apart may meet, as in a cache.

    Args:
        x: (…, D), a float tensor.
        inverse: undo it.

    Raises:
        InvalidInput: x is no float tensor, or has no dimension.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0:
        what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(f"x is {what}; expected a float tensor (…, dim)")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sign = signs(x.shape[-1], x.device).to(wide.dtype)
    if not inverse:
        wide = wide * sign
    turned = torch.cat([_hadamard(part) for part in wide.split(parts(x.shape[-1]), -1)], -1)
    return (turned * sign if inverse else turned).to(x.dtype)


def parts(dim: int) -> list[int]:
    """A dim as falling powers of two."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


@functools.lru_cache(maxsize=64)
def signs(dim: int, device: torch.device) -> Tensor:
    """(dim,) of 1 and -1, by a generator of its own: the same on every machine."""
    generator = torch.Generator().manual_seed(dim)
    drawn = torch.randint(0, 2, (dim,), generator=generator, dtype=torch.int64)
    return (2 * drawn - 1).float().to(device)


def _hadamard(x: Tensor) -> Tensor:
    """The fast Walsh-Hadamard transform of the last dimension, a power of two, scaled to keep lengths."""
    dim, step = x.shape[-1], 1
    while step < dim:
        pairs = x.unflatten(-1, (-1, 2, step))
        a, b = pairs.unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return x * dim**-0.5
