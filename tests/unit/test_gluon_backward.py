"""The Hopper backward's own source, run on the CPU: as `test_gluon_protocol` runs the forward's."""

from __future__ import annotations

import itertools
import sys
import types
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.pretended_gluon import (
    FORWARD,
    imported_with,
    launch,
    pretended,
    run_backward,
    run_backward_part,
)
from unit.pretended_machine import Deadlock, M, Scheduler
from unit.test_gluon_protocol import arrays, packed

import relampago as rl
from relampago import op
from relampago.backends.gluon import GluonSm90, schedule
from relampago.backends.reference import attend
from relampago.distributed import ContextParallelPlan, Simulation
from relampago.masks import rules
from relampago.masks.rules import Band
from relampago.mods import softcap
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Saved, Sums, Wanted

MODULES = (
    *FORWARD, "boxes", "combine", "counter", "sizes",
    "launch", "sm90_tables", "sm90_gradients", "sm90_rows", "sm90_order", "sm90_backward", "sm90_twins", "sm90_queries",
    "backward_launch",
)  # fmt: skip


@pytest.fixture(scope="module")
def launcher():
    """relampago.backends.gluon.backward_launch, on the pretended Gluon."""
    with imported_with(pretended(), *MODULES) as modules:
        yield modules[-1]


def plan(block_q: int, block_k: int, stages: int = 2, **more: int) -> Plan:
    return Plan(block_q=block_q, block_k=block_k, warps=4, stages=stages, **more)


KEYS = {
    f"{rows}-{'fused' if fused else 'apart'}-{ahead}-{'named' if named else 'met'}{'-drawn' if drawn else ''}": plan(
        rows, 128, fused=fused, ahead=ahead, pingpong=named, schedule=2 if drawn else 0
    )
    for rows, fused, ahead, named, drawn in (
        (64, 1, 0, 0, 0), (64, 1, 1, 0, 0), (64, 1, 2, 0, 0), (64, 1, 3, 1, 0), (64, 1, 0, 1, 0), (128, 1, 2, 1, 0),
        (64, 0, 3, 0, 0), (64, 1, 0, 0, 1), (64, 1, 3, 1, 1), (128, 1, 2, 0, 1), (64, 0, 3, 0, 1),
    )
}  # fmt: skip
ORDERED = {
    f"{rows}-{ahead}-{'named' if named else 'met'}": plan(
        rows, 128, fused=1, ordered=1, ahead=ahead, pingpong=named, schedule=drawn
    )
    for rows, ahead, named, drawn in ((64, 2, 1, 2), (64, 3, 1, 0), (128, 0, 0, 2))
}  # tiles are drawn in any case
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


@pytest.mark.parametrize(
    "name", ["64-fused-2-met", "128-fused-2-named", "64-fused-0-met-drawn", "twins"]
)
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
    more = {"sinks": torch.randn(4), "mods": (softcap(2.0).token,), "dtype": torch.float32}
    x = packed([30, 130, 0], [60, 13, 4], Band(0, None, 0), **more)
    check(launcher, x, KEYS["64-fused-0-met"])
    check(launcher, x, KEYS["64-fused-0-met"], deterministic=True)
    check(launcher, x, TWINS["twins"])


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("name", [name for name in KEYS if name.endswith("drawn")])
def test_tiles_drawn_from_a_counter(launcher, monkeypatch, name, tiles) -> None:
    """With room for the keys and values of one tile, and of two."""
    monkeypatch.setattr(launcher, "tiles_of_keys", lambda *_: tiles)
    for seed in range(2):
        x = arrays({"lq": 200, "lk": 600, "b": 2, "h": 4, "causal": bool(seed)})
        check(launcher, x, PLANS[name], seed)
    check(launcher, packed([3, 130, 0, 200], [3, 430, 4, 0], Band(0, None, 0)), PLANS[name])


@pytest.mark.parametrize(
    "name",
    ["64-fused-2-met", "128-fused-2-named", "64-apart-3-met", "64-fused-3-named-drawn", "twins"],
)
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


