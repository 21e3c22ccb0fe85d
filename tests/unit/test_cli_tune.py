"""`relampago tune`: it measures, and what it prints is a row that the tables accept."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import relampago as rl
from relampago import plan as plans
from relampago.cli import app
from relampago.cli.tune import _subject
from relampago.plan import Plan
from relampago.problem import Device, Layout, Problem, Wanted
from relampago.tuning.search import KERNELS, candidates, row

PLAN = Plan(block_q=16, block_k=128, warps=2, stages=2)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["tune", *words])
    return f"{result.exit_code} {result.output}"


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_measures_and_proposes(kernel) -> None:
    said = run(
        "--case",
        "causal-d64-1k",
        "--kernel",
        kernel,
        "--device",
        "cpu",
        "--samples",
        "1",
        "--limit",
        "2",
    )
    assert said.startswith("0 "), said
    assert f"[[cpu.{kernel}]]" in said
    assert re.search(r"plan = \{ block_q = \d+, block_k = \d+ \}", said)
    assert "2 plans measured, 0 do not fit" in said


def test_bad_words_are_one_line() -> None:
    assert "--case is 'x'; expected one of" in run("--case", "x", "--device", "cpu")
    assert "--kernel is 'sideways'; expected one of forward, backward for cpu" in run(
        "--kernel", "sideways", "--device", "cpu"
    )


def test_a_backend_that_is_not_tuned_is_refused_by_name() -> None:
    """Its plans would be those of another."""
    for device, own in (("cuda", "triton"), ("cpu", "cpu")):
        said = run("--backend", "gluon_sm90", "--device", device)
        assert f"--backend is 'gluon_sm90'; expected {own} on {device}" in said
        assert "benchmarks/hopper" in said
    assert "expected cpu on cpu" in run("--backend", "triton", "--device", "cpu")


def problem(arch: str, **more: Any) -> Problem:
    given = {
        "device": Device("cuda", arch, 100, 200 * 1024), "batch": 1, "heads_q": 8, "heads_kv": 8, "len_q": 1024,
        "len_k": 1024, "dim": 128, "dim_v": 128, "dtype": "bf16", "right": True,
    }  # fmt: skip
    return Problem(**{**given, **more})


def test_gradients_by_atomic_additions_are_tried_unless_their_order_must_be_fixed() -> None:
    def kinds(p: Problem) -> set[tuple[int, int]]:
        return {(plan.fused, plan.tma) for plan in candidates(p, "backward_dkdv")}

    alone = {(0, 0), (0, 1)}
    assert kinds(problem("sm90")) == alone | {(1, 0), (1, 1), (1, 2)}
    assert kinds(problem("sm80")) == {(0, 0), (1, 0)}
    assert kinds(problem("sm90", deterministic=True)) == alone
    assert kinds(problem("sm90", dim=512, dim_v=512)) == alone


def test_decoding_tries_no_tile_twice() -> None:
    """Tiles are cut to a kv head's rows: 16 and more are the same for one query."""
    one = problem("sm90", len_q=1, heads_q=32, layout_k=Layout.PAGED)
    assert {plan.block_q for plan in candidates(one, "decode")} == {64}
    assert {plan.block_q for plan in candidates(problem("sm90"), "decode")} == {16, 32, 64}
    text = row(one, "triton", "decode", next(candidates(one, "decode")), "a test")
    found = plans._row(plans.tomllib.loads(text)["triton"]["decode"][0], "here")
    assert found.matches(one)
    assert not found.matches(replace(one, layout_k=Layout.CACHE))


@pytest.mark.parametrize(("page", "layout"), [(0, Layout.CACHE), (64, Layout.PAGED)])
def test_decoding_is_measured_in_a_cache_and_in_pages(page, layout, monkeypatch) -> None:
    decode = pytest.importorskip("relampago.backends.triton.decode")
    monkeypatch.setattr(decode, "decode", lambda x, plan: (x, plan))
    p, prepare = _subject("causal-d64-1k", torch.float32, "cpu", "triton", "decode", page)
    assert (p.layout_k, p.len_q, p.len_k) == (layout, 1, 1024)
    assert decode.applies(p)
    x, used = prepare(PLAN)()
    assert used == PLAN
    assert x.lens_k.tolist() == [1024] * p.batch
    if page:
        assert sorted(x.page_table.flatten().tolist()) != x.page_table.flatten().tolist()


def test_keys_are_measured_with_what_a_plan_leaves_to_rows(monkeypatch) -> None:
    """A plan that adds up dQ as well is timed against two kernels."""
    module = pytest.importorskip("relampago.backends.triton.backward")
    monkeypatch.setattr(module, "backward", lambda *given: given)
    monkeypatch.setattr(rl, "attention", lambda q, *_, **o: (q, torch.zeros(q.shape[:3])))
    _, prepare = _subject("causal-d64-1k", torch.float32, "cpu", "triton", "backward_dkdv")
    _, plan, rows, _, _, _, wanted, deterministic = prepare(PLAN)()
    assert plan == PLAN != rows
    assert wanted == Wanted()
    assert not deterministic


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_read_back(arch, kernel, monkeypatch) -> None:
    p = problem(arch, dim=256, dim_v=256)
    found = list(candidates(p, kernel))
    assert len(found) == len(set(found))
    by_tma = arch == "sm90" and kernel in ("forward", "backward_dkdv", "backward_dq")
    assert any(plan.tma for plan in found) == by_tma
    text = row(p, "triton", kernel, found[-1], "a test")
    read = plans.tomllib.loads(text)["triton"][kernel][0]
    assert Plan(**read["plan"]) == found[-1]
    assert plans._row(read, "here").matches(p)
