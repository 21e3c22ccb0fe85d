"""Gradients of score mods' arguments: dS summed over the elements that read an entry, without an N×N tensor.

Each task sums what its own heads read; at the end the tasks' tables are added in a fixed order, so that results do not
depend on which thread was faster. Memory: a table for each task, at most (B, H) of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relampago.backends.cpu.tile import Heads, Panel, Tile, scratch
from relampago.mods import Argument
from relampago.problem import Arrays, Wanted


class Task(NamedTuple):
    """Every `parts`-th tile of queries of some heads, from the part-th on."""

    heads: Heads
    part: int


class Tables:
    """The sums of all tasks, by task and number of the argument."""

    def __init__(self, x: Arrays, wanted: Wanted, dtype: torch.dtype) -> None:
        self.x, self.wanted, self.dtype = x, wanted.mod_args, dtype
        self.own: dict[tuple[Task, int], Tensor] = {}

    def of(self, task: Task, argument: Argument) -> Tensor | None:
        """The task's table [g, R, entries], [g, R, 1] for axis "head"; None if it is not wanted."""
        if not self.wanted or not self.wanted[argument.number]:
            return None
        key = (task, argument.number)
        if key not in self.own:  # a task runs on one thread
            h = task.heads
            entries = 1 if argument.axis == "head" else argument.tensor.shape[-1]
            shape = (h.g1 - h.g0, h.r1 - h.r0, entries)
            self.own[key] = torch.zeros(shape, dtype=self.dtype)
        return self.own[key]

    def whole(self) -> tuple[Tensor | None, ...]:
        """The gradients, shaped like the arguments; None where not wanted."""
        x = self.x
        sums = [
            torch.zeros_like(t, dtype=self.dtype) if wish else None
            for t, wish in zip(x.mod_args, self.wanted, strict=False)
        ]
        for task, number in sorted(self.own):
            part, target = self.own[task, number], sums[number]
            assert target is not None
            b, g0, g1, r0, r1 = task.heads
            if part.shape[2] == 1 and target.shape[-1] == x.q.shape[-2]:  # axis "head"
                part = part[..., 0]
                target = target if target.ndim == 1 else target[b]
            elif target.ndim == 1:
                target += part.sum((0, 1))
                continue
            else:
                target = target if target.ndim == 2 else target[b]
            target.unflatten(0, (-1, x.group))[g0:g1, r0:r1] += part
        return tuple(sums)


def through_mods(
    tile: Tile, steps: list[Tensor], panel: Panel, ds: Tensor, tables: Tables, task: Task
) -> None:
    """Carry dS [g, l·R, n] back through every mod, in place, and add to the arguments' tables on the way.

    `steps` holds each mod's input, as `Tile.scores` filled it.
    """
    grid = ds.view(*tile.shape, panel.size)
    for step, (rule, arguments) in reversed(list(zip(steps, tile.mods(panel), strict=True))):
        for argument, darg in zip(arguments, rule.dargs, strict=True):
            table = tables.of(task, argument) if isinstance(argument, Argument) else None
            if table is None or darg is None:
                continue
            h = tile.slab.heads  # within the task's group
            part = table[:, h.r0 - task.heads.r0 : h.r1 - task.heads.r0]
            add(tile, panel, argument, part, grid * tile.apply(darg, step, panel, arguments))
        assert rule.dfn is not None, "why_not refuses a backward without dfn"
        grid.mul_(tile.apply(rule.dfn, step, panel, arguments))


def add(tile: Tile, panel: Panel, argument: Argument, table: Tensor, change: Tensor) -> None:
    """Add change [g, l, R, n] to the entries of a table [g, R, entries] that its elements read."""
    if argument.axis == "head":
        table += change.sum((1, 3))[..., None]
    elif argument.axis == "q":
        table[..., tile.p0 : tile.p1] += change.sum(3).transpose(1, 2)
    elif argument.axis == "k":
        received = change.sum(1)
        if isinstance(panel.keys, slice):
            table[..., panel.keys] += received
        else:
            table.index_add_(2, panel.keys, received)
    elif argument.axis == "distance" and isinstance(panel.keys, slice):
        first = panel.keys.start - (tile.p1 - 1 + tile.slab.band.offset)  # of the last row
        add_diagonals(table, first, change)
    else:
        at = argument.index[-1].expand(change.shape[1], 1, -1)[
            :, 0
        ]  # [l, n]: the same for all heads
        flat = change.transpose(1, 2).flatten(2)  # [g, R, l·n]
        table.scatter_add_(2, at.flatten().expand_as(flat), flat)


def add_diagonals(table: Tensor, first: int, change: Tensor) -> None:
    """Add the sums along the diagonals of change [g, l, R, n] to a table of 2·reach + 1 distances [g, R, …].

    Written with one element less between rows, the diagonals of a matrix are the columns of another.
    """
    g, l, group, n = change.shape
    reach = table.shape[2] // 2
    if first >= reach or first + l + n - 2 <= -reach:  # all beyond the clip: one entry for all
        table[..., -1 if first >= reach else 0] += change.sum((1, 3))
        return
    width = l + n  # of a row, the last column stays empty
    skewed = scratch("skewed", (g, group, l * width), change.dtype).zero_()
    rows = skewed.as_strided(
        (g, group, l, n),
        (group * l * width, l * width, width - 1, 1),
        skewed.storage_offset() + l - 1,
    )
    rows.copy_(change.transpose(1, 2))
    sums = skewed.view(g, group, l, width).sum(2)[..., : width - 1]
    distance = torch.arange(first, first + width - 1).clamp_(-reach, reach).add_(reach)
    table.index_add_(2, distance, sums)
