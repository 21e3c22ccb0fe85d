"""The command line: see the package's docstring."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "hopper_cache"))

from benchmarks.hopper import clock, correct, short, stress
from benchmarks.hopper.watched import Rows, elapsed, watch

COMPILERS = 14  # processes
CHECKERS = 5
JOBS = {
    "compile": lambda part, parts: correct.compile_all(int(part), int(parts)),
    "check": lambda part, parts: correct.check(int(part), int(parts)),
    "stress": lambda part, launches, s: stress.stress(int(part), int(launches), float(s)),
    "clock": lambda seconds, *peers: clock.clock(float(seconds), *peers),
    "short": lambda seconds, *peers: short.short(float(seconds), *peers),
}


def compiled(budget: float) -> Rows:
    """Fill Triton's cache."""
    rows = watch([("compile", i, COMPILERS) for i in range(COMPILERS)], budget, budget * 0.6)
    for row in rows:
        print("not compiled", row)
    print(f"compiled at {elapsed():.0f} s", flush=True)
    return rows


def run(mode: str, budget: float, peers: list[str]) -> Rows:
    """One mode."""
    if mode == "check":
        rows = compiled(budget)
        rows += watch([("check", i, CHECKERS) for i in range(CHECKERS)], budget, budget - 3)
        correct.report(rows)
    elif mode == "stress":
        parts = 4
        left = budget - 20
        rows = watch(
            [("stress", i, 10_000 // parts, left) for i in range(parts)], budget, budget - 3
        )
        stress.report(rows)
    elif mode == "clock":
        rows = compiled(budget)
        rows += watch([("clock", budget - 6 - elapsed(), *peers)], budget, budget - 2)
        clock.report(rows)
    else:
        rows = watch([("short", budget - 8, *peers)], budget, budget - 2)
        short.report(rows)
    return rows


def main(mode: str, budget: str, *peers: str) -> None:
    """Run, print, write."""
    rows = run(mode, float(budget), list(peers))
    target = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"hopper-{mode}.json"
    target.write_text(json.dumps(rows))
    print(f"{elapsed():.0f} s, {target}")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] == "--job":
        JOBS[words[1]](*words[2:])
    elif len(words) >= 2 and words[0] in ("check", "stress", "clock", "short"):
        main(*words)
    else:
        sys.exit("expected: check|stress|clock|short SECONDS [fa3] [fa4]")
