"""Cases of the catalogue at sizes for an interpreter: fewer heads and tiles, the same paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from relampago.cases import Case, find
from relampago.masks.blocks import BlockSparse


def _checker(g: torch.Generator) -> BlockSparse:
    tiles = torch.rand(2, 2, 3, 3, generator=g) < 0.6
    return BlockSparse.from_tiles(tiles, shape=(40, 42), block=(16, 16))


SIZES: dict[str, dict[str, Any]] = {
    "mqa": {"heads": 3},
    "window-causal": {"len_q": 70, "len_k": 100},
    "block-sparse": {"len_q": 40, "len_k": 42, "options": {"mask": _checker}},
}
# weights are 0 or 1 but for few rows: standard attention's error in them, the measure, needs them all
WHOLE = ("large-values",)


def small(name: str) -> Case:
    """A case by name: two heads share keys, unless what its options make counts its heads."""
    case = find(name)
    tied = any(callable(value) for value in case.options.values())
    if name in WHOLE or (tied and name not in SIZES):
        return case
    return replace(case, **{"heads": 2, "kv_heads": 1, **SIZES.get(name, {})})
