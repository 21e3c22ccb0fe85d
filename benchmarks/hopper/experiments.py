"""Forward variants side by side with FA3, cuDNN and earlier commits, in 8 minutes; predictions in
benchmarks/notes/hopper-experiments.md.

    python -m benchmarks.hopper experiments 470 fa3

Each cell's contestants run in one order and then in the other. The card's clock is read all the while, never set. The
JSON is written after each cell, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.hopper.clock import Call, Cell, _forward, contestants, import_peers, milliseconds
from benchmarks.hopper.trees import trees
from benchmarks.hopper.watched import Rows, say
from relampago.plan import Plan

BOTH, CAUSAL, FULL = (False, True), (True,), (False,)
SQUARE = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LENGTHS = ((4, 4096), (1, 16384), (16, 1024))  # the most telling first


class Change(NamedTuple):
    """The table's plan with something else in it."""

    name: str
    dims: tuple[tuple[int, int], ...]
    changes: dict[str, int]
    causal: tuple[bool, ...] = BOTH


CHANGES = (
    Change("lazy", SQUARE, {"lazy": 1}),
    Change("lazy turns", SQUARE, {"lazy": 1, "pingpong": 1, "pin": 0}),
    Change("lazy pin", SQUARE, {"lazy": 1, "pin": 1}),
    Change("grid", SQUARE, {"schedule": 0}, CAUSAL),
    Change("counter", ((256, 256),), {"schedule": 2}, CAUSAL),
    Change("fixed", ((128, 128),), {"schedule": 1}, CAUSAL),
    Change("one head", SQUARE, {"reach": 1}, CAUSAL),
    Change("16 MiB", ((64, 64), (128, 128), (256, 256)), {"reach": 16}, CAUSAL),
    Change("heaviest of all", SQUARE, {"reach": 2047}, CAUSAL),
    Change("rotate", SQUARE, {"rotate": 1}, FULL),
    Change("128 rows", ((64, 64),), {"block_q": 128, "stages": 4, "pingpong": 1, "pin": 1}),
    Change("3 stages", ((64, 64), ), {"stages": 3}),
    Change("2 stages", ((96, 96),), {"stages": 2}),
    Change("192 rows lazy", ((96, 96),), {"block_q": 192, "block_k": 64, "stages": 4, "pin": 1, "lazy": 1}),
    Change("64 keys", ((192, 128),), {"block_k": 64, "stages": 3, "lazy": 1}),
    Change("32 keys", ((256, 256),), {"block_k": 32, "stages": 4, "lazy": 1}, CAUSAL),
)  # fmt: skip


class Clock:
    """The card's clock in MHz, its power and its temperature, as nvidia-smi reads them every 50 ms."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "50", "-i", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.samples.append((time.time(), [float(x) for x in line.split(",")]))
            except ValueError:  # a value that the card does not tell
                continue

    def since(self, begun: float) -> dict[str, float]:
        """The medians since then."""
        found = [values for at, values in self.samples if at >= begun]
        names = ("mhz", "watts", "celsius")
        return (
            {n: statistics.median(x) for n, x in zip(names, zip(*found, strict=True), strict=True)}
            if found
            else {}
        )


def cells() -> Iterator[Cell]:
    """All dims of a length before the next length."""
    for batch, length in LENGTHS:
        for dim, dim_v in SQUARE:
            for causal in BOTH:
                yield Cell(dim, dim_v, causal, batch, length)


def variants(cell: Cell) -> dict[str, Plan]:
    """The table's plan and all that differ from it."""
    plans = {"table": cell.plans()["table"]}
    for change in CHANGES:
        if (cell.dim, cell.dim_v) in change.dims and cell.causal in change.causal:
            plan = replace(plans["table"], **change.changes)
            if plan not in plans.values():
                plans[change.name] = plan
    return plans


