"""A task's heads and its tiles of queries: which keys a tile visits, and the scores it finds there.

Rows are packed: a tile holds l positions of each of a kv head's R query heads as l·R rows, so K and V are read once per
group and one query of a large group is still a matrix. Legend: g kv heads of the task, R query heads per kv head,
l positions of a tile, n keys of a panel, D and E head dims.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from relampago import dropout
from relampago.masks.rules import Band, full_range, key_range, visible
from relampago.mods import TORCH_MATH, Rule, bind, rule_of, scores_of, values
from relampago.problem import Arrays, accumulate_dtype

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
SCORES = (
    2**20
)  # held by a thread at a time: fewer, and calls cost more than work; more, and caches overflow
KEPT = (
    2**19
)  # elements of keys or values that a thread copies as a whole, for all tiles of their heads
HELD = 2**20  # elements of keys or values in the heads of one task
FEW = 64  # rows of a kv head with which reading keys, and not products, takes the time: decoding
SMALL = 40.0  # 2**40 times 2**17 keys times values of up to 2**70 stays within fp32


class _Buffers(threading.local):
    """A thread's buffers by name and dtype, and the view of each that was asked for last."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}
        self.last: dict[tuple[str, torch.dtype], Tensor] = {}
        self.owner: dict[tuple[str, torch.dtype], weakref.ref[Slab]] = {}  # whose keys it holds


_scratch = _Buffers()


class Heads(NamedTuple):
    """What a task works on: sequence b, kv heads g0..g1, and of each group the query heads r0..r1."""

    b: int
    g0: int
    g1: int
    r0: int
    r1: int


class Panel(NamedTuple):
    """Keys that a tile visits together: a slice, or positions gathered from tiles of a BlockSparse."""

    keys: slice | Tensor
    size: int
    edges: tuple[tuple[int, int], ...]  # columns that the band may hide from some row
    pattern: Tensor | None  # bool [l, n] from partial tiles


class Slab:
    """One task's part of the tensors, heads of the task only."""

    def __init__(self, x: Arrays, heads: Heads) -> None:
        self.x, self.heads = x, heads
        self.rows, self.cols, self.band = x.rows(heads.b), x.keys(heads.b), x.band_of(heads.b)
        self.k, self.v = self.keys_of(x.k), self.keys_of(x.v)  # [g, Lk, D], [g, Lk, E]
        self.q = self.queries_of(x.q)  # [Lq, g, R, D]
        self.dtype = accumulate_dtype(x.q.dtype)
        # Base 2 needs one multiplication less per element; with mods or a bias scores stay natural, since a bias of
        # finfo.min times log2(e) would no longer be finite.
        self.base2 = not x.mods and x.bias is None
        self._longest_key: float | None = None

    @property
    def narrow(self) -> torch.dtype:
        """What the backward's products that only add up take: q, k and dO are bf16 already, at twice the rate."""
        return torch.bfloat16 if self.x.q.dtype == torch.bfloat16 else self.dtype

    def room(self) -> int:
        """Keys that a tile's products may reach."""
        return self.k.shape[1]

    def longest_key(self) -> float:
        """The Euclidean length of the longest key; measured once."""
        if self._longest_key is None:
            self._longest_key = largest_norm(self.k)
        return self._longest_key

    def queries_of(self, t: Tensor) -> Tensor:
        """The task's rows and heads of a tensor laid out like q: a view [Lq, g, R, …]."""
        h = self.heads
        return t[self.rows].unflatten(1, (-1, self.x.group))[:, h.g0 : h.g1, h.r0 : h.r1]

    def keys_of(self, t: Tensor) -> Tensor:
        """The task's keys and kv heads of a tensor laid out like k: a view [g, Lk, …], or a copy of those in pages."""
        return t[..., self.heads.g0 : self.heads.g1, :][self.cols].transpose(0, 1)

    def lse_of(self, lse: Tensor) -> Tensor:
        """The task's part of an LSE: a view [g, R, Lq]."""
        h = self.heads
        whole = lse[h.b] if self.x.cu_q is None else lse[:, self.rows]
        return whole.unflatten(0, (-1, self.x.group))[h.g0 : h.g1, h.r0 : h.r1]

    def take(self, name: str, t: Tensor, panel: Panel, dtype: torch.dtype | None = None) -> Tensor:
        """Keys or values of a panel, [g, n, D], in the accumulation dtype or another; copied if products gain by it."""
        dtype = dtype or self.dtype
        few = self.q.shape[0] * self.q.shape[2] < FEW
        if t.dtype == dtype and (few or t.is_contiguous()):
            return t[:, panel.keys]
        if few and isinstance(panel.keys, slice):
            # heads stay where they are: memory is read in order
            rows = t.transpose(0, 1)[panel.keys]
            return scratch(name, rows.shape, dtype).copy_(rows).transpose(0, 1)
        if few or t.numel() > KEPT or not (t.shape[0] == 1 or panel.size == t.shape[1]):
            part = t[:, panel.keys]
            return scratch(name, part.shape, dtype).copy_(part)
        whole = scratch(f"whole {name}", t.shape, dtype)
        if not self.owns(name, dtype):
            whole.copy_(t)
        return whole if panel.size == t.shape[1] else whole[:, panel.keys]

    def owns(self, name: str, dtype: torch.dtype) -> bool:
        """Whether this thread's buffer of whole keys holds this slab's; from now on it does."""
        owner = _scratch.owner.get((name, dtype))
        if owner is not None and owner() is self:
            return True
        _scratch.owner[name, dtype] = weakref.ref(self)
        return False

    def heads_of(self, t: Tensor) -> Tensor:
        """The task's sequence and heads of what broadcasts to (B, H, Lq, Lk): a view [g or 1, R or 1, Lq, Lk]."""
        t = t[self.heads.b if t.shape[0] > 1 else 0]
        if t.shape[0] == 1:
            return t[None]
        h = self.heads
        return t.unflatten(0, (-1, self.x.group))[h.g0 : h.g1, h.r0 : h.r1]


