"""Every named problem against the fp64 oracle, by the tests' own error budget."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.hopper.problems import Named, call, problems
from benchmarks.hopper.watched import say

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


class Poison:
    """torch, but for `empty`, which is full of NaN: what a kernel leaves unwritten shows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, **kinds: Any) -> torch.Tensor:
        made = torch.empty(*shape, **kinds)
        return made.fill_(torch.nan) if made.is_floating_point() else made


def asked() -> dict[str, Named]:
    """All problems, or with HOPPER_DIMS those of these dims of keys."""
    dims = [int(dim) for dim in os.environ.get("HOPPER_DIMS", "").split()]
    return {name: p for name, p in problems().items() if not dims or p.dim in dims}


def check(part: int, parts: int) -> None:
    """One part of the problems, in the order of their names."""
    from budget import check as judge
    from oracle import dense

    from relampago.backends.gluon import launch

    launch.torch = Poison()
    for name, problem in list(asked().items())[part::parts]:
        say("start", name=name)
        tensors, options = problem.make()
        try:
            out, lse = call(tensors, options, "gluon_sm90")
            torch.cuda.synchronize()
            found = []
            for dtype in (problem.dtype, torch.float64):
                wide = tuple(t.to(dtype) for t in tensors)
                found.append(dict(zip(("out", "lse"), dense(wide, options, dtype), strict=True)))
            judge(name, {"out": out, "lse": lse}, *found, problem.dtype)
            again, _ = call(tensors, options, "gluon_sm90")
            assert torch.equal(out, again), "a second call differs"
            error = (out.double() - found[1]["out"]).norm() / found[1]["out"].norm().clamp_min(1e-9)
            say("check", name=name, ok=True, error=error.item())
        except Exception as fault:
            say("check", name=name, ok=False, why=f"{type(fault).__name__}: {str(fault)[-400:]}")
            if "CUDA" in str(fault):
                raise


def _compile_only() -> None:
    """Let the backends' launches compile and start nothing."""
    from relampago.backends.gluon import launch
    from relampago.backends.triton import decode, forward

    def warm(kernel: Any, grid: int, plan: Any, *args: Any, **options: Any) -> None:
        kernel.run(*args, grid=(grid, 1, 1), warmup=True, num_warps=plan.warps, **options)

    def warm_triton(kernel: Any, grid: int, plan: Any, *args: Any) -> None:
        warm(kernel, grid, plan, *args, num_stages=plan.stages, enable_fp_fusion=True)

    def warm_decode(kernel: Any, grid: int, plan: Any, chained: bool, *args: Any) -> None:
        more = {"launch_pdl": True} if chained else {}
        warm(kernel, grid, plan, *args, num_stages=plan.stages, **more)

    launch.launch, forward.launch, decode.launch = warm, warm_triton, warm_decode


def compile_problems(part: int, parts: int) -> None:
    """Compile what `check` will launch, and launch nothing."""
    _compile_only()
    compile_each(
        [lambda p=problem: call(*p.make(), "gluon_sm90") for problem in asked().values()],
        part, parts,
    )  # fmt: skip


def compile_each(jobs: list[Any], part: int, parts: int) -> None:
    """One part of some calls."""
    for job in jobs[part::parts]:
        try:
            job()
        except Exception as fault:
            say("compile", why=f"{type(fault).__name__}: {str(fault)[-400:]}")


def compile_cells(part: int, parts: int) -> None:
    """Compile what `clock` and `short` will launch, and launch nothing."""
    from benchmarks.hopper import clock, short

    _compile_only()
    jobs: list[Any] = []
    seen: set[object] = set()
    for cell in clock.cells():  # lengths that cut alike compile alike
        like = (cell.dim, cell.dim_v, cell.causal, cell.length % 192, *cell.plans().values())
        if like not in seen:
            seen.add(like)
            jobs.append(cell.ours)
    compile_each(jobs + short.jobs(), part, parts)


def report(rows: list[dict[str, Any]]) -> None:
    """How many hold, and which do not."""
    checks = [row for row in rows if row["kind"] == "check"]
    bad = [row for row in checks if not row["ok"]]
    worst = max((row.get("error", 0.0) for row in checks), default=0.0)
    print(f"{len(checks)} of {len(asked())} checked, {len(bad)} bad, worst error {worst:.2e}")
    for row in bad:
        print(f"  BAD {row['name']}: {row['why']}")
