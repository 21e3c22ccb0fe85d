"""The statistics' kernels on tiny problems, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run this through test_interpreter.py"

from interpreter import exact
from unit.test_statistics import PACKED, dense, made, tiled, within_budget

import relampago as rl
from relampago.cases import find
from relampago.plan import Plan

exact.patch()
torch.set_num_threads(1)

PLAN = Plan(block_q=32, block_k=32)
FP32 = (
    "bottom-right", "window-sees-nothing", "block-sparse", "window-bias", "user-mod", "bias-finfo-min",
    "sinks-window", "packed-window", "no-keys",
)  # fmt: skip
ASKED = [*((n, torch.float32) for n in FP32), ("gqa", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), ASKED, ids=[n for n, _ in ASKED])
def test_statistics(name: str, dtype: torch.dtype) -> None:
    q, k, v, options = made(find(name), dtype)
    with rl.using(plan=PLAN):
        got = tiled(q, k, options, 7, "triton")
    oracle, standard = (dense(q, k, options, 7, d) for d in (torch.float64, dtype))
    within_budget(f"triton {name}", got, standard, oracle, dtype)
    function = rl.attention_varlen if PACKED[0] in options else rl.attention
    with rl.using(plan=PLAN):
        _, top = function(q, k, v, **options, backend="triton", return_max_logits=True)
    within_budget(f"triton {name}", {**got, "max_logits": top}, standard, oracle, dtype)
