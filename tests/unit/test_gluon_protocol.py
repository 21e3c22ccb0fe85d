"""The Hopper kernel's own source, run on the CPU: its barriers, rings and turns over random schedules.

Nothing is transcribed: a pretended Gluon takes Triton's place while the backend's modules are imported, and the real
host code launches the real kernel on it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.pretended_gluon import FORWARD, imported_with, launch, pretended, run
from unit.pretended_machine import Deadlock

from relampago.backends import gluon
from relampago.backends.gluon import schedule
from relampago.backends.reference import attend, describe_rows
from relampago.masks.rules import Band
from relampago.masks.spec import Document, Extent, resolve
from relampago.merge import merge
from relampago.mods import softcap
from relampago.plan import Plan
from relampago.problem import Arrays, Device, Problem

INF = float("inf")


@pytest.fixture(scope="module")
def launcher():
    """relampago.backends.gluon.launch, on the pretended Gluon."""
    names = (
        *FORWARD, "combine", "boxes", "sm90_tables", "sm90_gradients", "sm90_rows", "sm90_order", "sm90_backward",
        "sm90_twins", "sm90_queries", "backward_launch", "held_launch", "launch",
    )  # fmt: skip
    with imported_with(pretended(), *names) as modules:
        yield modules[-1]


# ---------------------------------------------------------------------------------------------- tests


def arrays(case: dict[str, Any]) -> Arrays:
    get = case.get
    lq, lk, heads, kv, dim = get("lq", 64), get("lk", 64), get("h", 2), get("g", 2), get("d", 64)
    g = torch.Generator().manual_seed(get("seed", 0))
    shapes = ((lq, heads, dim), (lk, kv, dim), (lk, kv, get("dv", dim)))
    q, k, v = (torch.randn(get("b", 1), *s, generator=g).bfloat16() for s in shapes)
    band = Band(lk - lq, get("left"), 0 if get("causal") else get("right"), get("prefix"))
    if get("documents"):
        starts = torch.tensor(get("documents"))
        seen = resolve(Document(starts), Extent(get("b", 1), heads, lq, lk, lk - lq, q.device))
        band = band._replace(row_start=seen.row_start, row_end=seen.row_end)
    more = {"sinks": torch.randn(heads, generator=g)} if get("sinks") else {}
    if get("cap"):
        more["mods"] = (softcap(get("cap")).token,)
    return Arrays(
        q=q, k=k, v=v, scale=get("scale", dim**-0.5), band=band, len_q=lq, len_k=lk, **more
    )


def packed(
    lens_q: list[int], lens_k: list[int], band: Band, tail: int = 5, dim: int = 64, heads: int = 4,
    **more: Any,
) -> Arrays:  # fmt: skip
    """Packed sequences, on 2 kv heads, with rows of no sequence at the end, which hold NaN."""
    g = torch.Generator().manual_seed(1)
    total_q, total_k = sum(lens_q) + tail, sum(lens_k) + tail
    q, k, v = (
        torch.randn(n, h, dim, generator=g).bfloat16()
        for n, h in ((total_q, heads), (total_k, 2), (total_k, 2))
    )
    for t, n in ((q, sum(lens_q)), (k, sum(lens_k)), (v, sum(lens_k))):
        t[n:] = torch.nan
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lens_q, lens_k))
    return Arrays(
        q=q, k=k, v=v, scale=dim**-0.5, band=band, len_q=max(lens_q), len_k=max(lens_k),
        cu_q=cu_q, cu_k=cu_k, **more,
    )  # fmt: skip


def compare(x: Arrays, got: Any) -> None:
    out, lse = got
    want, want_lse = attend(x, torch.float32)
    if x.cu_q is not None:
        rows = int(x.cu_q[-1])
        assert not out[rows:].any()
        assert (lse[:, rows:] == -INF).all()
    torch.testing.assert_close(out.float(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


CASES = {
    "full": {"lq": 320, "lk": 320, "b": 2},
    "causal": {"lq": 320, "lk": 320, "causal": True},
    "causal-one": {"lq": 1, "lk": 77, "causal": True},
    "causal-unaligned": {"lq": 200, "lk": 333, "causal": True, "h": 4, "g": 2},
    "causal-blind-rows": {"lq": 333, "lk": 100, "causal": True},
    "ragged": {"lq": 77, "lk": 77, "b": 3},
    "window": {"lq": 300, "lk": 400, "left": 50, "right": 20},
    "window-left": {"lq": 300, "lk": 300, "left": 70},
    "window-blind-rows": {"lq": 400, "lk": 100, "left": 10, "right": 0},
    "prefix": {"lq": 300, "lk": 300, "causal": True, "prefix": 150},
    "dims": {"lq": 100, "lk": 100, "d": 40, "dv": 72},
    "odd-dim": {"lq": 70, "lk": 70, "d": 33},
    "negative-scale": {"lq": 70, "lk": 70, "scale": -0.3, "causal": True},
    "no-scale": {"lq": 70, "lk": 70, "scale": 0.0},
    "sinks": {"lq": 100, "lk": 150, "sinks": True},
    "sinks-blind-rows": {"lq": 150, "lk": 100, "sinks": True, "causal": True},
    "softcap": {"lq": 100, "lk": 150, "cap": 2.0, "causal": True, "scale": 1.0},
}
MORE = {
    "dims-in-two": {"lq": 130, "lk": 150, "d": 192, "dv": 128, "causal": True},
    "dims-both-in-two": {"lq": 130, "lk": 150, "d": 80, "dv": 96},
    "documents": {"lq": 300, "lk": 300, "documents": [0, 17, 60, 200]},
    "documents-causal": {"lq": 260, "lk": 300, "documents": [5, 64, 260], "causal": True, "g": 1},
    "documents-per-sequence": {
        "lq": 200,
        "lk": 200,
        "b": 2,
        "documents": [[0, 9, 140], [3, 120, 200]],
        "left": 40,
    },
    "heads-packed": {"lq": 20, "lk": 300, "h": 8, "g": 2, "causal": True},
    "heads-packed-in-part": {"lq": 33, "lk": 150, "h": 12, "g": 2, "b": 2, "sinks": True},
    "heads-packed-one-row": {"lq": 1, "lk": 200, "h": 64, "g": 1, "causal": True},
    "heads-packed-documents": {"lq": 40, "lk": 200, "h": 4, "g": 1, "documents": [0, 90, 170]},
}
PLANS = {
    f"{('grid', 'static', 'dynamic')[schedule]}-{rows}x{keys}-{stages}-{'turns' if turns else 'free'}"
    f"{'-chained' if chain else ''}": Plan(
        block_q=rows, block_k=keys, warps=4, stages=stages, schedule=schedule, pingpong=turns, pin=turns, chain=chain,
        hold=hold,
    )
    for schedule, rows, keys, stages, turns, chain, hold in (
        (0, 128, 128, 2, 1, 0, 1),
        (1, 192, 128, 4, 0, 0, 0),
        (2, 128, 128, 2, 0, 0, 1),
        (2, 128, 128, 2, 1, 0, 0),
        (2, 192, 64, 1, 1, 0, 1),
        (2, 192, 128, 4, 0, 0, 0),
        (2, 128, 128, 2, 1, 1, 1),
        (1, 128, 64, 1, 0, 1, 0),
        (2, 192, 128, 3, 0, 1, 1),
    )
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_source_on_random_schedules(launcher, case, plan) -> None:
    x = arrays(case)
    compare(x, run(launcher, x, plan, 0))


PAIRS = [
    pytest.param(case, list(PLANS.values())[(i + j) % len(PLANS)], id=f"{name}-{j}")
    for i, (name, case) in enumerate(MORE.items())
    for j in (0, 3)
]


@pytest.mark.parametrize(("case", "plan"), PAIRS)
def test_parts_tables_and_packed_heads(launcher, case, plan) -> None:
    x = arrays(case)
    compare(x, run(launcher, x, plan, 0))


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_many_tiles_on_few_multiprocessors(launcher, schedule, turns) -> None:
    x = arrays({"lq": 260, "lk": 260, "b": 3, "h": 4, "g": 1, "causal": True})
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=schedule, pingpong=turns)
    for seed in range(3):
        compare(x, run(launcher, x, plan, seed, multiprocessors=5))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "band",
    [Band(), Band(0, None, 0), Band(0, 30, 0), Band(0, None, 0, 50), Band(5, None, 3)],
    ids=["full", "causal", "window", "prefix", "shifted"],
)
def test_packed(launcher, plan, band) -> None:
    x = packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], band)
    compare(x, run(launcher, x, plan, 0))


def test_packed_with_packed_heads(launcher) -> None:
    x = packed([3, 30, 0, 20, 1], [3, 130, 4, 0, 260], Band(0, None, 0), heads=8)
    compare(x, run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0))


SPLITS = {
    "full": {"lq": 64, "lk": 1100, "h": 1, "g": 1},
    "causal": {"lq": 70, "lk": 1000, "causal": True, "sinks": True},
    "causal-tiles": {"lq": 200, "lk": 700, "causal": True, "h": 1, "g": 1, "sinks": True},
    "blind-rows": {"lq": 100, "lk": 60, "causal": True},
    "window": {"lq": 200, "lk": 900, "left": 300, "right": 10, "h": 1, "g": 1},
    "window-far": {"lq": 4, "lk": 700, "left": 20, "h": 1, "g": 1},
    "dims": {"lq": 40, "lk": 700, "h": 8, "d": 96, "dv": 72, "cap": 2.0},
    "documents": {"lq": 100, "lk": 700, "h": 4, "g": 1, "documents": [0, 30, 200, 640]},
}


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("case", SPLITS.values(), ids=SPLITS)
def test_split_over_keys(launcher, monkeypatch, case, splits) -> None:
    sizes = sys.modules["relampago.backends.gluon.sizes"]
    monkeypatch.setattr(sizes, "splits_for", lambda *_: splits)
    launcher.setting_of.cache_clear()
    x = arrays(case)
    compare(x, run(launcher, x, PLANS["dynamic-128x128-2-turns"], splits))
    launcher.setting_of.cache_clear()


def test_split_packed_sequences(launcher, monkeypatch) -> None:
    sizes = sys.modules["relampago.backends.gluon.sizes"]
    monkeypatch.setattr(sizes, "splits_for", lambda *_: 3)
    launcher.setting_of.cache_clear()
    for band in (Band(), Band(0, None, 0)):
        x = packed([3, 130, 0, 1], [3, 300, 4, 700], band, sinks=torch.randn(4))
        compare(x, run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0))
    launcher.setting_of.cache_clear()


def test_packed_with_sinks_and_softcap(launcher) -> None:
    mods = (softcap(2.0).token,)
    x = packed([30, 130, 0], [60, 13, 4], Band(0, None, 0), sinks=torch.randn(4), mods=mods)
    compare(x, run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0))


def test_packed_cu_seqlens_beyond_the_tensor(launcher) -> None:
    x = packed([30, 130, 40], [60, 13, 40], Band(), tail=0)
    got = run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0)
    x.cu_q[-1], x.cu_k[-1] = 1000, 1000
    again = run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("hold", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_result_where_the_queries_were(launcher, monkeypatch, shared, hold) -> None:
    monkeypatch.setattr(launcher, "shares", lambda *_: shared)
    x = arrays({"lq": 260, "lk": 260, "b": 2, "causal": True})
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, pingpong=1, hold=hold)
    for seed in range(4):
        compare(x, run(launcher, x, plan, seed, multiprocessors=2))


CHAINED = {
    "causal": {"lq": 500, "lk": 500, "b": 2, "causal": True},
    "one-block": {"lq": 300, "lk": 40, "b": 3},
    "ragged": {"lq": 300, "lk": 300, "h": 4, "sinks": True, "cap": 2.0},
    "documents": {"lq": 300, "lk": 300, "documents": [0, 17, 60, 200]},
    "packed-heads": {"lq": 70, "lk": 333, "h": 8, "g": 2, "causal": True},
}


@pytest.mark.parametrize(("lazy", "pin", "turns"), [(0, 1, 1), (1, 2, 1), (2, 8, 2)])
@pytest.mark.parametrize("queue", [1, 2])
@pytest.mark.parametrize("case", CHAINED.values(), ids=CHAINED)
def test_tiles_that_follow_without_a_gap(
    launcher, monkeypatch, case, queue, lazy, pin, turns
) -> None:
    """With room for the queries of two tiles, and of one."""
    monkeypatch.setattr(launcher, "chained", lambda *_: queue)
    launcher.setting_of.cache_clear()
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, lazy=lazy, pin=pin, chain=1)
    for seed in range(2):
        x = arrays(case)
        by_turns = replace(plan, pingpong=seed * turns, hold=seed)
        compare(x, run(launcher, x, by_turns, seed, multiprocessors=2))
    x = packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], Band(0, None, 0))
    compare(x, run(launcher, x, plan, 0, multiprocessors=2))
    launcher.setting_of.cache_clear()


@pytest.mark.parametrize("queue", [1, 2])
def test_a_missing_release_between_tiles_is_a_deadlock(launcher, monkeypatch, queue) -> None:
    """Of the keys and values that the next tile's first scores and this one's last product read."""
    kernel = sys.modules["relampago.backends.gluon.sm90_chain"]
    monkeypatch.setattr(kernel, "release", lambda ring, stage: None)
    monkeypatch.setattr(launcher, "chained", lambda *_: queue)
    launcher.setting_of.cache_clear()
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, chain=1)
    with pytest.raises(Deadlock):
        run(launcher, arrays(CHAINED["causal"]), plan, 0, multiprocessors=2)
    launcher.setting_of.cache_clear()


@pytest.mark.parametrize("queue", [1, 2])
def test_the_queries_of_another_tile_are_a_wrong_result(launcher, monkeypatch, queue) -> None:
    """Where the next tile takes up the rows of the one before it."""
    tiles = sys.modules["relampago.backends.gluon.producer"]
    real = tiles.first_row
    monkeypatch.setattr(tiles, "first_row", lambda *_: 0 * real(*_))
    monkeypatch.setattr(launcher, "chained", lambda *_: queue)
    launcher.setting_of.cache_clear()
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, chain=1)
    x = arrays(CHAINED["causal"])
    with pytest.raises(AssertionError):
        compare(x, run(launcher, x, plan, 0, multiprocessors=2))
    launcher.setting_of.cache_clear()


@pytest.mark.parametrize(
    ("dims", "queue"), [((64, 64), 2), ((128, 128), 2), ((256, 256), 1), ((192, 128), 1)]
)
def test_room_for_queries(launcher, dims, queue) -> None:
    """Of two tiles, or of one and half of a result, in the 227 KiB of a block of threads."""
    plan = Plan(block_q=128, block_k=64 if dims[0] == 256 else 128, stages=2, chain=1)
    parts = tuple(launcher.cut(dim) for dim in dims)
    assert launcher.chained(plan, *parts) == queue
    assert launcher.chained(replace(plan, chain=0), *parts) == 0


HALVES = Plan(block_q=128, block_k=128, stages=2, schedule=2, halves=1)
BY_HALVES = {
    "full": {"lq": 300, "lk": 400, "d": 192},
    "ragged": {"lq": 150, "lk": 333, "d": 64},
    "causal": {"lq": 260, "lk": 260, "b": 2, "d": 192, "causal": True},
    "window": {"lq": 300, "lk": 400, "left": 50, "right": 20},
    "few-keys": {"lq": 70, "lk": 33, "d": 128},
    "heads-packed": MORE["heads-packed"],
    "documents": MORE["documents"],
}


@pytest.mark.parametrize(
    "more", [{}, {"pingpong": 2}, {"lazy": 1, "pin": 1}, {"lazy": 2, "pin": 8}, {"schedule": 0}]
)
@pytest.mark.parametrize("case", BY_HALVES.values(), ids=BY_HALVES)
def test_values_by_halves(launcher, case, more) -> None:
    """Values in tiles of half a block's keys, three for two blocks of keys."""
    x = arrays(case)
    for seed in range(2):
        compare(x, run(launcher, x, replace(HALVES, **more), seed, multiprocessors=2))


