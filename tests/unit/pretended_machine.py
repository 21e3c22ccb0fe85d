"""The machine that `pretended_gluon` runs kernels on: threads of which one runs at a time, memory, barriers, products.

Every warpgroup is a thread; one runs at a time, and at each wait or asynchronous step chance picks the next. A load may
come early or late, a product may read its operands when it is issued or not before it is waited for, a store likewise.
A protocol fault shows as a deadlock or as a wrong result.
"""

from __future__ import annotations

import random
import threading
import types
from typing import Any

import numpy as np
import torch

# ---------------------------------------------------------------------------------------------- threads, one at a time


class Deadlock(AssertionError):
    """Nobody can go on."""


class Scheduler:
    """Runs functions as threads of which one runs at a time; at every `pause` chance picks the next that can go on."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.live: dict[
            int, tuple[threading.Semaphore, Any]
        ] = {}  # gate, and what the thread waits for
        self.fault: BaseException | None = None
        self.done = threading.Semaphore(0)
        self.engine: list[Any] = []  # copies under way

    def run(self, functions: list[Any]) -> None:
        """All functions to their ends, and the copies that they started."""
        threads = []
        for function in functions:
            gate = threading.Semaphore(0)
            thread = threading.Thread(target=self._body, args=(function, gate), daemon=True)
            threads.append((thread, gate))
        for thread, gate in threads:
            thread.start()
            self.live[thread.ident] = (gate, None)
        self._next()
        self.done.acquire()
        if self.fault is not None:
            raise self.fault
        while self.engine:
            self.engine.pop()()

    def _body(self, function: Any, gate: threading.Semaphore) -> None:
        gate.acquire()
        try:
            if self.fault is None:
                function()
        except BaseException as fault:
            self.fault = self.fault or fault
        del self.live[threading.get_ident()]
        self._next()

    def _next(self) -> None:
        if not self.live:
            self.done.release()
            return
        while not (able := [gate for gate, wish in self.live.values() if wish is None or wish()]):
            if not self.engine or self.fault is not None:
                self.fault = self.fault or Deadlock("every thread waits")
                able = [gate for gate, _ in self.live.values()]
                break
            self._copy()
        self.chance.choice(able).release()

    def _copy(self) -> None:
        self.engine.pop(self.chance.randrange(len(self.engine)))()

    def pause(self, wish: Any = None) -> None:
        """Let someone else go on, perhaps; at least until the wish is true."""
        while self.engine and self.chance.random() < 0.5:
            self._copy()
        gate, _ = self.live[threading.get_ident()]
        self.live[threading.get_ident()] = (gate, wish)
        self._next()
        gate.acquire()
        if self.fault is not None:
            raise self.fault


# ---------------------------------------------------------------------------------------------- the pretended Gluon


class Machine:
    """What one launch shares."""

    scheduler: Scheduler
    here = (
        threading.local()
    )  # program, programs, warpgroup, products and stores under way, named barriers


M = Machine()


class Tensor:
    """A tile in registers."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)
        self.shape = list(self.a.shape)
        self.dtype = "dt"
        self.type = types.SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Tensor:
        """Sixteen bits round too little to matter; eight do not."""
        if dtype != "float8e4nv":
            return Tensor(self.a)
        return Tensor(torch.from_numpy(self.a).to(torch.float8_e4m3fn).double().numpy())

    def __eq__(self, other: Any) -> Any:
        return Tensor(self.a == raw(other))

    __hash__ = None  # type: ignore[assignment]

    def map(self, f: Any) -> Tensor:
        """Another shape."""
        return Tensor(f(self.a))


