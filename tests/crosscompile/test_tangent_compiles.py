"""Every row of the kernels of higher derivatives compiles with no GPU: it fits its architecture, and hardly spills."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder, disassembled, innermost
from crosscompile.rows import OLD, check, rows_of, shape_of
from crosscompile.sample import pinned, spared
from crosscompile.test_triton import CAUSAL, arrays

from relampago.backends.triton import backward, backward_tangent, tangent
from relampago.cases import Case, find
from relampago.plan import Plan, Row, table
from relampago.problem import Moving, Saved, Tangents, Wanted

WIDEST = 256  # head dims beyond are refused by name
OWNERS = {"tangent_dkdv": "keys_along", "tangent_dq": "queries_along"}
ROWS = [
    pytest.param(*param.values, kernel, id=f"{kernel}-{param.id}")
    for kernel in ("tangent", *OWNERS)
    for param in rows_of(kernel, WIDEST)
]
NEWEST = (
    "tangent-sm90-0",
    "tangent_dkdv-sm90-0",
    "tangent_dkdv-sm90-1",
    "tangent_dq-sm90-0",
    "tangent_dq-sm90-1",
)


def build(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    kernel: str,
    case: Case,
    plan: Plan,
    still: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> Built:
    """The kernel that a row is for: all inputs move, and dO does, but for those named."""
    recorder = Recorder(arch, OWNERS.get(kernel))
    for module in (backward, backward_tangent, tangent):
        monkeypatch.setattr(module, "launch", recorder)
    x: Any = arrays(case, dtype)
    along = Tangents(x.q, x.k, x.v, x.bias, x.sinks)
    along = along._replace(**dict.fromkeys(set(still) & set("qkv")))
    if kernel == "tangent":
        tangent.tangent(x, plan, along)
        return recorder.built[0]
    out = torch.zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.q.dtype)
    lse = torch.zeros(x.q.shape[0], x.q.shape[2], x.q.shape[1])
    moving = Moving(along, out, lse, None if "o" in still else out, None)
    wanted = Wanted(bias=x.bias is not None, sinks=x.sinks is not None)
    deterministic = kernel == "tangent_dq"
    backward_tangent.backward_tangent(
        x, plan, plan, moving, Saved(out, lse), out, None, wanted, deterministic
    )
    return recorder.built[0]


@pytest.mark.parametrize(("arch", "row", "kernel"), spared(ROWS, NEWEST))
def test_row_fits(arch: str, row: Row, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dim, dim_v, dtype = shape_of(row, WIDEST)
    case = replace(CAUSAL, dim=dim, dim_v=dim_v)
    built = build(monkeypatch, arch, kernel, case, row.plan, dtype=dtype)
    check(arch, row, built)
    owned = row.plan.block_k if kernel == "tangent_dkdv" else row.plan.block_q
    if arch == "sm90" and owned >= 64:
        assert "wgmma.mma_async" in built.asm["ptx"]


@pytest.mark.parametrize(
    ("arch", "kernel", "row"), [pinned("sm80", "tangent_dkdv", 1), ("sm90", "tangent_dq", 0)]
)
def test_loops_do_not_spill(arch: str, kernel: str, row: int, monkeypatch) -> None:
    found = table(arch)[f"triton.{kernel}"][row]
    case = replace(CAUSAL, dim=shape_of(found)[0])
    loops = innermost(disassembled(build(monkeypatch, arch, kernel, case, found.plan)))
    assert len(loops) >= 2  # without masks, and with
    spilt = [line for body in loops for line in body if line.split()[0].startswith(("LDL", "STL"))]
    assert not OLD or not spilt


@pytest.mark.parametrize(
    ("name", "kernel"), [("user-mod", "tangent_dkdv"), ("block-sparse", "tangent_dq")]
)
def test_features_compile(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, "sm90", kernel, find(name), Plan(block_q=32, block_k=64, warps=8, stages=1))


@pytest.mark.parametrize("kernel", OWNERS)
@pytest.mark.parametrize("still", ["kvo", "qk"], ids=["q", "v and dO"])
def test_what_stands_still_is_left_out(
    kernel: str, still: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(block_q=64, block_k=64, warps=4, stages=1, fused=1)
    built = build(monkeypatch, "sm90", kernel, replace(CAUSAL, dim=64), plan, still)
    moving = build(monkeypatch, "sm90", kernel, replace(CAUSAL, dim=64), plan)
    assert built.asm["ptx"].count("wgmma.mma_async") < moving.asm["ptx"].count("wgmma.mma_async")