@pytest.mark.parametrize(("triton", "halves"), [("3.6.0", 1), ("3.9.1", 0), (None, 1)])
def test_rows_by_halves_are_for_ptxas_12(monkeypatch, triton, halves) -> None:
    """Triton 3.9 brings one that serialises their products: selection goes on to the rows after them."""
    monkeypatch.setattr(gluon, "_triton", lambda: triton)
    p = Problem(
        device=Device("cuda", "sm90"), batch=4, heads_q=8, heads_kv=8, len_q=4096, len_k=4096, dim=192, dim_v=192,
        dtype="bf16",
    )  # fmt: skip
    for right in (False, True):
        assert gluon.GluonSm90().plan(replace(p, right=right)).halves == halves


def test_values_by_halves_of_packed_sequences(launcher) -> None:
    x = packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], Band(0, None, 0))
    compare(x, run(launcher, x, HALVES, 0))


def test_a_half_that_is_not_released_is_a_deadlock(launcher, monkeypatch) -> None:
    step = sys.modules["relampago.backends.gluon.sm90_step"]

    def half(values, stage, phase, _):
        step.release(values, stage)
        return step.advance(*step.advance(stage, phase, 3), 3)

    for name in ("sm90_step", "sm90_forward"):
        monkeypatch.setattr(sys.modules[f"relampago.backends.gluon.{name}"], "release_values", half)
    with pytest.raises(Deadlock):
        run(launcher, arrays(BY_HALVES["full"]), replace(HALVES, schedule=0), 0, multiprocessors=2)


