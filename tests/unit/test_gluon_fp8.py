"""The FP8 kernel's own source on the pretended Gluon, over random schedules, against the CPU's emulation."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from budget import check
from unit.pretended_gluon import FORWARD, imported_with, pretended, run
from unit.test_gluon_protocol import arrays, packed

from relampago import quant
from relampago.backends.reference import attend
from relampago.masks.rules import Band
from relampago.mods import softcap
from relampago.plan import Plan
from relampago.problem import Arrays
from relampago.quant import emulation
from relampago.quant.columns import column_of, columns_in_all, first_column


def rows_in_e4m3(
    x: torch.Tensor, cu: Any, longest: int, *, rotated: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `relampago.quant.kernels` has it, which the interpreter's suite compares with `quantise`."""
    turned = quant.rotate(x.float()) if rotated else x
    one = quant.quantise(turned, cu_seqlens=cu, max_seqlen=longest)
    width = -(-x.shape[-1] // 16) * 16
    y = torch.zeros(*x.shape[:-1], width).to(quant.E4M3)
    y[..., : x.shape[-1]] = one.values
    return y, one.scales


def columns_in_e4m3(
    v: torch.Tensor, cu: Any, longest: int, scales: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise; NaN where nothing is written."""
    if scales is None:
        v, scales, _ = quant.quantise(v, cu_seqlens=cu, max_seqlen=longest)
    n = max(1, -(-longest // 128)) * 128
    columns = n if cu is None else columns_in_all(v.shape[0], cu.shape[0] - 1, 128)
    y = torch.full((v.shape[0] if cu is None else 1, *v.shape[-2:], columns), torch.nan)
    starts = (
        [0] * v.shape[0]
        if cu is None
        else [first_column(int(c), b, 128) for b, c in enumerate(cu[:-1])]
    )
    for b, start in enumerate(starts):
        rows = v[b] if cu is None else v[int(cu[b]) : int(cu[b + 1])]
        target = y[b if cu is None else 0]
        target[..., start : start + max(1, -(-rows.shape[0] // 128)) * 128] = 0
        places = torch.tensor(
            [start + column_of(key) for key in range(rows.shape[0])], dtype=torch.long
        )
        target[..., places] = rows.float().permute(1, 2, 0)
    return y.to(quant.E4M3), scales


@pytest.fixture(scope="module")
def launcher():
    """relampago.backends.gluon.fp8_launch on the pretended Gluon, with the casts in torch."""
    modules = pretended()
    casts: Any = types.ModuleType("relampago.quant.kernels")
    casts.rows_in_e4m3, casts.columns_in_e4m3 = rows_in_e4m3, columns_in_e4m3
    modules["relampago.quant.kernels"] = casts
    names = (
        *FORWARD, "sm90_fp8_step", "sm90_fp8_chain", "sm90_fp8", "combine", "boxes", "launch",
        "fp8_launch",
    )  # fmt: skip
    with imported_with(modules, *names) as (*_, host, fp8):
        yield types.SimpleNamespace(host=host, fp8=fp8)


class Door:
    """What `pretended_gluon.run` starts: FP8's forward, on the launch that the bf16 one has."""

    def __init__(self, launcher: Any) -> None:
        self.forward, self.host = launcher.fp8.forward, launcher.host

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "launch":
            self.host.launch = value


def compare(launcher: Any, x: Arrays, plan: Plan, seed: int = 0, multiprocessors: int = 3) -> None:
    """The kernel's result is as near to fp64 as the emulation's."""
    x = replace(x, precision="fp8")
    out, lse = run(Door(launcher), x, plan, seed, multiprocessors)
    assert out.dtype == torch.bfloat16
    inputs: list[Arrays] = []
    standard = emulation.run(x, lambda y: inputs.append(y) or attend(y, torch.float32))
    given = inputs[0] if x.q.dtype == quant.E4M3 else x
    oracle = attend(replace(given, precision=None), torch.float64)
    rows = slice(None) if x.cu_q is None else slice(int(x.cu_q[-1]))

    def named(out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": out[rows], "lse": lse if x.cu_q is None else lse[:, rows]}

    check("fp8", named(out, lse), named(*standard), named(*oracle), torch.bfloat16)
    # LSE is of weights that are not rounded: nothing but fp32 is between the kernel's and the emulation's
    exact = named(*attend(inputs[0], torch.float64))
    same = {**named(out, lse), "out": exact["out"]}
    check("lse", same, named(*standard), exact, torch.float32)


CASES = {
    "full": {"lq": 320, "lk": 320, "b": 2},
    "causal": {"lq": 320, "lk": 320, "causal": True},
    "causal-one": {"lq": 1, "lk": 77, "causal": True},
    "causal-unaligned": {"lq": 200, "lk": 333, "causal": True, "h": 4, "g": 2},
    "causal-blind-rows": {"lq": 333, "lk": 100, "causal": True},
    "window": {"lq": 300, "lk": 400, "left": 50, "right": 20},
    "prefix": {"lq": 300, "lk": 300, "causal": True, "prefix": 150},
    "dims": {"lq": 100, "lk": 100, "d": 40, "dv": 72},
    "dim-256": {"lq": 130, "lk": 150, "d": 256, "causal": True},
    "negative-scale": {"lq": 70, "lk": 70, "scale": -0.3, "causal": True},
    "no-scale": {"lq": 70, "lk": 70, "scale": 0.0},
    "sinks": {"lq": 100, "lk": 150, "sinks": True},
    "softcap": {"lq": 100, "lk": 150, "cap": 2.0, "causal": True, "scale": 1.0},
    "documents": {"lq": 300, "lk": 300, "documents": [0, 17, 60, 200]},
    "heads-packed": {"lq": 20, "lk": 300, "h": 8, "g": 2, "causal": True},
}  # fmt: skip
PLANS = {
    "grid-128x128-whole": Plan(block_q=128, block_k=128, stages=2, promote=1, pingpong=1, pin=1),
    "static-192x64-whole": Plan(block_q=192, block_k=64, stages=4, schedule=1, promote=1),
    "dynamic-128x64-quarters": Plan(block_q=128, block_k=64, stages=2, schedule=2, promote=4),
    "dynamic-128x128-halves": Plan(block_q=128, block_k=128, stages=1, schedule=2, promote=2, pingpong=1),
    "dynamic-128x128-cores": Plan(block_q=128, block_k=128, stages=2, schedule=2),
    "dynamic-128x128-chained": Plan(block_q=128, block_k=128, stages=2, schedule=2, promote=1, pin=1, chain=1),
    "static-192x64-chained": Plan(block_q=192, block_k=64, stages=2, schedule=1, pingpong=1, chain=1),
}  # fmt: skip
PAIRS = [
    pytest.param(case, plan, id=f"{name}-{which}")
    for i, (name, case) in enumerate(CASES.items())
    for j, (which, plan) in enumerate(PLANS.items())
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize(("case", "plan"), PAIRS)
def test_kernel_source_on_random_schedules(launcher, case, plan) -> None:
    compare(launcher, arrays(case), plan)


def test_scales_that_differ_by_block(launcher) -> None:
    """Keys and values of blocks that are 1000 times apart: every block's own scale is used, and no other's."""
    for name in ("grid-128x128-whole", "dynamic-128x64-quarters", "static-192x64-chained"):
        plan = PLANS[name]
        x = arrays({"lq": 130, "lk": 500, "causal": True, "seed": 3})
        x.k[:, 128:256] *= 0.01
        x.v[:, 256:384] *= 1000
        x.q[:, 64:] *= 3
        compare(launcher, x, plan)


BANDS = {"full": Band(), "causal": Band(0, None, 0), "window": Band(0, 30, 0)}


@pytest.mark.parametrize(("plan", "band"), [
    pytest.param(plan, band, id=f"{name}-{which}")
    for i, (name, plan) in enumerate(PLANS.items())
    for j, (which, band) in enumerate(BANDS.items())
    if (i + j) % 2 == 0
])  # fmt: skip
def test_packed(launcher, plan, band) -> None:
    compare(launcher, packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], band), plan)


@pytest.mark.parametrize("splits", [2, 5])
def test_split_over_keys(launcher, monkeypatch, splits) -> None:
    sizes = sys.modules["relampago.backends.gluon.sizes"]
    monkeypatch.setattr(sizes, "splits_for", lambda *_: splits)
    launcher.fp8.setting_of.cache_clear()
    plan = PLANS["dynamic-128x64-quarters"]
    for case in (
        {"lq": 70, "lk": 1000, "causal": True, "sinks": True},
        {"lq": 64, "lk": 60, "h": 1, "g": 1},
    ):
        compare(launcher, arrays(case), plan, splits)
    mods = (softcap(2.0).token,)
    x = packed([3, 130, 0, 1], [3, 300, 4, 700], Band(0, None, 0), sinks=torch.randn(4), mods=mods)
    compare(launcher, x, plan)
    launcher.fp8.setting_of.cache_clear()


def test_many_tiles_on_few_multiprocessors(launcher) -> None:
    x = arrays({"lq": 200, "lk": 200, "b": 3, "h": 2, "g": 1, "causal": True})
    for seed, plan in enumerate(list(PLANS.values())[1:3]):
        compare(launcher, x, plan, seed, multiprocessors=5)


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_operands_that_are_cast_already(launcher, per) -> None:
    x = arrays({"lq": 200, "lk": 300, "b": 2, "h": 4, "causal": True})
    cast = [quant.quantise(t, per=per) for t in (x.q, x.k, x.v)]
    x.q, x.k, x.v = (one.values for one in cast)
    x.q_scale, x.k_scale, x.v_scale = (
        one.scales.expand(2, heads, -1) for one, heads in zip(cast, (4, 2, 2), strict=True)
    )
    x.dtype = torch.bfloat16
    compare(launcher, x, PLANS["dynamic-128x64-quarters"])