class Tile:
    """Positions p0..p1 of a slab's rows."""

    def __init__(self, slab: Slab, p0: int, p1: int) -> None:
        self.slab, self.p0, self.p1 = slab, p0, p1
        self.g, self.group = slab.q.shape[1], slab.q.shape[2]
        self.shape = (self.g, p1 - p0, self.group)  # rows as [g, l, R]

    def pack(self, t: Tensor) -> Tensor:
        """This tile's rows of a view [Lq, g, R, …] as [g, l·R, …] in the accumulation dtype."""
        return t[self.p0 : self.p1].transpose(0, 1).flatten(1, 2).to(self.slab.dtype).contiguous()

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        """Write packed rows [g, l·R, D] to a view [Lq, g, R, D]."""
        into[self.p0 : self.p1] = packed.unflatten(1, self.shape[1:]).transpose(0, 1)

    def pack_lse(self, lse: Tensor, beyond: float = 0.0) -> Tensor:
        """This tile's rows of a view [g, R, Lq] as [g, l·R, 1]; `beyond` fills rows that a subclass adds."""
        return lse[:, :, self.p0 : self.p1].transpose(1, 2).reshape(self.g, -1, 1)

    def divide(self, acc: Tensor, l: Tensor, into: Tensor) -> None:
        """Write packed rows acc / l, [g, l·R, D] and [g, l·R, 1], to a view [Lq, g, R, D]."""
        rows = into[self.p0 : self.p1].transpose(0, 1)  # [g, l, R, D]
        torch.div(self.grid(acc), self.grid(l), out=rows)

    def queries(self) -> Tensor:
        """Scaled queries [g, l·R, D]; their products with keys are scores, in base 2 where the slab says so."""
        scale = self.slab.x.scale * (LOG2E if self.slab.base2 else 1.0)
        rows = self.slab.q[self.p0 : self.p1].transpose(0, 1)  # [g, l, R, D]
        packed = scratch("q", rows.shape, self.slab.dtype)
        if rows.dtype == packed.dtype:
            torch.mul(rows, scale, out=packed)
        else:
            packed.copy_(rows).mul_(scale)
        return packed.view(self.g, -1, rows.shape[3])

    def grid(self, t: Tensor) -> Tensor:
        """Packed rows [g, l·R, n] as [g, l, R, n]: a view."""
        return t.view(*self.shape, t.shape[-1])

    def products(self, name: str, rows: Tensor, keys: Tensor) -> Tensor:
        """rows · keysᵀ, [g, l·R, n], in a buffer of this thread."""
        shape = (*rows.shape[:2], keys.shape[1])
        return torch.bmm(rows, keys.transpose(1, 2), out=scratch(name, shape, rows.dtype))

    def sums(self, p: Tensor) -> Tensor:
        """Each row's sum over keys, [g, l·R, 1]."""
        return p.sum(-1, keepdim=True)

    def add_rows(self, total: Tensor, weights: Tensor, keys: Tensor) -> None:
        """Add weights · keys to total [g, l·R, D]."""
        add(total, weights, keys)

    def add_keys(self, total: Tensor, panel: Panel, weights: Tensor, rows: Tensor) -> None:
        """Add weightsᵀ · rows to the keys of total [g, Lk, D] that a panel names."""
        if isinstance(panel.keys, slice):
            add(total[:, panel.keys], weights.transpose(1, 2), rows)
        else:
            part = torch.bmm(weights.transpose(1, 2), rows)
            total.index_add_(1, panel.keys, part.to(total.dtype))

    def small(self, q: Tensor) -> bool:
        """Whether no score, in base 2, is beyond ±SMALL: |q·k| <= |q| |k| (Cauchy and Schwarz).

        Their powers neither overflow nor vanish in fp32, so the softmax needs no maximum. False for inf and NaN.
        """
        x = self.slab.x
        few = (
            self.slab.q.shape[0] * self.group < FEW
        )  # reading all keys to save a maximum would not pay
        if few or not self.slab.base2 or x.sinks is not None:
            return False
        return largest_norm(q) * self.slab.longest_key() <= SMALL

    def panels(self, size: int) -> Iterator[Panel]:
        """The keys that some row sees, at most `size` at a time."""
        slab, x = self.slab, self.slab.x
        start, end, full_start, full_end = self.bounds()
        if x.blocks is None:
            for j0 in range(start, end, size):
                j1 = min(j0 + size, end)
                sides = ((j0, min(j1, full_start)), (max(j0, full_start, full_end), j1))
                edges = tuple((max(a, j0) - j0, b - j0) for a, b in sides if b > max(a, j0))
                yield Panel(slice(j0, j1), j1 - j0, edges, None)
            return
        keys, pattern = self.block_keys()
        seen = (keys >= start) & (keys < end)
        keys, pattern = keys[seen], pattern[:, seen]
        banded = slab.band.bounded
        for j in range(0, keys.shape[0], size):
            part = keys[j : j + size]
            n = part.shape[0]
            yield Panel(part, n, ((0, n),) if banded else (), pattern[:, j : j + n])

    def bounds(self) -> tuple[int, int, int, int]:
        """Keys [start, end) that some row sees and [full_start, full_end) that every row sees."""
        band, len_k = self.slab.band, self.slab.k.shape[1]
        sides = (band.offset, band.left, band.right, band.prefix)
        start, end = key_range(self.p0, self.p1 - 1, len_k, *sides)
        full_start, full_end = full_range(self.p0, self.p1 - 1, len_k, *sides)
        if (table := self.tables(band)) is not None:
            row_start, row_end = table
            start, end = max(start, int(row_start.min())), min(end, int(row_end.max()))
            full_start = max(full_start, int(row_start.max()))
            full_end = min(full_end, int(row_end.min()))
        return start, end, full_start, full_end

    def tables(self, band: Band) -> tuple[Tensor, Tensor] | None:
        """This tile's rows of the band's tables."""
        if band.row_start is None or band.row_end is None:
            return None
        b = self.slab.heads.b if band.row_start.shape[0] > 1 else 0
        return band.row_start[b, self.p0 : self.p1], band.row_end[b, self.p0 : self.p1]

    def block_keys(self) -> tuple[Tensor, Tensor]:
        """Keys [n] in the tiles that this tile's row of a BlockSparse lists, and which rows see them, bool [l, n]."""
        slab, x = self.slab, self.slab.x
        assert x.blocks is not None
        assert x.block is not None
        blocks, (block_q, block_k) = x.blocks, x.block
        heads = slab.heads
        b = heads.b if blocks.count.shape[0] > 1 else 0
        h = heads.g0 * x.group + heads.r0 if blocks.count.shape[1] > 1 else 0
        i = self.p0 // block_q
        count = int(blocks.count[b, h, i])
        index, which = blocks.index[b, h, i, :count], blocks.pattern[b, h, i, :count]
        tiles = blocks.tiles[which.clamp(min=0)] | (which < 0).view(-1, 1, 1)  # [count, BQ, BK]
        keys = (index[:, None] * block_k + torch.arange(block_k)).flatten().long()
        seen = tiles.transpose(0, 1).flatten(1)[self.p0 - i * block_q : self.p1 - i * block_q]
        inside = keys < slab.k.shape[1]
        return keys[inside], seen[:, inside]

    def scores(
        self, q: Tensor, k: Tensor, panel: Panel, steps: list[Tensor] | None = None
    ) -> Tensor:
        """Masked scores [g, l·R, n] in a buffer of this thread; the input of each mod is kept in steps, if given."""
        s = self.products("scores", q, k)
        if self.slab.x.mods:
            s = self.modified(s, panel, steps)
        self.mask(self.grid(s), panel)
        return s

    def mask(self, grid: Tensor, panel: Panel) -> None:
        """Add the bias to a panel's scores [g, l, R, n], and set what is hidden to -inf."""
        x = self.slab.x
        if x.bias is not None:
            grid += self.part(x.bias, panel)
        if x.mask is not None:
            grid.masked_fill_(~self.part(x.mask, panel), -math.inf)
        if panel.pattern is not None:
            grid.masked_fill_(~panel.pattern[:, None], -math.inf)
        for a, b in panel.edges:
            self.hide(grid, panel, a, b)

    def hide(self, grid: Tensor, panel: Panel, a: int, b: int) -> None:
        """Set what the band hides in columns a..b of a panel's scores [g, l, R, n] to -inf."""
        band, table = self.slab.band, self.tables(self.slab.band)
        part = grid[..., a:b]
        if (
            table is None
            and band.prefix is None
            and self.group == 1
            and isinstance(panel.keys, slice)
        ):
            # Triangles cost a tenth of masked_fill_: zero the hidden ones, so that none is inf or NaN, and add -inf.
            shift = self.p0 + band.offset - panel.keys.start - a
            low = None if band.left is None else shift - band.left
            high = None if band.right is None else shift + band.right
            square = part[:, :, 0]
            if high is not None:
                square.tril_(high)
            if low is not None:
                square.triu_(low)
            square.add_(triangle(part.shape[1], b - a, low, high, grid.dtype))
            return
        row, key = self.row(), columns(panel)[a:b]
        seen = visible(row, key, band.offset, band.left, band.right, band.prefix)
        if table is not None:
            row_start, row_end = table
            seen = seen & (key >= row_start.view(-1, 1, 1)) & (key < row_end.view(-1, 1, 1))
        part.masked_fill_(~seen, -math.inf)

    def row(self) -> Tensor:
        """Row numbers [l, 1, 1]."""
        return torch.arange(self.p0, self.p1).view(-1, 1, 1)

    def head(self) -> Tensor:
        """Query heads [g, 1, R, 1]."""
        h = self.slab.heads
        kv = torch.arange(h.g0, h.g1).view(-1, 1, 1, 1)
        return kv * self.slab.x.group + torch.arange(h.r0, h.r1).view(1, 1, -1, 1)

    def part(self, t: Tensor, panel: Panel) -> Tensor:
        """This tile's part of what broadcasts to (B, H, Lq, Lk): [g or 1, l or 1, R or 1, n or 1]."""
        t = self.slab.heads_of(t).transpose(1, 2)  # [g, Lq, R, Lk]
        t = t if t.shape[1] == 1 else t[:, self.p0 : self.p1]
        return t if t.shape[3] == 1 else t[..., panel.keys]

    def mods(self, panel: Panel) -> Iterator[tuple[Rule, list]]:
        """Each mod with its arguments for a panel."""
        rules, row = [rule_of(token) for token in self.slab.x.mods], self.row()
        place, key, head = row + self.slab.band.offset, columns(panel), self.head()
        return bind(rules, self.slab.x.mod_args, self.slab.heads.b, head, place, key, row)

    def apply(self, fn: Callable, s: Tensor, panel: Panel, arguments: list) -> Tensor | float:
        """A mod's function on scores [g, l·R, n]: [g, l, R, n], or what broadcasts to it."""
        place, grid = self.row() + self.slab.band.offset, self.grid(s)
        return fn(grid, place, columns(panel), self.head(), values(arguments), TORCH_MATH)

    def modified(self, s: Tensor, panel: Panel, steps: list[Tensor] | None) -> Tensor:
        """Scores after every mod."""
        for rule, arguments in self.mods(panel):
            if steps is not None:
                steps.append(s)
            s = scores_of(self.apply(rule.fn, s, panel, arguments), self.grid(s)).flatten(1, 2)
        return s.clone() if steps and s is steps[-1] else s

    def wide(self, panel: Panel) -> Panel:
        """The keys that functions are called with: the panel's."""
        return panel

    def slope(self, steps: list[Tensor], panel: Panel) -> Tensor | float:
        """The derivative of the scores after all mods by those before; `steps` as `scores` filled it."""
        total: Tensor | float = 1.0
        for step, (rule, arguments) in zip(steps, self.mods(panel), strict=True):
            assert rule.dfn is not None, "why_not refuses tangents without dfn"
            total = total * self.apply(rule.dfn, step, panel, arguments)
        return total

    def bend(self, steps: list[Tensor], panel: Panel, rate: Tensor) -> Tensor | float:
        """The tangent of `slope` where the scores before all mods move at `rate` [g, l, R, n]."""
        slope: Tensor | float = 1.0
        total: Tensor | float = 0.0
        for step, (rule, arguments) in zip(steps, self.mods(panel), strict=True):
            assert rule.dfn is not None, "why_not refuses a backward without dfn"
            assert rule.ddfn is not None, "why_not refuses second derivatives without ddfn"
            own = self.apply(rule.dfn, step, panel, arguments)
            total = total * own + slope * self.apply(rule.ddfn, step, panel, arguments) * rate
            slope, rate = slope * own, rate * own
        return total

    def kept(self, panel: Panel) -> Tensor | None:
        """The dropout factors 0 or 1 / (1 - p), [g, l·R, n]; None without dropout."""
        x, heads = self.slab.x, self.slab.heads
        if not x.dropout_p or x.seed is None:
            return None
        stream = heads.b * x.q.shape[-2] + self.head()
        keep = dropout.kept(x.seed, stream, self.row(), columns(panel), x.dropout_p)
        return keep.reshape(self.g, -1, panel.size).to(self.slab.dtype).div_(1 - x.dropout_p)

    def power_(self, s: Tensor) -> Tensor:
        """e to the s, in place; s in the slab's base."""
        return s.exp2_() if self.slab.base2 else s.mul_(LOG2E).exp2_()

    def natural(self, s: Tensor) -> Tensor:
        """Scores that are in the slab's base, in natural units."""
        return s * LN2 if self.slab.base2 else s

    def sink(self) -> Tensor | None:
        """The sinks of this tile's rows, [g, l·R, 1], in the slab's base."""
        if self.slab.x.sinks is None:
            return None
        rows = self.per_head(self.slab.x.sinks)
        return rows * LOG2E if self.slab.base2 else rows

    def per_head(self, t: Tensor) -> Tensor:
        """This tile's part of a tensor (H,), for each row: [g, l·R, 1]."""
        h = self.slab.heads
        part = t.unflatten(0, (-1, self.slab.x.group))[h.g0 : h.g1, h.r0 : h.r1]  # [g, R]
        return part[:, None].expand(*self.shape).reshape(self.g, -1, 1).to(self.slab.dtype)