def compile_some(part: int, parts: int) -> None:
    """Compile a part of them, with those of earlier commits, and launch nothing."""
    from benchmarks.hopper.correct import _compile_only

    _compile_only()
    others = list(trees().values())
    from relampago.backends.gluon import launch

    for tree in others:
        tree["backends.gluon.launch"].launch = launch.launch
    todo: dict[Any, Call] = {}
    for cell in cells():
        small = cell._replace(batch=1)
        for name, plan in variants(cell).items():
            like = (cell.dim, cell.dim_v, cell.causal, plan, cell.length % plan.block_q)
            todo[like] = lambda small=small, plan=plan: _forward(plan, small.arrays())
            for i, tree in enumerate(others if name == "table" else ()):
                todo[(i, *like)] = lambda s=small, t=tree, p=plan: t.forward(p, s.arrays(), 132)()
    for call in list(todo.values())[part::parts]:
        try:
            call()
        except Exception as fault:
            say("compile", why=f"{type(fault).__name__}: {str(fault)[-300:]}")


def calls(cell: Cell, peers: dict[str, Any], others: dict[str, Any]) -> dict[str, Call]:
    """Everything that is timed for a cell, by name."""
    x = cell.arrays()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    found = {n: c for n, c in contestants(cell, x, peers).items() if n in ("cudnn", *peers)}
    plans = variants(cell)
    for name, tree in others.items():
        try:
            found[name] = tree.forward(plans["table"], x, count)
            found[name]()
        except Exception as fault:  # an earlier commit may not know it
            found.pop(name, None)
            say("note", name=name, why=str(fault)[-200:], **cell._asdict())
    for name, plan in plans.items():
        found[name] = lambda plan=plan: _forward(plan, x)
    return found


def right(cell: Cell, found: dict[str, Call]) -> None:
    """What differs from the table's result by more than rounding: such a time counts for nothing."""
    want = found["table"]()[0].float()
    for name, call in found.items():
        if name != "table" and name in variants(cell):
            error = ((call()[0].float() - want).norm() / want.norm()).item()
            if not error < 6e-3:  # both are up to 2.3e-3 from fp64
                say("wrong", name=name, error=error, **cell._asdict())


def experiment(seconds: float, *names: str) -> None:
    """All cells, as far as the time allows."""
    until, clock = time.time() + seconds, Clock()
    peers, others = import_peers(names), trees()
    target = Path(os.environ.get("OUT", tempfile.gettempdir())) / "hopper-experiments-cells.json"
    rows: Rows = []
    for cell in cells():
        found = calls(cell, peers, others)
        right(cell, found)
        order = list(found)
        for turn, line in enumerate((order, order[::-1])):
            for name in line:
                if time.time() > until:
                    break
                begun, row = time.time(), {"turn": turn, "name": name, **cell._asdict()}
                try:
                    ms = milliseconds(found[name])
                    row |= {"ms": ms, "tflops": cell.flops / ms * 1e-9, **clock.since(begun)}
                    rows.append({"kind": "time", **row})
                    say("time", **row)
                except Exception as fault:
                    say("note", why=f"{type(fault).__name__}: {str(fault)[-200:]}", **row)
        target.write_text(json.dumps(rows, indent=0))
    clock.process.terminate()


def report(rows: Rows) -> None:
    """For each cell the contestants by speed: both orders' TFLOP/s, their clocks, the ratio to the best peer."""
    for row in rows:
        if row["kind"] in ("note", "wrong", "compile"):
            print(row)
    timed = [row for row in rows if row["kind"] == "time"]
    for cell in dict.fromkeys(tuple(r[f] for f in Cell._fields) for r in timed):
        mine = [r for r in timed if tuple(r[f] for f in Cell._fields) == cell]
        rates = {
            n: [r["tflops"] for r in mine if r["name"] == n] for n in {r["name"] for r in mine}
        }
        best = max(
            (statistics.mean(v) for n, v in rates.items() if n in ("cudnn", "fa3", "fa4")),
            default=0.0,
        )
        print("\n" + str(Cell(*cell)))
        for name, found in sorted(rates.items(), key=lambda item: -statistics.mean(item[1])):
            mhz = "/".join(f"{r.get('mhz', 0):.0f}" for r in mine if r["name"] == name)
            ratio = f"{statistics.mean(found) / best:6.3f}" if best else ""
            print(f"  {name:18}{'/'.join(f'{x:.0f}' for x in found):>12}{ratio}   {mhz} MHz")