@pytest.mark.parametrize("keys", [64, 640, 650])
def test_tiles_that_begin_at_different_keys(launcher, keys) -> None:
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, rotate=1)
    x = arrays({"lq": 500, "lk": keys, "b": 2})
    compare(x, run(launcher, x, plan, 0))
    seen = {schedule.turned(j, 10, 3, schedule.TURN) for j in range(10)}
    assert seen == set(range(10))
    assert schedule.turned(0, 10, 3, schedule.TURN) == 0


TOPS = {
    **{name: CASES[name] for name in ("causal-unaligned", "causal-blind-rows", "sinks", "negative-scale", "no-scale")},
    **{name: MORE[name] for name in ("documents-per-sequence", "heads-packed-in-part", "heads-packed-one-row")},
}  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "plan", [HALVES, *list(PLANS.values())[3:8:3]], ids=["halves", "one", "chained"]
)
@pytest.mark.parametrize("case", [*TOPS.values(), None], ids=[*TOPS, "packed"])
def test_largest_scores(launcher, monkeypatch, case, plan, splits) -> None:
    """Of each head of each sequence, also where sums are rescaled only when a maximum grew much."""
    sizes = sys.modules["relampago.backends.gluon.sizes"]
    monkeypatch.setattr(sizes, "splits_for", lambda *_: splits)
    launcher.setting_of.cache_clear()
    x = (
        packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], Band(0, None, 0))
        if case is None
        else arrays(case)
    )
    x.max_logits = torch.full((x.batch, x.q.shape[-2]), -INF)
    compare(x, run(launcher, x, replace(plan, lazy=1), 0, multiprocessors=3))
    torch.testing.assert_close(x.max_logits, describe_rows(x, torch.float32).max_logits)
    launcher.setting_of.cache_clear()