def add(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a·b to target, which may be of a wider dtype."""
    if a.dtype == target.dtype:
        target.baddbmm_(a, b)
    else:
        target.add_(torch.bmm(a, b, out=scratch("product", target.shape, a.dtype)))


@functools.lru_cache(maxsize=16)
def triangle(rows: int, cols: int, low: int | None, high: int | None, dtype: torch.dtype) -> Tensor:
    """0 where low <= col - row <= high, else -inf; neighbouring tiles share a few of these."""
    hidden = torch.zeros(rows, cols, dtype=torch.bool)
    if high is not None:
        hidden |= torch.ones(rows, cols, dtype=torch.bool).triu_(high + 1)
    if low is not None:
        hidden |= torch.ones(rows, cols, dtype=torch.bool).tril_(low - 1)
    return torch.zeros(rows, cols, dtype=dtype).masked_fill_(hidden, -math.inf)


def largest_norm(t: Tensor) -> float:
    """The greatest Euclidean length of rows [g, n, D], in fp32 or better; 0 without rows."""
    if t.numel() == 0:
        return 0.0
    longest = 0.0
    for part in t.split(max(1, SCORES // (4 * t.shape[0] * t.shape[2])), dim=1):
        squares = scratch("scores", part.shape, accumulate_dtype(t.dtype))
        if t.dtype == squares.dtype:
            torch.mul(part, part, out=squares)
        else:
            squares.copy_(part).square_()
        longest = max(longest, length := squares.sum(-1).amax().item())
        if not math.isfinite(length):
            return length
    return math.sqrt(longest)


def columns(panel: Panel) -> Tensor:
    """The panel's keys [n]."""
    if isinstance(panel.keys, slice):
        return torch.arange(panel.keys.start, panel.keys.stop)
    return panel.keys


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A buffer of this thread, reused from tile to tile: fresh memory costs a page fault every 4 KiB."""
    last = _scratch.last.get((name, dtype))
    if last is not None and last.shape == shape:
        return last
    size = math.prod(shape)
    buffer = _scratch.held.get((name, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, dtype=dtype)
        _scratch.held[name, dtype] = buffer
    last = _scratch.last[name, dtype] = buffer[:size].view(shape)
    return last
