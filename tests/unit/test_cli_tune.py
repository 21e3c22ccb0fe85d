"""`relampago tune`: it measures, and what it prints is a row that the tables accept."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from relampago import plan as plans
from relampago.cli import app
from relampago.plan import Plan
from relampago.problem import Device, Problem
from relampago.tuning.search import KERNELS, candidates, row


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


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_read_back(arch, kernel, monkeypatch) -> None:
    device = Device("cuda", arch, 100, 200 * 1024)
    p = Problem(
        device=device,
        batch=1,
        heads_q=8,
        heads_kv=8,
        len_q=1024,
        len_k=1024,
        dim=256,
        dim_v=256,
        dtype="bf16",
        right=True,
    )
    found = list(candidates(p, kernel))
    assert len(found) == len(set(found))
    by_tma = arch == "sm90" and not kernel.startswith("tangent")
    assert any(plan.tma for plan in found) == by_tma
    text = row(p, "triton", kernel, found[-1], "a test")
    read = plans.tomllib.loads(text)["triton"][kernel][0]
    assert Plan(**read["plan"]) == found[-1]
    assert plans._row(read, "here").matches(p)