@pytest.mark.parametrize(
    "name", ["causal-blind-rows", "causal-unaligned", "dims-both-in-two", "heads-packed", "sinks"]
)
def test_partial_results_in_fp32_and_folded(launcher, name) -> None:
    """A shard's result keeps fp32, and goes into rows of a longer one without touching its neighbours."""
    x = replace(arrays({**CASES, **MORE}[name]), dtype=torch.float32)
    plan = PLANS["dynamic-128x128-2-turns"]
    out, lse = run(launcher, x, plan, 0)
    assert out.dtype == torch.float32
    compare(x, (out, lse))
    assert (out != out.bfloat16()).any()
    b, n, h, e = out.shape
    other, other_lse = torch.randn(b, n, h, e), torch.randn(b, h, n)
    other[:, 1], other_lse[:, :, 1] = 0, -INF
    want = merge((other, other_lse), (out, lse))
    longer, longer_lse = torch.full((b, n + 40, h, e), 7.0), torch.full((b, h, n + 40), 7.0)
    x.into = longer[:, 3 : n + 3], longer_lse[:, :, 3 : n + 3]
    for t, value in zip(x.into, (other, other_lse), strict=True):
        t.copy_(value)
    assert run(launcher, x, plan, 1)[0] is x.into[0]
    for got, expected in zip(x.into, want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert (longer[:, :3] == 7).all()
    assert (longer[:, n + 3 :] == 7).all()
    assert (longer_lse[:, :, n + 3 :] == 7).all()


HOLDING = {
    "128": PLANS["dynamic-128x128-2-turns"],
    "192": PLANS["static-192x128-4-free"],
    "lazy": Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, lazy=1),
}


