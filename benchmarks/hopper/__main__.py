"""The command line: see the package's docstring."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "hopper_cache"))

from benchmarks.hopper import changes, clock, correct, experiments, short, stress
from benchmarks.hopper.watched import Rows, elapsed, keep, watch

COMPILERS = 14  # processes
CHECKERS = 5
STRESSERS = 4
JOBS = {
    "compile-problems": lambda part, parts: correct.compile_problems(int(part), int(parts)),
    "compile-cells": lambda part, parts: correct.compile_cells(int(part), int(parts)),
    "check": lambda part, parts: correct.check(int(part), int(parts)),
    "stress": lambda part, launches, s: stress.stress(int(part), int(launches), float(s)),
    "clock": lambda seconds, *peers: clock.clock(float(seconds), *peers),
    "compile-experiments": lambda part, parts: experiments.compile_some(int(part), int(parts)),
    "experiments": lambda seconds, *peers: experiments.experiment(float(seconds), *peers),
    "short": lambda seconds, *peers: short.short(float(seconds), *peers),
}


REPORTS = {"clock": clock.report, "short": short.report, "experiments": experiments.report}


def compiled(job: str, budget: float) -> Rows:
    """Fill Triton's cache."""
    rows = watch([(job, i, COMPILERS) for i in range(COMPILERS)], budget, elapsed() + budget * 0.6)
    for row in rows:
        print("not compiled", row)
    print(f"compiled at {elapsed():.0f} s", flush=True)
    return rows


def check(budget: float) -> Rows:
    """Every problem."""
    jobs: list[tuple[Any, ...]] = [("check", i, CHECKERS) for i in range(CHECKERS)]
    rows = watch(jobs, budget, elapsed() + budget)
    correct.report(rows)
    return rows


def endure(launches: int, budget: float) -> Rows:
    """Random launches."""
    jobs = [("stress", i, launches // STRESSERS, budget - 10) for i in range(STRESSERS)]
    rows = watch(jobs, budget, elapsed() + budget)
    stress.report(rows)
    return rows


def timed(job: str, budget: float, peers: list[str]) -> Rows:
    """`clock`, `short` or `experiments`, alone on the card."""
    rows = watch([(job, budget - 6, *peers)], budget, elapsed() + budget)
    REPORTS[job](rows)
    return rows


def run(mode: str, budget: float, peers: list[str]) -> Rows:
    """One mode; `all` leaves endurance out."""
    rows: Rows = []
    if mode in ("check", "all"):
        rows += compiled("compile-problems", budget)
    if mode in ("clock", "all"):
        rows += compiled("compile-cells", budget - elapsed())
    if mode in ("check", "all"):
        left = budget - elapsed() - 2
        rows += check(left if mode == "check" else min(40.0, left))
    if mode == "stress":
        rows += endure(10_000, budget - 2)
    if mode in ("short", "all"):
        left = budget - elapsed() - 2
        rows += timed("short", left if mode == "short" else min(25.0, left), peers)
    if mode in ("clock", "all"):
        rows += timed("clock", budget - elapsed() - 2, peers)
    if mode == "experiments":
        rows += compiled("compile-experiments", budget * 0.6)
        rows += timed("experiments", budget - elapsed() - 2, peers)
    return rows


def main(mode: str, budget: str, *peers: str) -> None:
    """Run, print, write. After `check` and `stress` may come a change to the plans, else peers."""
    if mode in ("check", "stress") and peers:
        changes.ask_for(*peers)
    rows = run(mode, float(budget), list(peers))
    target = keep(rows, f"hopper-{mode}")
    print(f"{elapsed():.0f} s, {target}")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] == "--job":
        changes.apply()
        JOBS[words[1]](*words[2:])
    elif len(words) >= 2 and words[0] in (*REPORTS, "check", "stress", "all"):
        main(*words)
    else:
        sys.exit(
            "expected: check|stress SECONDS [hold], clock|short|experiments|all SECONDS [fa3] [fa4]"
        )
