"""What the suite runs on: a card; without one, Triton's interpreter, in which its tests' bodies are rehearsed briefly.

CONTRIBUTING.md says how.
"""

from __future__ import annotations

from typing import Any

import torch

from relampago.cases import Case

PRESENT = torch.cuda.is_available()
DEVICE = "cuda" if PRESENT else "cpu"
HOPPER = PRESENT and torch.cuda.get_device_capability() == (9, 0)
KERNELS = ("triton", "gluon_sm90") if HOPPER else ("triton",)
LENGTHS = (77, 1000, 2049) if PRESENT else (77,)  # one tile and a part, many, one row over many


def sized(length: int, dim: int = 64, **options: Any) -> Case:
    """A problem of a size that a card deserves: two sequences, GQA."""
    name = " ".join([f"{length} d{dim}", *map(str, options)])
    return Case(
        name=name, len_q=length, len_k=length, heads=4, kv_heads=2, dim=dim, options=options
    )