@pytest.mark.parametrize("name", ["64-2-named", "64-3-named"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_in_order(launcher, case, name) -> None:
    check(launcher, replace(arrays(case), dtype=torch.float32), ORDERED[name], deterministic=True)


@pytest.mark.parametrize(
    ("programs", "tiles", "name"),
    [(1, 2, "64-3-named"), (3, 2, "64-2-named"), (3, 1, "128-0-met"), (100, 1, "64-2-named")],
)
def test_sums_in_order_of_packed_sequences(launcher, monkeypatch, name, programs, tiles) -> None:
    """With few blocks of threads, and one for each tile."""
    monkeypatch.setattr(launcher, "tiles_of_keys", lambda *_: tiles)
    device = types.SimpleNamespace(multiprocessors=programs)
    monkeypatch.setattr(launcher, "Device", types.SimpleNamespace(of=lambda _: device))
    for band in (Band(), Band(0, None, 0), Band(5, 150, 3)):
        x = packed([3, 130, 0, 200, 1], [3, 330, 4, 0, 260], band, dtype=torch.float32)
        check(launcher, x, ORDERED[name], 1, deterministic=True)


def found_over_seeds(launcher: Any, case: dict[str, Any], p: Plan) -> set[bytes]:
    """The gradients' bits, over schedules of the threads; each draw is another order of blocks of threads as well."""
    x = replace(arrays({**case, "b": 2, "h": 4, "g": 2}), dtype=torch.float32)
    grads = [check(launcher, x, p, seed, deterministic=True)[:3] for seed in range(4)]
    return {b"".join(g.numpy().tobytes() for g in each) for each in grads}


@pytest.mark.parametrize("name", ["64-2-named", "64-3-named"])
@pytest.mark.parametrize(
    "case",
    [{"lq": 200, "lk": 600}, {"lq": 300, "lk": 500, "causal": True}, {"lq": 300, "lk": 600, "left": 200}],
    ids=["full", "causal", "window"],
)  # fmt: skip
def test_sums_in_order_are_equal_to_the_bit(launcher, case, name) -> None:
    assert len(found_over_seeds(launcher, case, ORDERED[name])) == 1


def test_in_no_order_they_are_not(launcher, monkeypatch) -> None:
    """Each warpgroup still waits for its turn; nobody asks who has added before."""
    order = sys.modules["relampago.backends.gluon.sm90_order"]
    monkeypatch.setattr(order, "adders_before", lambda *_: 0)
    assert len(found_over_seeds(launcher, {"lq": 200, "lk": 600}, ORDERED["64-2-named"])) > 1


@pytest.mark.parametrize("lost", ["tell_added", "release"])
def test_a_turn_that_is_not_passed_on_is_a_deadlock(launcher, monkeypatch, lost) -> None:
    """Also in a warp that keeps the order and does not give its tile's number back."""
    where = {"tell_added": "sm90_backward", "release": "sm90_order"}[lost]
    kernel = sys.modules[f"relampago.backends.gluon.{where}"]
    monkeypatch.setattr(kernel, lost, lambda *_: None)
    with pytest.raises(Deadlock):
        check(
            launcher, arrays({"lq": 320, "lk": 900}), ORDERED["64-2-named"], 0, deterministic=True
        )


def test_a_tile_knows_how_many_add_before_it() -> None:
    """Those that visit a block of rows are neighbours, for any bounds; it counts from the first."""
    bounds = itertools.product((None, -3, 0, 2, 7), (None, -4, 0, 5), (None, 0, 3, 9))
    for left, right, prefix in bounds:
        if prefix is not None and right is None:
            continue
        for lq, lk, shift in itertools.product((1, 4, 9), (1, 7, 13), (-3, 0, 5)):
            offset = lk - lq + shift
            visits: dict[int, list[int]] = {}
            for k0 in range(0, lk, 4):
                last = min(k0 + 4, lk) - 1
                start, end = rules.query_range(k0, last, lq, offset, left, right, prefix)
                if start < end:
                    first, n = schedule.blocks(start, end, 2)
                    for block in range(first, first + n):
                        visits.setdefault(2 * block, []).append(k0)
            for row, keys in visits.items():
                before = [schedule.adders_before(k0, row, offset, left, 4) for k0 in keys]
                assert before == list(range(len(keys)))


def longer(t: torch.Tensor) -> torch.Tensor:
    """As part of a tensor that has more rows, and more columns beside these."""
    b, n, h, d = t.shape
    whole = torch.randn(b, n + 7, h, 2 * d + 8, generator=torch.Generator().manual_seed(9))
    return whole[:, 3 : n + 3, :, 4 : d + 4]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["64-fused-2-met", "128-fused-2-named", "64-apart-3-met", "twins"])
def test_added_to_what_is_there(launcher, name, deterministic) -> None:
    """And delta is known; what lies around the three gradients stays."""
    for case in ("causal-unaligned", "dims", "window"):
        x = replace(arrays(CASES[case]), dtype=torch.float32)
        saved, dout, dlse, want = given(x)
        delta = (dout.double() * saved.out).sum(-1).transpose(1, 2) - dlse
        nothing = torch.full_like(saved.out, torch.nan)
        sums = Sums(*(longer(t) for t in (x.q, x.k, x.v)))
        bases = [t._base.clone() for t in sums[:3]]
        saved = Saved(nothing, saved.lse, delta.float())
        got = run_backward(
            launcher, 1, PLANS[name], QUERIES, replace(x, sums=sums), saved, dout, None, Wanted(), deterministic
        )  # fmt: skip
        for total, grad, base, expected in zip(sums[:3], got[:3], bases, want[:3], strict=True):
            assert grad is total
            changed = base.clone().as_strided(total.shape, total.stride(), total.storage_offset())
            torch.testing.assert_close(
                total.double(), changed + expected, atol=1e-5, rtol=1e-4, msg=name
            )
            total.copy_(changed)
            assert torch.equal(total._base, base)


@pytest.mark.parametrize("name", ["64-fused-2-met", "64-fused-3-named"])
@pytest.mark.parametrize("case", ["causal", "dims", "group", "negative-scale"])
def test_rows_that_are_held_over_shards(launcher, case, name) -> None:
    """All rows meet some keys, those from 128 on others: dQ is read once, at the end, dK and dV are each shard's."""
    x = arrays({**CASES[case], "lq": 300, "lk": 260, "b": 2})
    saved, dout, dlse, want = given(replace(x, dtype=torch.float32))
    plan, cut = PLANS[name], 128
    held = run_backward_part(launcher, "hold", 2, plan, x, saved, dout, dlse)
    found = [torch.zeros(t.shape) for t in (x.k, x.v)]
    for t in found:
        t[:, 100:] = torch.nan  # those keys' gradients are written
    for at, (first, start, stop) in enumerate(((0, 0, 100), (0, 100, 260), (cut, 0, 100))):
        band = x.band
        if at == 0:  # rows before the cut here, the others in the third call
            q, d = x.q[:, :cut], dout[:, :cut]
            part = held.part(0, cut)
        else:
            q, d, part = x.q[:, first:], dout[:, first:], held.part(first, 300)
        sums = Sums(part.dq, *(t[:, start:stop] for t in found), anew=at == 1)
        shard = replace(
            x, q=q, k=x.k[:, start:stop], v=x.v[:, start:stop], len_q=q.shape[1], len_k=stop - start,
            band=band._replace(offset=band.offset + first - start), dtype=torch.float32, sums=sums,
        )  # fmt: skip
        rows = Saved(d, part.lse, part.delta)
        got = run_backward(launcher, at, plan, QUERIES, shard, rows, d, None, Wanted(), False)
        assert all(a is b for a, b in zip(got[:3], sums[:3], strict=True))
    dq = run_backward_part(launcher, "release", 2, plan, x, held)
    assert dq.dtype == x.q.dtype
    for one, other, near in (
        (dq, want.q, 2e-2),
        (found[0], want.k, 1e-5),
        (found[1], want.v, 1e-5),
    ):
        torch.testing.assert_close(
            one.double(), other, atol=near, rtol=1e-2 if near > 1e-3 else 1e-4
        )


@pytest.mark.parametrize("length", [512, 300])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_ring_holds_its_rows(launcher, monkeypatch, length, deterministic) -> None:
    """Zigzag over two ranks, whose later rows meet the other's keys; 300 tokens cut them where no block begins."""
    choose, gluon = op._decide, GluonSm90()
    launched = []

    def decide(p, *forced):
        mine = p.direction == "backward" and p.dtype == "bf16"
        return (gluon, gluon.plan(p)) if mine else choose(p, *forced)

    def count(kernel, *args):
        launched.append(kernel.__name__)
        launch(kernel, *args)

    monkeypatch.setattr(op, "_decide", decide)
    M.scheduler, launcher.launch = Scheduler(3), count
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, length, h, 16, generator=g).bfloat16() for h in (2, 1, 1))
    given = [t.requires_grad_() for t in (q, k, v)]
    run = Simulation(ContextParallelPlan(2, length, strategy="ring"))
    out = run.attention(*given, causal=True, deterministic=deterministic)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    got = torch.autograd.grad(out, given, dout)
    wide = [t.detach().double().requires_grad_() for t in given]
    want = torch.autograd.grad(rl.attention(*wide, causal=True), wide, dout.double())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-2, rtol=1e-2)
    each = Counter(launched)
    assert each["by_keys"] == 4  # a launch for each rank's step
    assert each["by_queries"] == (4 if deterministic else 0)
    whole = not deterministic and length == 512
    assert each["prepare"] == (2 if whole else 4 if deterministic else 3)
    assert each["convert"] == (0 if deterministic else 2 if whole else 3)


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
