"""Every row of forward and backward compiles for its architecture, with no GPU: it fits, and hardly spills."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from relampago.api import Options, prepare
from relampago.cases import Case, find
from relampago.op import arrays_of
from relampago.plan import Plan, Row
from relampago.problem import Saved, Wanted

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder
from crosscompile.rows import SHARED, check, rows_of, shape_of
from crosscompile.sample import first_of_each, spared

from relampago.backends.triton import backward, forward

KERNELS = {"forward": "attend", "backward_dkdv": "by_keys", "backward_dq": "by_queries"}
CAUSAL = Case(name="causal", batch=1, len_q=512, len_k=512, heads=4, options={"causal": True})
ROWS = [
    pytest.param(arch, kernel, row, id=f"{arch}-{kernel}-{param.id.rpartition('-')[2]}")
    for kernel in KERNELS
    for param in rows_of(kernel)
    for arch, row in [param.values]
]
HOPPER = [p for p in ROWS if p.values[0] == "sm90"]
SIZES = ("block_q", "block_k", "warps", "stages", "tma", "split")
OTHERS = [
    f"{arch}-forward-1" for arch in SHARED if arch != "sm90"
]  # head dim 128 in half precision


def arrays(case: Case, dtype: torch.dtype) -> Any:
    tensors, options = case.make(dtype)
    return arrays_of(prepare(*tensors, Options(**options), packing=None))


def build(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    kernel: str,
    case: Case,
    dtype: torch.dtype,
    plan: Plan,
) -> Built:
    """The kernel of a call that a row is for; the hungriest if they are two."""
    recorder = Recorder(arch, KERNELS[kernel])
    monkeypatch.setattr(forward, "launch", recorder)
    monkeypatch.setattr(backward, "launch", recorder)
    x = arrays(case, dtype)
    if kernel == "forward":
        forward.forward(x, plan)
    else:
        out = torch.zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype=dtype)
        saved = Saved(out, torch.zeros(x.q.shape[0], x.q.shape[2], x.q.shape[1]))
        other = replace(plan, fused=0)
        wanted = Wanted(bias=x.bias is not None, sinks=x.sinks is not None)
        backward.backward(x, plan, other, saved, out, None, wanted, kernel == "backward_dq")
    return max(recorder.built, key=lambda b: (b.shared, b.spills))  # dK and dV may be one each


@pytest.mark.parametrize(
    ("arch", "kernel", "row"), spared(ROWS, [*first_of_each(HOPPER, *SIZES), *OTHERS])
)
def test_row_fits(arch: str, kernel: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    dim, dim_v, dtype = shape_of(row)
    case = replace(CAUSAL, dim=dim, dim_v=dim_v)
    built = build(monkeypatch, arch, kernel, case, dtype, row.plan)
    check(arch, row, built)
    if arch == "sm90" and row.plan.block_q >= 64 <= row.plan.block_k:
        assert "wgmma.mma_async" in built.asm["ptx"]


FEATURES = ("user-mod", "bias-row", "dropout", "documents", "block-sparse")
NEWEST = {"user-mod": "forward", "bias-row": "backward_dkdv", "dropout": "backward_dq", "documents": "backward_dkdv",
          "block-sparse": "backward_dq"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kernel"),
    spared(
        [pytest.param(n, k, id=f"{n}-{k}") for k in KERNELS for n in FEATURES],
        [f"{n}-{k}" for n, k in NEWEST.items()],
    ),
)
def test_features_compile(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(block_q=64, block_k=64, warps=4, stages=2, fused=1)
    build(monkeypatch, "sm90", kernel, find(name), torch.bfloat16, plan)


def test_head_dim_32_with_two_stages_on_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(block_q=64, block_k=128, warps=4, stages=2)
    built = build(monkeypatch, "sm90", "forward", replace(CAUSAL, dim=32), torch.bfloat16, plan)
    assert "wgmma.mma_async" in built.asm["ptx"]


def test_tma_on_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(block_q=128, block_k=128, warps=8, stages=2, tma=1)
    case = replace(CAUSAL, dim=128)
    built = build(monkeypatch, "sm90", "forward", case, torch.bfloat16, plan)
    assert "cp.async.bulk.tensor" in built.asm["ptx"]
