"""Where a decoding call's microseconds go, on a GPU: its two kernels alone and together, chained or not, by splits.

    python -m benchmarks.decode_parts SECONDS [SRC]

32 query heads on 8 kv heads of dim 128, one query, the table's plan; pages of 64 in random order, and contiguous keys.
What is timed walks keys and values of 1 GiB and more, so that nothing is found in the L2 cache. SRC is another commit's
`src`, timed before and after this one's, as in `git archive COMMIT src | tar -x -C old`, then old/src. Writes
$OUT/decode-parts.json and ends with a table of medians.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.hopper.clock import milliseconds
from benchmarks.hopper.watched import Rows, elapsed, keep, say, watch
from relampago import quant
from relampago.backends.triton import decode as kernels
from relampago.cache import PagedKVCache
from relampago.lower import prepare
from relampago.op import arrays_of, problem_of
from relampago.options import Options
from relampago.plan import Plan
from relampago.problem import Arrays
from relampago.select import by_name

HEADS, GROUPS, DIM, PAGE = 32, 8, 128, 64
WALKED = 1 << 30  # bytes
CELLS = (
    (1, 8192, "contiguous"), (1, 8192, "bf16"), (1, 32768, "bf16"), (1, 32768, "e4m3"), (8, 8192, "bf16"),
    (8, 8192, "e4m3"),
)  # fmt: skip


def bytes_of(batch: int, length: int, kind: str) -> int:
    """Of all keys and values."""
    return 2 * batch * length * GROUPS * DIM * (1 if kind == "e4m3" else 2)


def call_of(batch: int, length: int, kind: str) -> tuple[Arrays, Plan]:
    """A call and the table's plan for it."""
    made = {"device": "cuda", "dtype": quant.E4M3 if kind == "e4m3" else torch.bfloat16}
    q = torch.randn(batch, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    if kind == "contiguous":
        k, v = (torch.empty(batch, length, GROUPS, DIM, **made).normal_() for _ in range(2))
        call = prepare(q, k, v, Options(causal=True))
        return arrays_of(call), by_name("triton").plan(problem_of(call))
    ones = torch.ones(GROUPS, device="cuda") if kind == "e4m3" else None
    pages = batch * length // PAGE
    cache = PagedKVCache(
        batch, pages, PAGE, GROUPS, DIM, most=length // PAGE, k_scale=ones, v_scale=ones, **made
    )
    for t in (cache.k, cache.v):
        if kind == "e4m3":
            t.view(torch.uint8).random_(0, 120)
        else:
            t.normal_()
    cache.reserve(length)
    cache.page_table = torch.randperm(pages, device="cuda").view(batch, -1).int()
    cache.lengths.fill_(length)
    call = prepare(q, cache.k, cache.v, Options(causal=True, **cache.descales), cache=cache)
    return arrays_of(call), by_name("triton").plan(problem_of(call))


@contextlib.contextmanager
def only(name: str) -> Iterator[None]:
    """Inside, of a call's kernels those are launched whose name begins so."""
    before = kernels.launch

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if kernel.fn.__name__.startswith(name):
            before(kernel, *args, **kwargs)

    kernels.launch = launch
    try:
        yield
    finally:
        kernels.launch = before


def chosen(x: Arrays, plan: Plan) -> int:
    """The splits that the library takes by itself."""
    found: list[int] = []
    before = kernels.splits_for
    kernels.splits_for = lambda *args: found.append(before(*args)) or found[-1]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        kernels.decode(x, plan)
    finally:
        kernels.splits_for = before
    return found[0]


def ways(splits: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, kernels, and options of what is timed."""
    yield "whole", "", {}
    yield "over keys", "attend", {}
    yield "combine", "combine", {}
    yield "not chained", "", {"chained": False}
    for other in (splits // 2, splits * 3 // 4, splits * 3 // 2):
        yield f"{other} splits", "", {"splits": other}


def measure(seconds: float, tree: str) -> None:
    """Every way of every cell."""
    until = time.time() + seconds
    for batch, length, kind in CELLS:
        if time.time() > until:
            return
        say("start", cell=(batch, length, kind))
        count = -(-WALKED // bytes_of(batch, length, kind))
        calls = [call_of(batch, length, kind) for _ in range(count)]
        plan = calls[0][1]
        splits = chosen(*calls[0])
        for name, kernel, how in ways(splits):

            def walk(plan: Plan = plan, how: dict[str, Any] = how, calls: Any = calls) -> None:
                for x, _ in calls:
                    kernels.decode(x, plan, **how)

            with only(kernel):
                us = milliseconds(walk) * 1e3 / count
            say("parts", tree=tree, cell=[batch, length, kind], splits=splits, way=name, us=us)
        del calls


def report(rows: Rows) -> None:
    """Microseconds by cell, way and tree."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in (row for row in rows if row["kind"] == "parts"):
        of = found.setdefault((row["tree"], *row["cell"], row["splits"]), {})
        of.setdefault(row["way"], []).append(row["us"])
    for (tree, batch, length, kind, splits), times in sorted(found.items(), key=lambda x: x[0][1:]):
        said = ", ".join(f"{name} {statistics.median(us):.1f}" for name, us in times.items())
        rate = bytes_of(batch, length, kind) / statistics.median(times["whole"]) * 1e-3
        print(f"{tree:4} {batch} x {length} {kind}, {splits} splits: {rate:.0f} GB/s; us: {said}")


def main(seconds: float, old: str | None) -> None:
    """Run, write, print: the other tree, this one, the other once more."""
    rows: Rows = []
    turns = [("new", None)] if old is None else [("old", old), ("new", None), ("old", old)]
    here = os.environ.get("PYTHONPATH", "")
    for turn, (name, tree) in enumerate(turns):
        os.environ["PYTHONPATH"] = here if tree is None else f"{Path(tree).resolve()}:{here}"
        each = (seconds - elapsed()) / (len(turns) - turn)
        rows += watch([(each - 3, name)], each, elapsed() + each, "benchmarks.decode_parts")
    target = keep(rows, "decode-parts")
    report(rows)
    print(f"{elapsed():.0f} s, {target}")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] == "--job":
        measure(float(words[1]), words[2])
    elif len(words) in (1, 2):
        main(float(words[0]), words[1] if len(words) == 2 else None)
    else:
        sys.exit("expected: SECONDS [SRC]")
