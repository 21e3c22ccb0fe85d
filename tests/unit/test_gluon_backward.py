"""The Hopper backward's own source, run on the CPU: as `test_gluon_protocol` runs the forward's."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.pretended_gluon import FORWARD, Deadlock, pretended, run_backward
from unit.test_gluon_protocol import arrays, packed

from relampago.backends.reference import attend
from relampago.masks.rules import Band
from relampago.mods import register, softcap
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Saved, Wanted

MODULES = (
    *FORWARD, "boxes", "combine", "counter", "sizes",
    "launch", "sm90_tables", "sm90_gradients", "sm90_rows", "sm90_backward", "sm90_twins", "sm90_queries",
    "backward_launch",
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
        (64, 1, 0, 0), (64, 1, 1, 0), (64, 1, 2, 0), (64, 1, 3, 1), (64, 1, 0, 1), (128, 1, 2, 1), (64, 0, 3, 0),
    )
}  # fmt: skip
TWINS = {"twins": plan(64, 64)}
PLANS = {**KEYS, **TWINS}
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
    "documents": {"lq": 300, "lk": 300, "documents": [0, 17, 60, 200]},
    "documents-causal": {"lq": 260, "lk": 300, "documents": [5, 64, 260], "causal": True, "g": 1},
    "documents-per-sequence": {
        "lq": 200, "lk": 200, "b": 2, "documents": [[0, 9, 140], [3, 120, 200]], "left": 40,
    },
}  # fmt: skip


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
    got = run_backward(launcher, seed, p, QUERIES, x, saved, dout, dlse, wanted, deterministic)
    near = {"atol": 1e-5, "rtol": 1e-4} if x.dtype else {"atol": 2e-2, "rtol": 1e-2}
    for name, one, other in zip(Grads._fields[:5], got[:5], want[:5], strict=True):
        if other is not None:
            assert one.dtype == (torch.float32 if name == "sinks" else x.out_dtype)
            torch.testing.assert_close(
                one.double(), other, msg=lambda m, n=name: f"d{n}: {m}", **near
            )
    return got


@pytest.mark.parametrize("p", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_source_on_random_schedules(launcher, case, p) -> None:
    check(launcher, replace(arrays(case), dtype=torch.float32), p)


@pytest.mark.parametrize("name", ["64-fused-2-met", "128-fused-2-named", "twins"])
@pytest.mark.parametrize(
    "band",
    [Band(), Band(0, None, 0), Band(0, 30, 0), Band(5, None, 3)],
    ids=["full", "causal", "window", "shifted"],
)
def test_packed(launcher, name, band) -> None:
    x = packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], band, dtype=torch.float32)
    got = check(launcher, x, PLANS[name])
    for grad, cu in ((got.q, x.cu_q), (got.k, x.cu_k), (got.v, x.cu_k)):
        assert not grad[int(cu[-1]) :].any()


def test_packed_with_sinks_and_softcap(launcher) -> None:
    more = {"sinks": torch.randn(4), "mods": (register(softcap(2.0)),), "dtype": torch.float32}
    x = packed([30, 130, 0], [60, 13, 4], Band(0, None, 0), **more)
    check(launcher, x, KEYS["64-fused-0-met"])
    check(launcher, x, KEYS["64-fused-0-met"], deterministic=True)
    check(launcher, x, TWINS["twins"])


@pytest.mark.parametrize("name", ["64-fused-2-met", "128-fused-2-named", "64-apart-3-met", "twins"])
def test_results_in_half_precision_leave_by_tma(launcher, name) -> None:
    for case in ("causal-unaligned", "dims", "odd-dim"):
        check(launcher, arrays(CASES[case]), PLANS[name])
    check(launcher, packed([3, 130, 0], [70, 9, 4], Band(0, None, 0)), PLANS[name])


@pytest.mark.parametrize("name", PLANS)
def test_many_schedules(launcher, name) -> None:
    x = replace(arrays({"lq": 200, "lk": 140, "h": 2, "g": 1, "causal": True}), dtype=torch.float32)
    for seed in range(1, 6):
        check(launcher, x, PLANS[name], seed)


def test_deterministic_to_the_bit(launcher) -> None:
    x = arrays({"lq": 200, "lk": 300, "h": 4, "g": 2, "causal": True})
    first = check(launcher, x, KEYS["64-fused-2-met"], 0, deterministic=True)
    for seed in range(1, 4):
        again = check(launcher, x, KEYS["64-fused-2-met"], seed, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


def test_without_keys_only_lse_depends_on_a_sink(launcher) -> None:
    x = arrays({"lq": 5, "lk": 7, "sinks": True})
    x = replace(x, k=x.k[:, :0], v=x.v[:, :0], len_k=0)
    lse, dlse = x.sinks[None, :, None].expand(1, 2, 5), torch.randn(1, 2, 5)
    out = torch.zeros(x.q.shape)
    wanted = Wanted(sinks=True)
    got = launcher.backward(
        KEYS["64-fused-0-met"], QUERIES, x, Saved(out, lse), out, dlse, wanted, False
    )
    assert not any(g.any() for g in got[:3])
    torch.testing.assert_close(got.sinks, dlse.sum((0, 2)))


def test_inputs_are_not_written_to(launcher) -> None:
    x = arrays({"lq": 70, "lk": 130, "causal": True, "scale": -0.2})
    saved, dout, dlse, _ = given(x)
    inputs = (x.q, x.k, x.v, saved.out, saved.lse, dout, dlse)
    before = [t.clone() for t in inputs]
    run_backward(
        launcher, 0, KEYS["64-fused-0-met"], QUERIES, x, saved, dout, dlse, Wanted(), False
    )
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@pytest.mark.parametrize("name", ["64-fused-2-met", "twins"])
def test_a_missing_release_is_a_deadlock(launcher, monkeypatch, name) -> None:
    for module in ("sm90_backward", "sm90_twins"):
        kernel = sys.modules[f"relampago.backends.gluon.{module}"]
        monkeypatch.setattr(kernel, "release", lambda ring, stage: None)
    with pytest.raises(Deadlock):
        check(launcher, arrays({"lq": 320, "lk": 64}), PLANS[name])


def test_dq_before_the_other_warpgroup_has_stored_is_a_wrong_result(launcher, monkeypatch) -> None:
    kernel = sys.modules["relampago.backends.gluon.sm90_backward"]
    monkeypatch.setattr(kernel, "meet", lambda *_: None)
    x = replace(arrays({"lq": 320, "lk": 128}), dtype=torch.float32)

    def tries() -> None:
        for seed in range(5):
            check(launcher, x, KEYS["64-fused-0-met"], seed)

    with pytest.raises(AssertionError):
        tries()
