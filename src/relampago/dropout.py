"""Counter-based dropout: whether an attention weight is kept is a pure function of seed, sequence, head, row and key.

The same formula, on 32-bit integers that wrap, runs in torch and in kernels; so forward, backward, every tiling and
every backend drop the same weights. The mixer is MurmurHash3's finaliser (Austin Appleby, public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B = -2048144789, -1028477387  # 0x85ebca6b and 0xc2b2ae35 as signed 32-bit integers
_GOLDEN = -1640531527  # 0x9e3779b9


def mix(h):
    """MurmurHash3's finaliser on int32 values; a shift of a signed integer is masked to be logical."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * _A
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * _B
    return h ^ ((h >> 16) & 0xFFFF)


def threshold(p: float) -> int:
    """A weight is dropped where the upper 24 bits of its hash lie below this."""
    return round(p * (1 << 24))


def seed_words(seed: Tensor) -> tuple[Tensor, Tensor]:
    """A 64-bit seed as two int32 words."""
    return (seed & 0xFFFFFFFF).to(torch.int32), (seed >> 32).to(torch.int32)


def kept(seed: Tensor, stream: Tensor, row: Tensor, key: Tensor, p: float) -> Tensor:
    """True where the weight stays.

    Args:
        seed: int64 scalar.
        stream: int, sequence · heads + head.
        row: int, the row's number within its sequence.
        key: int, the key's number within its sequence; all three broadcast.
        p: the probability of dropping, in [0, 1).
    """
    low, high = seed_words(seed)
    rows = mix(mix(mix(stream.int() ^ high) + row.int() * _GOLDEN) ^ low)
    bits = mix(rows ^ mix(key.int() * _GOLDEN))
    return ((bits >> 8) & 0xFFFFFF) >= threshold(p)
