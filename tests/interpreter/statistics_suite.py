"""The statistics' kernels on tiny problems, run by `test_interpreter.py` in a process of its own, and by tests/gpu."""

from __future__ import annotations

import pytest
import torch
from budget import check
from interpreter.small import small
from oracle import dense
from unit.test_statistics import agree, made

import relampago as rl
from relampago import statistics
from relampago.cases import Case
from relampago.plan import Plan

PLAN = Plan(block_q=32, block_k=32)
FP32 = (
    "bottom-right", "window-sees-nothing", "block-sparse", "window-bias", "user-mod", "bias-finfo-min",
    "sinks-window", "packed-window", "no-keys",
)  # fmt: skip
ASKED = [*((n, torch.float32) for n in FP32), ("bottom-right", torch.bfloat16)]


def judge(case: Case, dtype: torch.dtype, device: str) -> None:
    """Every statistic, and the forward that also finds the largest logits."""
    q, k, v, options = made(case, dtype, device)
    got = dict(
        zip(("out", "lse"), agree("triton", case.name, q, k, v, options, dtype), strict=True)
    )
    standard, oracle = (
        dict(zip(("out", "lse"), dense((q, k, v), options, kind), strict=True))
        for kind in (dtype, torch.float64)
    )
    check(case.name, got, standard, oracle, dtype)


@pytest.mark.parametrize(("name", "dtype"), ASKED, ids=[f"{n}-{str(d)[6:]}" for n, d in ASKED])
def test_statistics(name: str, dtype: torch.dtype, device: str) -> None:
    with rl.using(plan=PLAN):
        judge(small(name), dtype, device)


def test_logits_that_are_all_negative(device: str) -> None:
    """The rows that fill a tile up behind the last have no part in the maximum."""
    q = torch.ones(2, 5, 2, 16, device=device)
    want = torch.full((2, 2), -4.0, device=device)
    top = rl.attention(q, -q, q, backend="triton", return_max_logits=True)[1]
    torch.testing.assert_close(top, want)
    torch.testing.assert_close(statistics.rows(q, -q, backend="triton").max_logits, want)
