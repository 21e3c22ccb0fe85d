"""The machine on which the papers count: a large slow memory and a small fast one.

FlashAttention's claims (arXiv 2205.14135, section 3.2) are about the elements that move between
the two, not about arithmetic. Here every move goes through `SlowMemory.load` or `.store` and is
counted, and all that torch allocates inside `with slow.fast:` lives in fast memory, where its
room may be limited: the limit is measured, not believed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EVERY = slice(None)


class FastMemory(TorchDispatchMode):
    """On-chip SRAM: sees each operation of torch and adds up the elements alive at once.

    Views and in-place results take no new room. A tensor's room is free again when Python drops
    it. `capacity` is the most elements allowed at once; None measures only.
    """

    def __init__(self, capacity: int | None = None):
        super().__init__()
        self.capacity = capacity
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in known:
                self._hold(storage, storage.nbytes() // tensor.element_size())
        return result

    def _hold(self, storage: torch.UntypedStorage, elements: int) -> None:
        self.live += elements
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, elements)
        if self.capacity is not None and self.live > self.capacity:
            raise MemoryError(
                f"fast memory: {self.live} elements at once, room for {self.capacity}"
            )

    def _release(self, elements: int) -> None:
        self.live -= elements


class SlowMemory:
    """HBM: matrices by name, and how many elements of each were loaded and stored."""

    def __init__(self, capacity: int | None = None, **matrices: Tensor):
        self.fast = FastMemory(capacity)
        self.loads: Counter[str] = Counter()
        self.stores: Counter[str] = Counter()
        self._matrices = dict(matrices)

    def __getitem__(self, name: str) -> Tensor:
        """Look at a matrix from outside the machine; nothing is counted."""
        return self._matrices[name]

    @property
    def moved(self) -> int:
        """Elements moved in either direction so far."""
        return self.loads.total() + self.stores.total()

    def create(self, name: str, rows: int, cols: int, fill: float | None = None) -> None:
        """Make room for a result. `fill` initialises it, which is a store of every element."""
        like = next(iter(self._matrices.values()))
        self._matrices[name] = like.new_full((rows, cols), torch.nan if fill is None else fill)
        if fill is not None:
            self.stores[name] += rows * cols

    def load(self, name: str, rows: slice = EVERY, cols: slice = EVERY) -> Tensor:
        """Copy a block into fast memory."""
        block = self._matrices[name][rows, cols].clone()
        self.loads[name] += block.numel()
        return block

    def store(self, name: str, block: Tensor, rows: slice = EVERY, cols: slice = EVERY) -> None:
        """Copy a block out of fast memory."""
        self._matrices[name][rows, cols] = block
        self.stores[name] += block.numel()


def blocks(length: int, size: int) -> Iterator[slice]:
    """Cut 0..length into slices of `size` rows; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def ceil_div(a: int, b: int) -> int:
    """Round the quotient up."""
    return -(-a // b)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
