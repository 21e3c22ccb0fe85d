"""Forward variants side by side with FA3 and cuDNN; predictions in benchmarks/notes/hopper-experiments.md.

    python -m benchmarks.hopper experiments 180 fa3
    HOPPER_DIMS=192 python -m benchmarks.hopper experiments 200 fa3

Each contestant is captured once as a CUDA graph; then come rounds, each in another order: a few with all variants, then
HOPPER_ROUNDS (5) takes of HOPPER_TAKE (120) milliseconds with the fastest, the table's and the peers. The card's clock
is read all the while, never set; FLOP a clock and multiprocessor stand beside the rate. The JSON is written after each
cell, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.hopper.clock import (
    Call,
    Cell,
    _forward,
    contestants,
    import_peers,
    milliseconds,
    replays,
)
from benchmarks.hopper.watched import Rows, say
from relampago.plan import Plan

BOTH = (False, True)
SQUARE = ((128, 128), (256, 256), (64, 64), (192, 128), (96, 96), (192, 192))
LENGTHS = ((4, 4096), (16, 1024), (1, 16384), (1, 32768))  # the most telling first
ROUNDS = int(os.environ.get("HOPPER_ROUNDS", "5"))
SCREENING, KEPT = 2, 4  # rounds with every variant, and how many go on from there
# ms: several samples of the clock, which the power limit moves by a quarter
TAKE = float(os.environ.get("HOPPER_TAKE", "120"))
UNITS = 132  # multiprocessors


class Change(NamedTuple):
    """The table's plan with something else in it."""

    name: str
    dims: tuple[tuple[int, int], ...]
    changes: dict[str, int]


IN_HAND = ((128, 128), (96, 96))  # room for queries in registers
CHANGES = (
    Change("hold", IN_HAND, {"hold": 1}),
    Change(
        "hold, turns 2, pin 8, seldom",
        ((128, 128),),
        {"hold": 1, "pingpong": 2, "pin": 8, "lazy": 1},
    ),
)


class Clock:
    """The card's clock in MHz, its power and its temperature, as nvidia-smi reads them every 20 ms."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "20", "-i", "0"]
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
    """All dims of a length before the next length; with HOPPER_DIMS, those dims of keys alone, at every length.

    With HOPPER_LENGTHS, those lengths alone.
    """
    asked = [int(dim) for dim in os.environ.get("HOPPER_DIMS", "").split()]
    only = [dims for dims in SQUARE if dims[0] in asked and dims[0] == dims[1]]
    lengths = [int(length) for length in os.environ.get("HOPPER_LENGTHS", "").split()]
    for i, (batch, length) in enumerate(LENGTHS):
        if lengths and length not in lengths:
            continue
        for dim, dim_v in only or (SQUARE if i < 2 else SQUARE[:3]):
            for causal in BOTH:
                yield Cell(dim, dim_v, causal, batch, length)


def variants(cell: Cell) -> dict[str, Plan]:
    """The table's plan and all that differ from it."""
    plans = {"table": cell.plans()["table"]}
    for change in CHANGES:
        if (cell.dim, cell.dim_v) in change.dims:
            plan = replace(plans["table"], **change.changes)
            if plan not in plans.values():
                plans[change.name] = plan
    return plans


def compile_some(part: int, parts: int) -> None:
    """Compile a part of them, and launch nothing."""
    from benchmarks.hopper.correct import _compile_only

    _compile_only()
    todo: dict[Any, Call] = {}
    for cell in cells():
        small = cell._replace(batch=1)
        for plan in variants(cell).values():
            like = (cell.dim, cell.dim_v, cell.causal, plan, cell.length % plan.block_q)
            todo[like] = lambda small=small, plan=plan: _forward(plan, small.arrays())
    for call in list(todo.values())[part::parts]:
        try:
            call()
        except Exception as fault:
            say("compile", why=f"{type(fault).__name__}: {str(fault)[-300:]}")


def calls(cell: Cell, peers: dict[str, Any]) -> dict[str, Call]:
    """Everything that is timed for a cell, by name."""
    x = cell.arrays()
    found = {n: c for n, c in contestants(cell, x, peers).items() if n in ("cudnn", *peers)}
    for name, plan in variants(cell).items():
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


def best_of(
    takes: dict[str, Callable[[], float]], screened: dict[str, list[float]], plans: dict[str, Plan]
) -> dict[str, Callable[[], float]]:
    """The peers, the table's and the KEPT fastest variants."""
    times = {name: min(found) for name, found in screened.items() if found and name in plans}
    fast = sorted(times, key=lambda name: times[name])[:KEPT]
    return {n: take for n, take in takes.items() if n not in plans or n == "table" or n in fast}


def experiment(seconds: float, *names: str) -> None:
    """All cells, as far as the time allows."""
    until, clock, chance = time.time() + seconds, Clock(), random.Random(0)
    peers = import_peers(names)
    target = Path(os.environ.get("OUT", tempfile.gettempdir())) / "hopper-experiments.json"
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e-9
    say("ceiling", tflops=rate)
    rows: Rows = [{"kind": "ceiling", "tflops": rate}]
    for cell in cells():
        found, plans = calls(cell, peers), variants(cell)
        right(cell, found)
        takes = {name: replays(call, TAKE) for name, call in found.items()}
        screened: dict[str, list[float]] = {name: [] for name in takes}
        for turn in range(-SCREENING, ROUNDS):
            if turn == 0:
                takes = best_of(takes, screened, plans)
            order = list(takes)
            chance.shuffle(order)
            for name in order:
                if time.time() > until:
                    break
                begun = time.time()
                ms = takes[name]()
                row = {"turn": turn, "name": name, **cell._asdict(), "ms": ms}
                row |= {"tflops": cell.flops / ms * 1e-9, **clock.since(begun)}
                row |= {"plan": asdict(plans[name])} if name in plans else {}
                if turn < 0:
                    screened[name].append(ms)
                rows.append({"kind": "time" if turn >= 0 else "screened", **row})
                say("time" if turn >= 0 else "screened", **row)
        target.write_text(json.dumps(rows, indent=0))
    clock.process.terminate()


def report(rows: Rows) -> None:
    """For each cell the contestants by speed: the median of TFLOP/s, its range, the ratio to the best peer."""
    for row in rows:
        if row["kind"] in ("note", "wrong", "compile"):
            print(row)
    timed = [row for row in rows if row["kind"] == "time"]
    for cell in dict.fromkeys(tuple(r[f] for f in Cell._fields) for r in timed):
        mine = [r for r in timed if tuple(r[f] for f in Cell._fields) == cell]
        rates = {
            n: [r["tflops"] for r in mine if r["name"] == n] for n in {r["name"] for r in mine}
        }
        middle = {name: statistics.median(found) for name, found in rates.items()}
        best = max((middle[n] for n in ("cudnn", "fa3", "fa4") if n in middle), default=0.0)
        print("\n" + str(Cell(*cell)))
        for name, rate in sorted(middle.items(), key=lambda item: -item[1]):
            ratio = f"{rate / best:6.3f}" if best else ""
            seen = [r for r in mine if r["name"] == name and "mhz" in r]
            clock = ""
            if seen:  # and what the kernel does in a clock, whatever the power limit made of that
                each = statistics.median(r["tflops"] / r["mhz"] * 1e6 / UNITS for r in seen)
                clock = f"{statistics.median(r['mhz'] for r in seen):.0f} MHz {each:.0f} FLOP/clock"
            spread = f"{min(rates[name]):.0f}..{max(rates[name]):.0f}"
            print(f"  {name:16}{rate:6.0f}{ratio}  {spread:10} {clock}")
