"""Products of which each row has the same bits, whatever is computed beside it.

A BLAS picks a kernel by the shapes of a product, and each kernel may add in an order of its own: the row of a single
token need not equal the same row among 256. So every product here stands for one of a fixed shape, the canonical one:
`rows` rows by `keys` keys of one head, zeros where there are none, each row in the slot that its position gives. Such
products have the same bits by construction. A smaller shape, or several heads at once, takes their place only after it
has been tried: once in a process, on random numbers, against the canonical shape, to the bit. Which kernel runs depends
on shapes and strides and not on numbers, so what agrees once agrees always. What does not agree is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.backends.cpu.tile import scratch

LEAST_ROWS = (
    8  # fewer rows are filled up: a matrix times one or two vectors is another routine everywhere
)
GRAIN = 64  # keys of a product are a multiple of this
HEADS = 3  # heads of the random numbers; further ones repeat them
LARGEST = 2**23  # elements that a trial of strided keys may span
ALIGNED = 64  # bytes


class Shape(NamedTuple):
    """One product that may be tried."""

    kind: str  # "scores", "add_rows", "sums" or "add_keys"
    heads: int
    rows: int
    keys: int
    dim: int
    strides: tuple[int, ...] | None  # of keys that are not contiguous


class Products(NamedTuple):
    """How a call multiplies. Tensors are [g, m, D] rows, [g, n, D] keys and [g, m, n] weights, all g heads alike."""

    rows: int  # of the canonical shape
    keys: int
    precision: str  # of torch's fp32 products while this call runs

    def scores(self, a: Tensor, b: Tensor, first: int, name: str) -> Tensor:
        """a · bᵀ, [g, m, n], in this thread's buffer of that name; row 0 is the first-th of its sequence."""
        out = scratch(name, (*a.shape[:2], b.shape[1]), a.dtype)
        if self._sound("scores", a, b, b.shape[1]):
            return _scores(a, b, out)
        b = _filled(b, self.keys)
        return self._by_slots(first, (a,), out, lambda i, p: _scores(p, b[i : i + 1], None))

    def add_rows(self, total: Tensor, weights: Tensor, b: Tensor, first: int) -> None:
        """Add weights · b, summed over keys, to total [g, m, D]."""
        if self._sound("add_rows", weights, b, b.shape[1]):
            total.baddbmm_(weights, b)
            return
        b = _filled(b, self.keys)

        def one(i: int, old: Tensor, p: Tensor) -> Tensor:
            return torch.baddbmm(old, _widened(p, self.keys), b[i : i + 1])

        self._by_slots(first, (total, weights), total, one)

    def sums(self, weights: Tensor, first: int) -> Tensor:
        """Each row's sum, [g, m, 1]."""
        if self._sound("sums", weights, None, weights.shape[2]):
            return weights.sum(-1, keepdim=True)
        out = weights.new_empty(*weights.shape[:2], 1)
        return self._by_slots(
            first, (weights,), out, lambda _, p: _widened(p, self.keys).sum(-1, keepdim=True)
        )

    def add_keys(self, total: Tensor, weights: Tensor, a: Tensor) -> None:
        """Add weightsᵀ · a, summed over the rows of a tile, to total [g, n, D]."""
        if self._sound("add_keys", a, None, weights.shape[2]):
            total.add_(_add_keys(weights, a))
            return
        weights, a = _filled(_widened(weights, self.keys), self.rows), _filled(a, self.rows)
        for i in range(a.shape[0]):
            part = _add_keys(weights[i : i + 1], a[i : i + 1])
            total[i : i + 1].add_(part[:, : total.shape[1]])

    def _sound(self, kind: str, a: Tensor, b: Tensor | None, n: int) -> bool:
        strides = None if b is None or b.is_contiguous() else b.stride()
        dim = (a if b is None else b).shape[2]
        shape = Shape(kind, a.shape[0], a.shape[1], n, 0 if kind == "sums" else dim, strides)
        return agrees(shape, self, a.dtype)

    def _by_slots(
        self, first: int, rowwise: tuple[Tensor, ...], out: Tensor, one: Callable[..., Tensor]
    ) -> Tensor:
        """The canonical products: of head i and up to `rows` rows at a time, each in its slot."""
        heads, count = out.shape[:2]
        for i in range(heads):
            at = 0
            while at < count:
                slot = (first + at) % self.rows
                n = min(count - at, self.rows - slot)
                parts = []
                for t in rowwise:
                    part = t.new_zeros(1, self.rows, t.shape[2])
                    part[0, slot : slot + n] = t[i, at : at + n]
                    parts.append(part)
                found = one(i, *parts)[0, slot : slot + n]
                out[i, at : at + n] = found[:, : out.shape[2]]
                at += n
        return out


