"""FP8 attention on an H200: right first, then its speed beside FlashAttention-3's, what the casts cost, decoding.

    python -m benchmarks.fp8 check|clock|decode|all SECONDS [fa3]
    python -m benchmarks.fp8 decode SECONDS SRC      # also another commit's src, as `decode_parts.py` says

Jobs run in processes that are ended when they take too long. Writes $OUT/fp8-<mode>.json and ends with a short table.
FlashAttention-3 comes as ../shared/peers/README.md says.
"""

from __future__ import annotations

import functools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fp8_cache"))

import torch

import relampago as rl
from benchmarks.hopper.clock import Cell, import_peers, milliseconds
from benchmarks.hopper.watched import Rows, elapsed, keep, say, watch
from relampago import quant
from relampago.cache import PagedKVCache
from relampago.plan import Plan

LENGTHS = ((4, 4096), (2, 8192), (1, 16384), (1, 32768))
DIMS = (128, 256)
CHECKERS = 6
COMPILERS = 8  # processes
PROBLEMS: tuple[dict[str, Any], ...] = tuple(
    {"dim": dim, "len": length, "heads": heads, **more}
    for dim in (64, 128, 256, 96)
    for length, heads in ((1024, (4, 4)), (777, (8, 2)), (20, (8, 1)), (2048, (2, 2)))
    for more in ({}, {"causal": True}, {"causal": True, "window": (100, 0)})
) + tuple(
    {"dim": dim, "packed": True, "heads": (4, 2), "causal": c}
    for dim in (64, 128, 256)
    for c in (False, True)
)


def _plan(rows: int, keys: int, stages: int, promote: int, **more: int) -> Plan:
    return Plan(
        block_q=rows,
        block_k=keys,
        warps=4,
        stages=stages,
        promote=promote,
        **{"schedule": 2, **more},
    )


VARIANTS: dict[int, dict[str, Plan]] = {
    128: {
        f"promoted, turns {turns}, pin {pin}": _plan(
            128, 128, 4, 1, pingpong=turns, chain=1, pin=pin
        )
        for turns, pin in ((2, 8), (1, 8), (2, 1))
    },
    256: {
        f"turns {turns}, pin {pin}": _plan(128, 128, 2, 0, pingpong=turns, pin=pin)
        for turns, pin in ((2, 1), (2, 8), (1, 1), (0, 0))
    },
}


DECODING = {
    f"{keys} keys, {stages} stages, {warps} warps": Plan(
        block_q=64, block_k=keys, warps=warps, stages=stages
    )
    for keys, stages, warps in ((64, 4, 4), (64, 4, 2))
}


