"""What a row sees, by global positions: every band mask, as one run of keys per position.

A shard asks `Sight.runs(positions)`; where its keys lie does not matter here. A Sight holds plain numbers, so that it
can key the caches of schedules and cross the border of a custom op.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago import validate
from relampago.errors import InvalidInput, Unsupported
from relampago.masks.spec import (
    All,
    Causal,
    Document,
    Mask,
    Prefix,
    Window,
    check_prefix,
    check_window,
)
from relampago.shapes import plain

Starts = tuple[int, ...]


class Sight(NamedTuple):
    """A row at position p sees keys max(starts) <= k < min(ends) over all that is given here."""

    length: int
    left: int | None = None
    right: int | None = None
    prefixes: tuple[int | Starts, ...] = ()  # each an int, or one per sequence
    documents: tuple[tuple[Starts, ...], ...] = ()  # each one tuple of starts, or one per sequence

    @staticmethod
    def of(
        length: int,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        mask: Any = None,
        documents: Starts | None = None,
    ) -> Sight:
        """From what a user writes. Reads the values of a Document or a Prefix tensor, which waits for a device.

        Raises:
            InvalidInput: mask is no mask, or a side or length is no number of keys.
            Unsupported: mask is no band: a BlockSparse, a dense tensor, a function.
        """
        validate.window_sides(window)
        left = right = None
        prefixes: list[int | Starts] = []
        tables: list[tuple[Starts, ...]] = [(documents,)] if documents is not None else []
        parts: list[Any] = [Causal()] if causal else []
        parts += [Window(*window)] if window is not None else []
        parts += mask.masks if isinstance(mask, All) else [] if mask is None else [mask]
        for part in parts:
            if isinstance(part, Causal):
                right = 0 if right is None else min(right, 0)
            elif isinstance(part, Window):
                check_window(part)
                left, right = _least(left, part.left), _least(right, part.right)
            elif isinstance(part, Prefix):
                check_prefix(part)
                n = part.length
                prefixes.append(tuple(n.tolist()) if isinstance(n, Tensor) else operator.index(n))
            elif isinstance(part, Document):
                starts = part.starts if part.starts.ndim == 2 else part.starts[None]
                tables.append(tuple(tuple(row) for row in starts.tolist()))
            elif isinstance(part, Mask | Tensor) or callable(part):
                raise Unsupported(
                    f"mask is a {type(part).__name__}; over several devices only Causal, Window, Prefix and Document"
                )
            else:
                raise InvalidInput(f"mask is a {type(part).__name__}; expected a mask as Causal()")
        tokens = operator.index(length)
        return Sight(tokens, plain(left), plain(right), tuple(prefixes), tuple(tables))

    @property
    def batch(self) -> int:
        """1, or the number of sequences that differ in what they see."""
        sizes = [len(p) for p in self.prefixes if isinstance(p, tuple)]
        return max([1, *sizes, *(len(table) for table in self.documents)])

    def runs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Each position's keys [start, end), int64 (1 or B, n), with start <= end."""
        p = positions[None]
        start, end = torch.zeros_like(p), torch.full_like(p, self.length)
        if self.left is not None:
            start = (p - self.left).clamp(0, self.length)
        if self.right is not None:
            end = (p + self.right + 1).clamp(0, self.length)
        for prefix in self.prefixes:
            most = p.new_tensor(prefix).reshape(-1, 1).clamp(max=self.length)
            end = torch.minimum(end, torch.maximum(p + 1, most))
        for table in self.documents:
            edges = [_document(row, positions, self.length) for row in table]
            start = torch.maximum(start, torch.stack([first for first, _ in edges]))
            end = torch.minimum(end, torch.stack([last for _, last in edges]))
        start, end = torch.broadcast_tensors(start, end)
        return torch.minimum(start, end), end


def _document(starts: Starts, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Each position's document [start, end); nothing before the first start."""
    edges = positions.new_tensor([0, *starts, length]).clamp(max=length)
    number = torch.searchsorted(edges[1:-1].contiguous(), positions, right=True)
    start, end = edges[number], edges[number + 1]
    return torch.where(number == 0, 0, start), torch.where(number == 0, 0, end)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
