"""The batch-invariant way of the CPU engine: a row's bits depend on its own sequence alone.

What else differs between calls, and why it does not show:

- Keys are cut at multiples of block_k from key 0, wherever a tile of rows begins to look. A block that hides all of its
  keys from a row adds exact zeros to it and leaves its maximum as it is.
- Products go through `shapes`, which lets no other shape take part than those that give the same bits.
- Scores are shifted by a rule of each row's own: not at all while its maximum is within ±CALM, else by that maximum.
  The bound by which a tile needs no maximum at all (`Tile.small`) only proves that the rule gives 0 for all rows.
- Operators run on one thread each, and no task is cut by the number of threads.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from relampago.backends.cpu.forward import Way, store
from relampago.backends.cpu.precision import current
from relampago.backends.cpu.shapes import GRAIN, LEAST_ROWS, Products, may_view
from relampago.backends.cpu.tile import FEW, KEPT, LN2, SMALL, Heads, Panel, Slab, Tile, scratch
from relampago.plan import Plan
from relampago.problem import Arrays, round_up

VECTORS = 64  # numbers that torch works on at a time divide this
CALM = SMALL + 1.0  # a bound on |q| |k| is one on scores up to their rounding


def way(plan: Plan) -> Way:
    """How tiles are worked on, under a plan."""
    return Way(functools.partial(FixedSlab, plan), FixedTile, attend, True)


class FixedSlab(Slab):
    """A slab whose keys come in widths that are multiples of GRAIN, 0 beyond the panel or the last key."""

    def __init__(self, plan: Plan, x: Arrays, heads: Heads) -> None:
        super().__init__(x, heads)
        self.product = Products(plan.block_q, plan.block_k, current())

    @property
    def narrow(self) -> torch.dtype:
        """Products of bf16 are not tried."""
        return self.dtype

    def room(self) -> int:
        """The keys, and room for the last panel's width."""
        return -(-self.k.shape[1] // GRAIN) * GRAIN

    def take(self, name: str, t: Tensor, panel: Panel, dtype: torch.dtype | None = None) -> Tensor:
        """Keys or values of a panel, [g, width, D]."""
        dtype, width = dtype or self.dtype, width_of(panel)
        part = t[:, panel.keys]
        if t.dtype == dtype and width == panel.size and may_view(part):
            few = self.q.shape[0] * self.q.shape[2] < FEW
            if few or part.is_contiguous():
                return part
        start, room = panel.keys.start, self.room()  # pyright: ignore[reportAttributeAccessIssue]
        if t.numel() > KEPT or not (t.shape[0] == 1 or width == room):
            return _copied(scratch(name, (t.shape[0], width, t.shape[2]), dtype), part)
        whole = scratch(f"whole {name}", (t.shape[0], room, t.shape[2]), dtype)
        if not self.owns(name, dtype):
            _copied(whole, t)
        return whole[:, start : start + width]


class FixedTile(Tile):
    """A tile whose rows are filled up to a power of two, by rows of zeros that are dropped at the end."""

    slab: FixedSlab

    def __init__(self, slab: Slab, p0: int, p1: int) -> None:
        super().__init__(slab, p0, p1)
        self.count = (p1 - p0) * self.group
        self.rows = round_up(max(LEAST_ROWS, self.count))
        self.first = (
            p0 + slab.band.offset
        ) * self.group  # of the sequence's packed rows, by position

    def filled(self, t: Tensor, name: str, value: float = 0.0) -> Tensor:
        """Packed rows [g, count, n] as [g, rows, n]."""
        if self.rows == self.count:
            return t
        buffer = scratch(name, (t.shape[0], self.rows, t.shape[2]), t.dtype)
        buffer[:, : self.count] = t
        buffer[:, self.count :] = value
        return buffer

    def queries(self) -> Tensor:
        """As `Tile.queries`."""
        return self.filled(super().queries(), "filled q")

    def pack(self, t: Tensor) -> Tensor:
        """As `Tile.pack`."""
        return self.filled(super().pack(t), "").clone()

    def pack_lse(self, lse: Tensor, beyond: float = 0.0) -> Tensor:
        """As `Tile.pack_lse`."""
        return self.filled(super().pack_lse(lse), "", beyond).clone()

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        """As `Tile.unpack`."""
        super().unpack(packed[:, : self.count], into)

    def power_(self, s: Tensor) -> Tensor:
        """As `Tile.power_`, in whole vectors: torch's exp2 takes another routine for what is left over."""
        short = -s.numel() % VECTORS
        if not short:
            return super().power_(s)
        whole = torch.cat([s.flatten(), s.new_zeros(short)])
        return super().power_(whole)[: s.numel()].view(s.shape)

    def sink(self) -> Tensor | None:
        """As `Tile.sink`."""
        sink = super().sink()
        return None if sink is None else self.filled(sink, "").clone()

    def grid(self, t: Tensor) -> Tensor:
        """The tile's own rows of [g, rows, n] as [g, l, R, n]."""
        return t[:, : self.count].unflatten(1, self.shape[1:])

    def products(self, name: str, rows: Tensor, keys: Tensor) -> Tensor:
        """As `Tile.products`."""
        return self.slab.product.scores(rows, keys, self.first, name)

    def sums(self, p: Tensor) -> Tensor:
        """As `Tile.sums`."""
        return self.slab.product.sums(p, self.first)

    def add_rows(self, total: Tensor, weights: Tensor, keys: Tensor) -> None:
        """As `Tile.add_rows`."""
        self.slab.product.add_rows(total, weights, keys, self.first)

    def add_keys(self, total: Tensor, panel: Panel, weights: Tensor, rows: Tensor) -> None:
        """As `Tile.add_keys`; total has room for the panel's width."""
        start = panel.keys.start  # pyright: ignore[reportAttributeAccessIssue]
        part = total[:, start : start + weights.shape[2]]
        self.slab.product.add_keys(part, weights, rows)

    def panels(self, size: int):
        """Blocks of keys from multiples of `size` on, up to the last that some row sees."""
        start, end, full_start, full_end = self.bounds()
        for j0 in range(start // size * size, end, size):
            j1 = min(j0 + size, end)
            sides = ((j0, min(j1, full_start)), (max(j0, full_start, full_end), j1))
            edges = tuple((a - j0, b - j0) for a, b in sides if b > a)
            yield Panel(slice(j0, j1), j1 - j0, edges, None)

    def scores(
        self, q: Tensor, k: Tensor, panel: Panel, steps: list[Tensor] | None = None
    ) -> Tensor:
        """Masked scores [g, rows, width]; -inf beyond the panel."""
        s = self.products("scores", q, k)
        if self.slab.x.mods:
            s = self.filled(self.modified(s, self.wide(panel), steps), "modified").clone()
        self.mask(self.grid(s)[..., : panel.size], panel)
        s[:, :, panel.size :] = -math.inf
        return s

    def wide(self, panel: Panel) -> Panel:
        """A panel with keys for all of its width, the last one over again: functions see whole vectors of numbers.

        On a single column, torch would take another routine for a tanh.
        """
        start, width = panel.keys.start, width_of(panel)  # pyright: ignore[reportAttributeAccessIssue]
        keys = torch.arange(start, start + width).clamp_(max=self.slab.k.shape[1] - 1)
        return panel._replace(keys=keys, size=width)


def attend(tile: Tile, plan: Plan, out: Tensor, lse: Tensor) -> None:
    """One tile: Algorithm 1 as in `forward.attend`, scores shifted by each row's own rule."""
    slab = tile.slab
    q = tile.queries()  # [g, rows, D]
    l = q.new_zeros(*q.shape[:2], 1)
    acc = scratch("acc", (*q.shape[:2], slab.v.shape[2]), q.dtype).zero_()
    m = q.new_full(l.shape, -math.inf)
    shift = None  # of every row 0
    calm = tile.small(q)
    for panel in tile.panels(plan.block_k):  # line 6
        k, v = slab.take("k", slab.k, panel), slab.take("v", slab.v, panel)
        s = tile.scores(q, k, panel)  # line 8
        if not calm:
            m = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = shifted(tile, l, acc, shift, m)
            if shift is not None:
                s.sub_(shift)
        p = tile.power_(s)
        l.add_(tile.sums(p))  # line 9
        tile.add_rows(acc, p, v)  # line 10
    if (sink := tile.sink()) is not None:  # one more score, with no value
        shift = shifted(tile, l, acc, shift, torch.maximum(m, sink))
        l.add_(tile.power_(sink.clone() if shift is None else sink - shift))
    store(tile, acc, l, shift, out, lse)


def shifted(tile: Tile, l: Tensor, acc: Tensor, old: Tensor | None, m: Tensor) -> Tensor | None:
    """What to subtract from the scores of rows with maximum m, sum and output brought along; None if 0 from all."""
    calm = CALM if tile.slab.base2 else CALM * LN2
    new = torch.where((m.abs() <= calm) | (m == -math.inf), 0.0, m)
    if old is None and not bool(new.any()):
        return None
    # Above 0 only for rows that have seen nothing, whose zeros must not meet an infinity.
    alpha = tile.power_((-new if old is None else old - new).clamp_(max=0.0))
    l.mul_(alpha)
    acc.mul_(alpha)
    return new


def width_of(panel: Panel) -> int:
    """A panel's size, rounded up to GRAIN."""
    return -(-panel.size // GRAIN) * GRAIN


def _copied(buffer: Tensor, t: Tensor) -> Tensor:
    """The buffer [g, width, D] with t [g, n, D] in it, 0 beyond."""
    buffer[:, : t.shape[1]] = t
    buffer[:, t.shape[1] :] = 0
    return buffer
