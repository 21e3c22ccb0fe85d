"""The kernels of higher derivatives compile for each architecture and fit its shared memory, with no GPU."""

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
from crosscompile.sample import pinned
from crosscompile.test_triton import CAUSAL, SHARED, SPILLS, arrays

from relampago.backends.triton import backward, backward_tangent, tangent
from relampago.cases import Case, find
from relampago.plan import Plan, table
from relampago.problem import Moving, Saved, Tangents, Wanted

WIDEST = 256  # head dims beyond are refused by name
OWNERS = {"tangent_dkdv": "keys_along", "tangent_dq": "queries_along"}


def row_of(arch: str, kernel: str, row: int) -> tuple[Plan, Case]:
    """A row's plan, and a case of the widest head dim that it serves."""
    found = table(arch)[f"triton.{kernel}"][row]
    dim = min(dict(found.when).get("dim_max", WIDEST), WIDEST)
    return found.plan, replace(CAUSAL, dim=dim)


def build(
    monkeypatch: pytest.MonkeyPatch, arch: str, kernel: str, case: Case, plan: Plan, still: str = ""
) -> Built:
    """The kernel that an owner of rows or keys would launch: all inputs move, and dO does, but for those named."""
    recorder = Recorder(arch, OWNERS[kernel])
    for module in (backward, backward_tangent):
        monkeypatch.setattr(module, "launch", recorder)
    x: Any = arrays(case, torch.bfloat16)
    out = torch.zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.q.dtype)
    lse = torch.zeros(x.q.shape[0], x.q.shape[2], x.q.shape[1])
    along = Tangents(x.q, x.k, x.v, x.bias, x.sinks)
    along = along._replace(**dict.fromkeys(set(still) & set("qkv")))
    moving = Moving(along, out, lse, None if "o" in still else out, None)
    wanted = Wanted(bias=x.bias is not None, sinks=x.sinks is not None)
    deterministic = kernel == "tangent_dq"
    backward_tangent.backward_tangent(
        x, plan, plan, moving, Saved(out, lse), out, None, wanted, deterministic
    )
    return next(b for b in recorder.built if b.name == OWNERS[kernel])


@pytest.mark.parametrize(("arch", "row"), [pinned("sm89", 2), ("sm90", 0), pinned("gfx942", 2)])
def test_tangent_fits(arch: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, case = row_of(arch, "tangent", row)
    recorder = Recorder(arch)
    monkeypatch.setattr(tangent, "launch", recorder)
    x = arrays(case, torch.bfloat16)
    tangent.tangent(x, plan, Tangents(x.q, x.k, x.v))
    (built,) = recorder.built
    assert built.shared <= SHARED[arch] * 1024
    if arch == "sm90":
        assert "wgmma.mma_async" in built.asm["ptx"]


@pytest.mark.parametrize(
    ("arch", "kernel", "row"),
    [
        pinned("sm80", "tangent_dkdv", 1),
        ("sm90", "tangent_dq", 0),
        pinned("gfx942", "tangent_dq", 1),
    ],
)
def test_backward_tangent_fits_and_does_not_spill(
    arch: str, kernel: str, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(monkeypatch, arch, kernel, *reversed(row_of(arch, kernel, row)))
    assert built.shared <= SHARED[arch] * 1024
    if arch.startswith("gfx"):
        assert built.spills == 0
    elif triton.__version__.startswith("3.6"):
        assert built.spills <= SPILLS
        loops = innermost(disassembled(built))
        assert len(loops) >= 2  # without masks, and with
        assert not any(
            line.split()[0].startswith(("LDL", "STL")) for body in loops for line in body
        )
    if arch == "sm90":
        assert "wgmma.mma_async" in built.asm["ptx"]


@pytest.mark.parametrize("kernel", OWNERS)
@pytest.mark.parametrize("row", [0, 1])
def test_measured_rows_fit(kernel: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may spill, since they won on a card."""
    built = build(monkeypatch, "sm90", kernel, *reversed(row_of("sm90", kernel, row)))
    assert built.shared <= SHARED["sm90"] * 1024
    assert "wgmma.mma_async" in built.asm["ptx"]


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