def may_view(t: Tensor) -> bool:
    """Whether strided keys [g, n, D] can be read where they lie: a trial must be able to stand for them."""
    span = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.stride(2) == 1 and t.data_ptr() % ALIGNED == 0 and span < LARGEST


def _scores(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    if b.is_contiguous():
        return torch.bmm(a, b.transpose(1, 2), **({} if out is None else {"out": out}))
    # Keys with other heads in between: as the left operand they need no rearranging.
    turned = scratch("turned", (a.shape[0], b.shape[1], a.shape[1]), a.dtype)
    torch.bmm(b, a.transpose(1, 2), out=turned)
    return turned.transpose(1, 2).contiguous() if out is None else out.copy_(turned.transpose(1, 2))


def _add_keys(weights: Tensor, a: Tensor) -> Tensor:
    shape = (a.shape[0], weights.shape[2], a.shape[2])
    return torch.bmm(weights.transpose(1, 2), a, out=scratch("keys' sums", shape, a.dtype))


def _filled(t: Tensor, rows: int) -> Tensor:
    """[g, n, D] as [g, rows, D], 0 beyond."""
    return torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[1])).contiguous()


def _widened(t: Tensor, keys: int) -> Tensor:
    """[g, m, n] as [g, m, keys], 0 beyond."""
    return torch.nn.functional.pad(t, (0, keys - t.shape[2])).contiguous()


@functools.lru_cache(maxsize=4096)
def agrees(shape: Shape, p: Products, dtype: torch.dtype) -> bool:
    """Whether a shape gives the canonical one's bits on this machine. Tried once, in about a millisecond."""
    kind, g, m, n, dim, strides = shape
    if m > p.rows or n > p.keys:
        return False
    head = torch.arange(g) % HEADS
    rows, keys, weights, total = (t[head] for t in _numbers(p.rows, p.keys, dim, dtype))
    some_keys = n if kind in ("add_rows", "sums") else p.keys
    some_rows = m if kind == "add_keys" else p.rows
    want = _canonical(kind, p, some_keys, some_rows, dim, dtype)[head]
    part = keys[:, :n]
    if strides is not None:
        part = torch.empty_strided(part.shape, strides, dtype=dtype).copy_(part)
    part = part if strides is not None else part.contiguous()
    if kind == "scores":
        got = _scores(rows[:, :m].contiguous(), part, scratch("trial", (g, m, n), dtype))
        want = want[:, :m, :n]
    elif kind == "add_rows":
        got = total[:, :m].contiguous().baddbmm_(weights[:, :m, :n].contiguous(), part)
        want = want[:, :m]
    elif kind == "sums":
        got = weights[:, :m, :n].contiguous().sum(-1, keepdim=True)
        want = want[:, :m]
    else:
        got = _add_keys(weights[:, :m, :n].contiguous(), rows[:, :m].contiguous())
        want = want[:, :n]
    return torch.equal(got, want)


@functools.lru_cache(maxsize=8)
def _numbers(rows: int, keys: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random rows, keys, weights and sums of HEADS heads."""
    g = torch.Generator().manual_seed(0)
    shapes = (rows, dim), (keys, dim), (rows, keys), (rows, dim)
    return tuple(torch.randn(HEADS, *s, generator=g, dtype=dtype) for s in shapes)


@functools.lru_cache(maxsize=256)
def _canonical(
    kind: str, p: Products, some_keys: int, some_rows: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """What the canonical shape gives, head by head; weights are 0 beyond the first keys and rows."""
    rows, keys, weights, total = _numbers(p.rows, p.keys, dim, dtype)
    weights = weights.clone()
    weights[:, :, some_keys:] = 0
    weights[:, some_rows:] = 0
    found = []
    for i in range(HEADS):
        one = slice(i, i + 1)
        if kind == "scores":
            found.append(torch.bmm(rows[one], keys[one].transpose(1, 2)))
        elif kind == "add_rows":
            found.append(torch.baddbmm(total[one], weights[one], keys[one]))
        elif kind == "add_keys":
            found.append(torch.bmm(weights[one].transpose(1, 2), rows[one]))
        else:
            found.append(weights[one].sum(-1, keepdim=True))
    return torch.cat(found)
