"""Tile counters: what the dynamic schedule draws from. At 0 between launches, so that none needs a memset."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from relampago.tape import supplied

WORDS = 4  # int32 of a cell: a pointer that is not aligned to 16 bytes would be compiled for apart


class Counters:
    """Counters of a device that stand at 0; every launch leaves its own so.

    Launches of a stream never overlap and share one. A CUDA graph may be replayed on any stream, so that each launch in
    it takes one for good.
    """

    def __init__(self, device: torch.device) -> None:
        self.cells = torch.zeros((1 << 12, WORDS), dtype=torch.int32, device=device)
        self.used = 0  # rows of cells: pointers that are not aligned would be compiled for apart
        self.of_stream: dict[int, Tensor] = {}

    def take(self) -> Tensor | None:
        """One that nobody has; None when all are taken."""
        if self.used == self.cells.shape[0]:
            return None
        self.used += 1
        return self.cells[self.used - 1]


COUNTERS: dict[int, Counters] = {}


def counter(device: torch.device) -> Tensor:
    """A counter at 0 for one launch on the current stream, in every call another one perhaps."""
    return supplied(functools.partial(_counter, device))


def _counter(device: torch.device) -> Tensor:
    index = device.index or 0
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if index not in COUNTERS and not capturing:
        COUNTERS[index] = Counters(device)
    counters = COUNTERS.get(index)
    found = None
    if counters is not None and capturing:
        found = counters.take()
    elif counters is not None:
        stream = torch._C._cuda_getCurrentRawStream(index) if device.type == "cuda" else 0
        if stream not in counters.of_stream and (taken := counters.take()) is not None:
            counters.of_stream[stream] = taken
        found = counters.of_stream.get(stream)
    return torch.zeros(WORDS, dtype=torch.int32, device=device) if found is None else found