@pytest.mark.parametrize("plan", HOLDING.values(), ids=HOLDING)
@pytest.mark.parametrize("name", ["causal-unaligned", "causal-blind-rows", "ragged", "sinks"])
def test_rows_that_are_held_over_shards(launcher, name, plan) -> None:
    """Out lies as the threads hold it; the first shard is written there, others are folded in, some rows of it too."""
    x = replace(arrays({**CASES, **MORE}[name]), dtype=torch.float32)
    want = run(launcher, x, plan, 0)
    length = x.len_q
    held_launch = importlib.import_module("relampago.backends.gluon.held_launch")
    held = held_launch.hold_out(x, 0)
    for t in held[:2]:
        t.fill_(torch.nan)
    cut = x.len_k // 2
    for at, (first, start, stop) in enumerate(((0, cut, x.len_k), (64, 0, cut), (0, 0, cut))):
        last = 64 if at == 2 else length
        part = replace(
            x, q=x.q[:, first:last], k=x.k[:, start:stop], v=x.v[:, start:stop], len_q=last - first,
            len_k=stop - start, band=x.band._replace(offset=x.band.offset + first - start),
            into=held.part(first, last), anew=at == 0, sinks=x.sinks if at == 0 else None,
        )  # fmt: skip
        assert run(launcher, part, plan, at)[0] is part.into[0]
    held_launch.launch = launch
    out = held_launch.release_out(x, held, torch.float32)
    torch.testing.assert_close(out, want[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(held.lse[..., :length], want[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["full", "causal-blind-rows", "softcap", "dims-in-two"])
@pytest.mark.parametrize("steep", [1.0, 40.0], ids=["stale", "growing"])
def test_maxima_that_may_be_stale(launcher, name, steep) -> None:
    """Scores that hardly grow, and some that grow by far more than a stale maximum bears."""
    x = arrays({**CASES, **MORE}[name])
    x.k.mul_(torch.linspace(steep, 1.0, x.len_k).bfloat16()[:, None, None])  # the last come first
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, lazy=1)
    compare(x, run(launcher, x, plan, 0))


def test_a_growing_maximum_that_is_not_rescaled_is_a_wrong_result(launcher, monkeypatch) -> None:
    kernel = sys.modules["relampago.backends.gluon.sm90_step"]
    monkeypatch.setattr(kernel, "rescaled", lambda acc, factor: acc)
    x = arrays(CASES["full"])
    x.k.mul_(torch.linspace(40.0, 1.0, x.len_k).bfloat16()[:, None, None])
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, lazy=1)
    with pytest.raises(AssertionError):
        compare(x, run(launcher, x, plan, 0))


def test_infinite_scores_of_a_row(launcher) -> None:
    x = arrays({"lq": 70, "lk": 140, "causal": True})
    x.q[0, 3] = INF
    x.q[0, 4] = 0
    x.k[0, :80, 0, 0] = -INF
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2)
    out, _ = run(launcher, x, plan, 0)
    want, _ = attend(x, torch.float32)
    torch.testing.assert_close(out.float(), want, atol=1e-2, rtol=1e-2, equal_nan=True)


def test_a_missing_release_is_a_deadlock(launcher, monkeypatch) -> None:
    kernel = sys.modules["relampago.backends.gluon.sm90_step"]
    monkeypatch.setattr(kernel, "release", lambda ring, stage: None)
    with pytest.raises(Deadlock):
        run(launcher, arrays({"lq": 64, "lk": 512}), PLANS["dynamic-128x128-2-free"], 0)


def test_a_release_too_early_is_a_wrong_result(launcher, monkeypatch) -> None:
    kernel = sys.modules["relampago.backends.gluon.sm90_forward"]
    real = kernel.receive

    def hasty(ring: Any, stage: int, phase: int, rows: int, dim: int) -> Any:
        view = real(ring, stage, phase, rows, dim)
        if rows != 64:
            kernel.release(ring, stage)
        return view

    monkeypatch.setattr(kernel, "receive", hasty)
    x = arrays({"lq": 128, "lk": 2048})
    with pytest.raises(AssertionError):
        compare(x, run(launcher, x, PLANS["dynamic-128x128-2-free"], 0))
