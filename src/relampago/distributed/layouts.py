"""Which rank holds which tokens. A layout is a value; positions follow from it, and every mask reads positions.

    contiguous            zigzag                    striped
    0 0 0 0 1 1 1 1 …     0 1 2 3 3 2 1 0           0 1 2 3 0 1 2 3 …
    one run each          chunks r and 2P - 1 - r   every P-th token

Zigzag balances causal attention (each rank has an early and a late chunk), striped balances every band (Striped
Attention, arXiv 2311.09431), contiguous suits windows and full attention. A `documents_` layout deals each packed
document out by itself, so that documents are balanced too. Lengths need not divide: remainders go round.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from relampago.errors import InvalidInput

CONTIGUOUS, ZIGZAG, STRIPED = "contiguous", "zigzag", "striped"
KINDS = (CONTIGUOUS, ZIGZAG, STRIPED, "documents_contiguous", "documents_zigzag")


@dataclass(frozen=True)
class Layout:
    """A sequence of tokens over ranks.

    Args:
        kind: one of KINDS.
        length: tokens in all.
        size: ranks.
        documents: where each packed document begins, ascending from 0; None for one document.
    """

    kind: str
    length: int
    size: int
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"layout is {self.kind!r}; expected one of {', '.join(KINDS)}")
        for name in ("length", "size"):
            value, least = getattr(self, name), 0 if name == "length" else 1
            if not isinstance(value, int) or value < least:
                raise InvalidInput(f"{name} is {value!r}; expected an int >= {least}")
        starts = self.documents
        if starts is not None and (
            not starts
            or starts[0] != 0
            or any(b <= a for a, b in itertools.pairwise(starts))
            or starts[-1] >= max(self.length, 1)
        ):
            raise InvalidInput(
                f"documents is {starts[:16]}; expected ascending starts from 0, below the length {self.length}"
            )

    def positions(self, rank: int) -> Tensor:
        """The global positions a rank holds, ascending: int64 on the CPU."""
        return _positions(self)[rank]

    def count(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return self.positions(rank).numel()

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(p.numel() for p in _positions(self))

    def joined(self, members: int) -> tuple[Tensor, ...]:
        """Positions of each group of `members` neighbouring ranks together, ascending."""
        return _joined(self, members)


@functools.lru_cache(maxsize=32)
def _positions(layout: Layout) -> tuple[Tensor, ...]:
    if layout.kind == STRIPED:
        return tuple(
            torch.arange(min(r, layout.length), layout.length, layout.size)
            for r in range(layout.size)
        )
    pieces: list[list[Tensor]] = [[] for _ in range(layout.size)]
    turn = 0  # whose turn it is to take a token that does not divide
    for start, end in _documents(layout):
        chunks = layout.size * (2 if layout.kind.endswith(ZIGZAG) else 1)
        share, rest = divmod(end - start, chunks)
        for chunk in range(chunks):
            owner = min(chunk, 2 * layout.size - 1 - chunk)
            stop = start + share + ((chunk - turn) % chunks < rest)
            pieces[owner].append(torch.arange(start, stop))
            start = stop
        turn += rest
    return tuple(torch.cat(p) for p in pieces)


def _documents(layout: Layout) -> list[tuple[int, int]]:
    """What is dealt out at a time: (start, end)."""
    if not layout.kind.startswith("documents_") or layout.documents is None:
        return [(0, layout.length)]
    return list(zip(layout.documents, (*layout.documents[1:], layout.length), strict=True))


@functools.lru_cache(maxsize=32)
def _joined(layout: Layout, members: int) -> tuple[Tensor, ...]:
    every = _positions(layout)
    groups = [every[i : i + members] for i in range(0, len(every), members)]
    return tuple(torch.cat(group).sort().values if members > 1 else group[0] for group in groups)