def tensors(problem: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Operands with the paper's outliers, and options."""
    g = torch.Generator("cuda").manual_seed(0)
    heads, kv = problem["heads"]
    options = {name: problem[name] for name in ("causal", "window") if name in problem}
    shape: tuple[int, ...] = (2, problem.get("len", 0))
    if problem.get("packed"):
        ends = torch.tensor([0, 300, 301, 301, 1500, 1777], dtype=torch.int32, device="cuda")
        shape = (1777,)
        options |= {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": 1199,
            "max_seqlen_k": 1199,
        }

    def one(heads: int) -> torch.Tensor:
        size = (*shape, heads, problem["dim"])
        x, big, where = (torch.randn(size, device="cuda", generator=g) for _ in range(3))
        return (x + 10 * big * (where > 3.09)).bfloat16()

    return (one(heads), one(kv), one(kv)), options


def check(part: int, parts: int) -> None:
    """The kernel against the emulation on the same card: at most twice its error to fp64, and one rounding."""
    for i, problem in enumerate(PROBLEMS):
        if i % parts != part:
            continue
        say("start", problem=str(problem))
        operands, options = tensors(problem)
        attend = rl.attention_varlen if problem.get("packed") else rl.attention
        try:
            got = attend(
                *operands, **options, precision="fp8", backend="gluon_sm90", return_lse=True
            )
            like = attend(
                *operands, **options, precision="fp8", backend="reference", return_lse=True
            )
            exact = attend(
                *(t.double() for t in operands), **options, backend="reference", return_lse=True
            )
        except Exception as fault:
            say(
                "check",
                problem=str(problem),
                right=False,
                why=f"{type(fault).__name__}: {str(fault)[-300:]}",
            )
            continue
        errors, right = {}, True
        for name, a, b, c in zip(("out", "lse"), got, like, exact, strict=True):
            seen = c.isfinite()
            ours, theirs = (
                (t[seen].double() - c[seen]).square().mean().sqrt().item() for t in (a, b)
            )
            same = torch.equal(a.isfinite(), seen)
            errors[name] = (ours, theirs)
            right &= same and ours <= 2 * theirs + c[seen].abs().max().item() * 2.0**-8
        say("check", problem=str(problem), right=right, errors=errors)


def long_sums(length: int) -> None:
    """What promotion is worth: 128 rows against many keys, by plan; error of out to fp64 relative to out."""
    g = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(1, 128, 1, 128, device="cuda", generator=g).bfloat16()
    k, v = (torch.randn(1, length, 1, 128, device="cuda", generator=g).bfloat16() for _ in range(2))
    v += 0.25
    exact = rl.attention(q.double(), k.double(), v.double(), backend="reference")
    for name, plan in {
        "promoted": _plan(128, 128, 4, 1),
        "not promoted": _plan(128, 128, 4, 0),
    }.items():
        say("start", sums=name)
        with rl.using(plan=plan):
            out = rl.attention(q, k, v, precision="fp8", backend="gluon_sm90")
        say(
            "sums",
            keys=length,
            plan=name,
            error=((out.double() - exact).norm() / exact.norm()).item(),
        )
    like = rl.attention(q, k, v, precision="fp8", backend="reference")
    say(
        "sums",
        keys=length,
        plan="emulation",
        error=((like.double() - exact).norm() / exact.norm()).item(),
    )


def contestants(
    cell: Cell, peers: dict[str, Callable[..., Any]]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All that is timed for a shape, by name."""
    from relampago.backends.gluon import fp8_launch, launch
    from relampago.quant.kernels import columns_in_e4m3, rows_in_e4m3

    count = torch.cuda.get_device_properties(0).multi_processor_count
    x = cell.arrays()
    n, plain = cell.length, replace(x, dtype=torch.bfloat16)
    x = replace(plain, precision="fp8")
    operands = fp8_launch.operands(x)

    def kernel(plan: Plan) -> Any:
        before, fp8_launch.operands = fp8_launch.operands, lambda _: operands
        try:
            return fp8_launch.forward(plan, x, count)
        finally:
            fp8_launch.operands = before

    def casts(rotated: bool) -> Any:
        rows = [rows_in_e4m3(t, None, n, rotated=rotated) for t in (x.q, x.k)]
        return rows, columns_in_e4m3(x.v, None, n)

    table = rl.explain(
        x.q, x.k, x.v, causal=cell.causal, precision="fp8", backend="gluon_sm90"
    ).plan
    for name, plan in {"fp8": table, **VARIANTS[cell.dim]}.items():
        yield name, lambda plan=plan: kernel(plan)
    yield "rotate + cast + transpose", lambda: casts(True)
    yield "cast + transpose", lambda: casts(False)
    yield "rotate + cast q, k", lambda: [rows_in_e4m3(t, None, n) for t in (x.q, x.k)]
    yield "transpose v", lambda: columns_in_e4m3(x.v, None, n)
    yield "cast v", lambda: rows_in_e4m3(x.v, None, n, rotated=False)
    in_eights, of_v = operands[2][1], quant.quantise(x.v).values
    yield "transpose e4m3 v", lambda: columns_in_e4m3(of_v, None, n, in_eights)
    yield (
        "attention(precision='fp8')",
        lambda: rl.attention(
            x.q, x.k, x.v, causal=cell.causal, precision="fp8", backend="gluon_sm90"
        ),
    )
    bf16 = rl.explain(x.q, x.k, x.v, causal=cell.causal, backend="gluon_sm90").plan
    yield "bf16", lambda: launch.forward(bf16, plain, count)
    for name, fn in peers.items():
        cast = [quant.quantise(t, per="tensor") for t in (x.q, x.k, x.v)]
        eights = [one.values for one in cast]
        scales = [
            one.scales.view(1, 1).expand(x.q.shape[0], x.k.shape[2]).contiguous() for one in cast
        ]
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        yield f"{name} fp8", functools.partial(fn, *eights, causal=cell.causal, **named)


def cells() -> list[Cell]:
    """Every shape that is timed."""
    return [Cell(d, d, causal, b, n) for d in DIMS for causal in (False, True) for b, n in LENGTHS]


def compile_some(part: int, parts: int) -> None:
    """Fill Triton's cache with a part of what `clock` will launch, and launch nothing but casts."""
    from benchmarks.hopper.correct import _compile_only

    _compile_only()
    for cell in cells()[part::parts]:
        for name, call in contestants(cell, {}):
            try:
                call()
            except Exception as fault:
                say(
                    "compile",
                    cell=cell,
                    name=name,
                    why=f"{type(fault).__name__}: {str(fault)[-200:]}",
                )


def clock(seconds: float, *names: str) -> None:
    """Every shape, twice, in shuffled order."""
    until, chance, peers = time.time() + seconds, random.Random(0), import_peers(names)
    for _ in range(2):
        todo = cells()
        chance.shuffle(todo)
        for cell in todo:
            jobs = list(contestants(cell, peers))
            chance.shuffle(jobs)
            for name, call in jobs:
                if time.time() > until:
                    return
                say("start", cell=cell, name=name)
                try:
                    ms = milliseconds(call)
                except Exception as fault:
                    say(
                        "fault",
                        cell=cell,
                        name=name,
                        why=f"{type(fault).__name__}: {str(fault)[-200:]}",
                    )
                    continue
                say(
                    "time",
                    dim=cell.dim,
                    causal=cell.causal,
                    length=cell.length,
                    name=name,
                    ms=ms,
                    flops=cell.flops,
                )


def decode(seconds: float) -> None:
    """Tokens a second with keys in bf16 and in e4m3, pages of 64, 32 query and 8 kv heads, head dim 128."""
    until = time.time() + seconds
    for batch, length in ((1, 32768), (8, 8192), (8, 32768), (64, 8192), (64, 32768)):
        found = {}
        for name in ("bf16", "e4m3"):
            if time.time() > until:
                return
            say("start", decode=(batch, length, name))
            dtype = torch.bfloat16 if name == "bf16" else quant.E4M3
            ones = None if name == "bf16" else torch.ones(8, device="cuda")
            pages = batch * length // 64
            cache = PagedKVCache(batch, pages, 64, 8, 128, most=length // 64, dtype=dtype, device="cuda",
                                 k_scale=ones, v_scale=ones)  # fmt: skip
            cache.reserve(length)
            for t in (cache.k, cache.v):
                for page in t.split(4096):
                    page.copy_(torch.randn(page.shape, device="cuda"))
            cache.lengths.fill_(length)
            q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
            plans = {} if name == "bf16" else DECODING
            for variant, plan in {name: None, **plans}.items():
                with rl.using(plan=plan):
                    found[variant] = milliseconds(
                        lambda q=q, cache=cache: rl.attention_decode(q, cache)
                    )
            del cache
        say("decode", batch=batch, length=length, tokens={n: batch / ms * 1e3 for n, ms in found.items()},
            ratio=found["bf16"] / found["e4m3"])  # fmt: skip


def report(rows: Rows) -> None:
    """The short table."""
    checks = [row for row in rows if row["kind"] == "check"]
    print(f"{sum(row['right'] for row in checks)} of {len(checks)} problems right")
    for row in checks:
        if not row["right"]:
            print("  wrong", row)
    for row in (row for row in rows if row["kind"] == "sums"):
        print(f"sums of {row['keys']} keys, {row['plan']:13} {row['error']:.2e}")
    times: dict[tuple[Any, ...], list[float]] = {}
    for row in (row for row in rows if row["kind"] == "time"):
        times.setdefault(
            (row["dim"], row["causal"], row["length"], row["flops"], row["name"]), []
        ).append(row["ms"])
    cells = sorted({key[:4] for key in times})
    for cell in cells:
        of_cell = {key[4]: statistics.median(ms) for key, ms in times.items() if key[:4] == cell}
        dim, causal, length, flops = cell
        said = [f"{name} {flops / ms * 1e-9:.0f}" for name, ms in sorted(of_cell.items(), key=lambda item: item[1])
                if "cast" not in name and "transpose" not in name]  # fmt: skip
        costs = [
            f"{name} {ms * 1e3:.0f} us"
            for name, ms in of_cell.items()
            if "cast" in name or "transpose" in name
        ]
        ratio = (
            f"ratio {of_cell['fa3 fp8'] / of_cell['fp8']:.2f}"
            if {"fa3 fp8", "fp8"} <= set(of_cell)
            else ""
        )
        print(
            f"d {dim} {'causal' if causal else 'full':6} {length // 1024}k  {ratio}  "
            f"TFLOP/s: {', '.join(said)}; {', '.join(costs)}"
        )
    for row in (row for row in rows if row["kind"] == "decode"):
        per = ", ".join(f"{name} {n:.0f}" for name, n in row["tokens"].items())
        print(
            f"decode batch {row['batch']} keys {row['length']} {row.get('tree', '')}: tokens/s {per}; "
            f"ratio {row['ratio']:.2f}"
        )


JOBS: dict[str, Callable[..., None]] = {
    "check": lambda part, parts: check(int(part), int(parts)),
    "sums": lambda length: long_sums(int(length)),
    "compile": lambda part, parts: compile_some(int(part), int(parts)),
    "clock": lambda seconds, *names: clock(float(seconds), *names),
    "decode": lambda seconds: decode(float(seconds)),
}


def main(mode: str, budget: float, names: list[str]) -> None:
    """Run, write, print."""
    rows: Rows = []
    if mode in ("check", "all"):
        jobs: list[tuple[Any, ...]] = [("check", i, CHECKERS) for i in range(CHECKERS)]
        jobs += [("sums", n) for n in (4096, 32768, 131072)]
        until = elapsed() + (budget if mode == "check" else 0.4 * budget)
        rows += watch(jobs, budget, until, "benchmarks.fp8")
    if mode in ("decode", "all"):
        here = os.environ.get("PYTHONPATH", "")
        trees = ["", *names] if mode == "decode" else [""]
        for turn, tree in enumerate(trees):
            left = (budget - elapsed()) / (len(trees) - turn) if mode == "decode" else 0.15 * budget
            os.environ["PYTHONPATH"] = f"{Path(tree).resolve()}:{here}" if tree else here
            found = watch([("decode", left - 5)], budget, elapsed() + left, "benchmarks.fp8")
            rows += [row | {"tree": tree} for row in found] if tree else found
        os.environ["PYTHONPATH"] = here
    if mode in ("clock", "all"):
        jobs = [("compile", i, COMPILERS) for i in range(COMPILERS)]
        rows += watch(jobs, budget, elapsed() + 0.5 * (budget - elapsed()), "benchmarks.fp8")
        left = budget - elapsed() - 2
        rows += watch([("clock", left - 5, *names)], budget, elapsed() + left, "benchmarks.fp8")
    target = keep(rows, f"fp8-{mode}")
    report(rows)
    print(f"{elapsed():.0f} s, {target}")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] == "--job":
        JOBS[words[1]](*words[2:])
    elif len(words) >= 2 and words[0] in ("check", "clock", "decode", "all"):
        main(words[0], float(words[1]), words[2:])
    else:
        sys.exit("expected: check|clock|decode|all SECONDS [fa3]")