class Twos(Tensor):
    """16-bit integers whose two bytes are numbers of 8 bits: the lowest first."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts[0])
        self.parts = parts

    def map(self, f: Any) -> Twos:
        """Another shape."""
        return Twos([f(part) for part in self.parts])


def _operator(name: str) -> Any:
    def apply(self: Tensor, other: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(getattr(np.asarray(self.a), name)(raw(other)))

    return apply


ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv floordiv mod lt le gt ge and or xor lshift rshift ne"
for _name in ARITHMETIC.split():
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def raw(x: Any) -> Any:
    return x.a if isinstance(x, Tensor) else x


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, a: np.ndarray) -> None:
        self.a = a
        self.dtype = "dt"

    @property
    def shape(self) -> list[int]:
        return list(self.a.shape)

    def index(self, i: int) -> Any:
        return self.a[i, 0] if self.a.dtype == object else Memory(self.a[i])

    def reshape(self, shape: list[int]) -> Memory:
        view = self.a.reshape(shape)
        assert np.shares_memory(view, self.a)
        return Memory(view)

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.a.transpose(order))

    def slice(self, start: int, length: int, dim: int) -> Memory:
        assert start + length <= self.a.shape[dim]
        return Memory(self.a[(slice(None),) * dim + (slice(start, start + length),)])

    def reinterpret(self, dtype: str, shape: list[int], layout: Any) -> Pairs:
        assert dtype == "int16"
        return Pairs(self.reshape([*shape, 2]).a)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.a.copy())

    def store(self, value: Tensor) -> None:
        self.a[...] = value.a


class Pairs(Memory):
    """Shared memory of numbers of 8 bits, seen as 16-bit integers."""

    def load(self, layout: Any) -> Twos:
        return Twos([self.a[..., 0].copy(), self.a[..., 1].copy()])

    def store(self, value: Any) -> None:
        self.a[...] = np.stack(value.parts, -1)


class Barrier:
    """An mbarrier: arrivals and bytes that a phase waits for."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1


class NamedBarrier:
    """A hardware barrier of so many partitions, of which some may arrive without waiting."""

    def __init__(self, most: int) -> None:
        self.phase, self.most = 0, most
        self.arrived: set[int] = set()

    def arrive(self) -> int:
        mine, who = self.phase, threading.get_ident()
        assert who not in self.arrived, "a partition counts twice"
        self.arrived.add(who)
        if len(self.arrived) == self.most:
            self.arrived, self.phase = set(), self.phase + 1
        return mine


class Pending:
    """A product under way: it may read its operands now or when it is waited for."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        self.operands = (a, b, acc, use_acc)
        self.value: Tensor | None = None
        if M.scheduler.chance.random() < 0.5:
            self.finish()

    def finish(self) -> None:
        if self.value is None:
            a, b, acc, use_acc = self.operands
            with np.errstate(all="ignore"):
                product = raw(a if isinstance(a, Tensor) else Tensor(a.a)) @ b.a
            if isinstance(acc, Pending):  # a product adds to one that is still under way
                acc.finish()
                acc = acc.value
            self.value = Tensor(product + acc.a if use_acc else product)


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, a: torch.Tensor, at: Any = 0) -> None:
        self.a, self.at = a, at
        self.dtype = types.SimpleNamespace(element_ty="dt")

    @staticmethod
    def to(t: torch.Tensor) -> Pointer:
        size = t.untyped_storage().size() // t.element_size() - t.storage_offset()
        return Pointer(t.as_strided((size,), (1,)))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.a, self.at + raw(other))


class Descriptor:
    """TMA's view of a tensor: addresses wrap around at 64 bits."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    dtype = "dt"
    layout = None

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(nbytes=int(np.prod(self.block_shape)))

    @property
    def flat(self) -> torch.Tensor:
        base, strides = self.base, self.strides
        size = base.element_size()
        assert base.data_ptr() % 16 == 0
        assert strides[-1] == 1
        assert all(s * size % 16 == 0 and 0 < s * size < 1 << 40 for s in strides[:-1])
        assert all(0 < n < 1 << 31 for n in self.shape)
        return base.as_strided((base.untyped_storage().size() // size,), (1,), 0)

    def places(self, at: list[int]) -> tuple[Any, Any]:
        """(indices into the flat tensor, which of the box they are), of those elements that lie in the tensor."""
        size = self.base.element_size()
        inside = np.ones(self.block_shape, dtype=bool)
        place = np.full(self.block_shape, self.base.storage_offset() * size, dtype=np.uint64)
        for axis, (o, n) in enumerate(zip(at, self.block_shape, strict=True)):
            index = (o + np.arange(n)).reshape([n if a == axis else 1 for a in range(len(at))])
            inside &= (index >= 0) & (index < self.shape[axis])
            place += index.astype(np.uint64) * np.uint64(self.strides[axis] * size)  # wraps
        place = place[inside].astype(np.int64) // size
        assert place.size == 0 or place.max() < self.flat.numel()
        return torch.from_numpy(place), inside
