"""Strides are multiplied in 64 bits, in the kernels that no other test compiles; all others are searched as they are.

What an offset that is too narrow does is in tests/interpreter/offsets_suite.py.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Recorder
from crosscompile.offsets import STRIDE, narrow
from crosscompile.test_triton import CAUSAL, arrays

from relampago.backends.triton import argument_gradients, backward
from relampago.mods import alibi
from relampago.plan import Plan
from relampago.problem import Saved, Wanted

HEAD = "tt.func public @k(%q: !tt.ptr<bf16>, %size: i32, %sq: i32 {tt.divisibility = 16 : i32}, %sq_5: i32)"
WIDE = """
    %sq_6 = arith.constant 8 : i32 loc(#l)
    %a = arith.divsi %sq_5, %sq_6 : i32 loc(#l)
    %b = arith.muli %a, %sq_6 : i32 loc(#l)
    %c = arith.extsi %b : i32 to i64 loc(#l)
    %d = arith.muli %e, %c : i64 loc(#l)
    %f = arith.muli %size, %tile : i32 loc(#l)
"""
NARROW = """
    %c = tt.splat %b : i32 -> tensor<64x1xi32> loc(#l)
    %at = arith.muli %count, %c : tensor<64x1xi32> loc(#l)
"""


def test_what_is_searched_for() -> None:
    assert narrow(HEAD + WIDE) == []
    assert [line.split()[0] for line in narrow(HEAD + WIDE + NARROW)] == ["%at"]


@pytest.mark.parametrize("fused", [0, 1])
def test_all_that_a_backward_launches(fused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("sm80")
    for module in (backward, argument_gradients):
        monkeypatch.setattr(module, "launch", recorder)
    options = {"causal": True, "score_mod": (alibi(torch.rand(4)),)}
    x = arrays(replace(CAUSAL, dim=40, dim_v=72, options=options), torch.bfloat16)
    out = torch.zeros((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.q.dtype)
    saved = Saved(out, torch.zeros(x.q.shape[0], x.q.shape[2], x.q.shape[1]))
    plan = Plan(block_q=32, block_k=32, fused=fused)
    wanted = Wanted(mod_args=(True,))
    backward.backward(x, plan, plan, saved, out, None, wanted, False)
    owners = ["by_keys"] if fused else ["by_queries", "by_keys"]
    assert [b.name for b in recorder.built] == ["prepare", "renormalise", *owners, "by_argument"]
    assert all(STRIDE.search(b.asm["ttir"]) for b in recorder.built)
