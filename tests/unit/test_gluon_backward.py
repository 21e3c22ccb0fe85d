"""The Hopper backward's own source, run on the CPU: as `test_gluon_protocol` runs the forward's."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.pretended_gluon import Deadlock, pretended, run_backward
from unit.test_gluon_protocol import arrays, packed

from relampago.backends.reference import attend
from relampago.masks.rules import Band
from relampago.mods import register, softcap
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Saved, Wanted

MODULES = (
    "versions", "channel", "sm90_forward", "launch", "sm90_gradients", "sm90_rows", "sm90_backward", "sm90_twins", "sm90_turns",
    "sm90_queries", "backward_launch",
)  # fmt: skip


@pytest.fixture(scope="module")
def launcher():
    """relampago.backends.gluon.backward_launch, on the pretended Gluon."""
    modules = pretended()
    ours = [f"relampago.backends.gluon.{name}" for name in MODULES]
    before = {name: sys.modules.pop(name, None) for name in (*modules, *ours)}
    sys.modules.update(modules)
    try:
        yield importlib.import_module(ours[-1])
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def plan(block_q: int, block_k: int, stages: int = 2, **more: int) -> Plan:
    return Plan(block_q=block_q, block_k=block_k, warps=4, stages=stages, **more)


KEYS = {
    f"{rows}-{'fused' if fused else 'apart'}-{ahead}-{'named' if named else 'met'}": plan(
        rows, 128, fused=fused, ahead=ahead, pingpong=named
    )
    for rows, fused, ahead, named in (
        (64, 1, 0, 0), (64, 1, 1, 0), (64, 1, 2, 0), (64, 1, 3, 1), (64, 1, 0, 1), (128, 1, 2, 1),
        (128, 1, 0, 0), (64, 0, 0, 0), (128, 0, 1, 0),
    )
}  # fmt: skip
TWINS = {f"twins-{ahead}": plan(64, 64, ahead=ahead) for ahead in (0, 1)}
TURNS = {"turns-3": plan(64, 192, fused=1), "turns-2": plan(64, 128, fused=1, pin=1)}
PLANS = {**KEYS, **TWINS, **TURNS}
QUERIES = plan(128, 64)
CASES = {
    "full": {"lq": 320, "lk": 320, "b": 2, "d": 16},
    "causal": {"lq": 320, "lk": 320, "causal": True, "d": 16},
    "causal-one": {"lq": 1, "lk": 77, "causal": True},
    "causal-unaligned": {"lq": 200, "lk": 333, "causal": True, "h": 4, "g": 2},
    "causal-blind-rows": {"lq": 333, "lk": 100, "causal": True},
    "ragged": {"lq": 77, "lk": 77, "b": 3},
    "window": {"lq": 300, "lk": 400, "left": 50, "right": 20},
    "window-left": {"lq": 300, "lk": 300, "left": 70},
    "window-blind-keys": {"lq": 100, "lk": 400, "left": 10, "right": 0},
    "prefix": {"lq": 300, "lk": 300, "causal": True, "prefix": 150},
    "dims": {"lq": 100, "lk": 100, "d": 40, "dv": 72},
    "odd-dim": {"lq": 70, "lk": 70, "d": 33},
    "group": {"lq": 150, "lk": 70, "h": 6, "g": 2},
    "negative-scale": {"lq": 70, "lk": 70, "scale": -0.3, "causal": True},
    "no-scale": {"lq": 70, "lk": 70, "scale": 0.0},
    "sinks": {"lq": 100, "lk": 150, "sinks": True},
    "sinks-blind-rows": {"lq": 150, "lk": 100, "sinks": True, "causal": True},
    "softcap": {"lq": 100, "lk": 150, "cap": 2.0, "causal": True, "scale": 1.0},
}


def given(x: Arrays, dlse: bool = True) -> tuple[Any, ...]:
    """(saved, dout, dlse, the gradients by autograd in fp64)."""
    leaves = {name: getattr(x, name).double().requires_grad_() for name in ("q", "k", "v")}
    if x.sinks is not None:
        leaves["sinks"] = x.sinks.double().requires_grad_()
    out, lse = attend(replace(x, **leaves), torch.float64)
    g = torch.Generator().manual_seed(5)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    dl = torch.randn(lse.shape, generator=g) if dlse else None
    seen = lse > float("-inf")
    lost = (out * dout.double()).sum()
    if dl is not None:
        lost = lost + (lse * dl)[seen].sum()
    grads = torch.autograd.grad(lost, list(leaves.values()), allow_unused=True)
    found = dict(zip(leaves, grads, strict=True))
    want = Grads(found["q"], found["k"], found["v"], None, found.get("sinks"))
    return Saved(out.detach().float(), lse.detach().float()), dout, dl, want


def check(launcher: Any, x: Arrays, p: Plan, seed: int = 0, deterministic: bool = False) -> Grads:
    saved, dout, dlse, want = given(x)
    wanted = Wanted(sinks=x.sinks is not None)
    got = run_backward(
        launcher, seed, p, QUERIES, x, saved, dout, dlse, wanted, deterministic
    )
    near = {"atol": 1e-5, "rtol": 1e-4} if x.dtype else {"atol": 2e-2, "rtol": 1e-2}
    for name, one, other in zip(Grads._fields, got, want, strict=True):
        if other is not None:
            assert one.dtype == (torch.float32 if name == "sinks" else x.out_dtype)
            torch.testing.assert_close(one.double(), other, msg=lambda m, n=name: f"d{n}: {m}", **near)
    return got


@pytest.mark.parametrize("p", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_source_on_random_schedules(launcher, case, p) -> None:
    check(launcher, replace(arrays(case), dtype=torch.float32), p)
