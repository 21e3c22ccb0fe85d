"""Sizes and other ints that torch.compile may have made symbols: compared in words that it guards, and as plain ints.

Under Dynamo `n in (1, m)` is False where n is known and m a symbol, whatever its value; `==` makes a guard.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

Shape = tuple[int, ...]


def plain(n: int | None) -> int | None:
    """A plain int, also of a symbol, such as a window that another call had otherwise: a graph of its own for each."""
    return None if n is None else operator.index(n)


def is_one_of(shape: Shape, shapes: Sequence[Shape]) -> bool:
    """Whether a tensor has one of some shapes."""
    return any(shape == s for s in shapes)


def broadcasts(shape: Shape, full: Shape) -> bool:
    """Whether a shape with as many dimensions as the full one broadcasts to it."""
    return len(shape) == len(full) and all(
        n == 1 or n == m for n, m in zip(shape, full, strict=True)
    )
