"""Forward-mode AD and double backward on the Triton kernels, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run this through test_interpreter.py"

from budget import check
from contract.test_contract import call
from interpreter import exact
from oracle import dense
from second import seconds, tangents

from relampago.api import Options, prepare
from relampago.backends import triton as backend
from relampago.backends.triton.backward_tangent import backward_tangent
from relampago.backends.triton.tangent import tangent
from relampago.cases import find
from relampago.op import arrays_of, backward_tangent_op, tangent_op
from relampago.plan import Plan
from relampago.problem import Moving, Saved, Tangents, Wanted

exact.patch()
torch.set_num_threads(1)
# torch's own forward mode of a dense softmax compiles decompositions by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

TILES = Plan(block_q=16, block_k=32, fused=1)  # two and more of each, and few enough for the interpreter
FORWARD = (
    "bottom-right", "dim-40-v-72", "documents-per-sequence", "dense-mask-broadcast", "block-sparse", "user-mod",
    "bias-row", "sinks-window", "dropout", "packed-cross",
)  # fmt: skip
TWICE = (
    *FORWARD, "prefix-window", "bias-finfo-min", "packed-bias", "packed-dropout", "no-keys",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's table has tiles of 16 × 16 for fp32."""
    monkeypatch.setattr(backend, "first_match", lambda *_: TILES)


def agree(name: str, dtype: torch.dtype, compute, **options) -> None:
    case = find(name)
    case = case if case.packed else replace(case, batch=min(case.batch, 2))
    tensors, given = case.make(dtype)
    given = {**given, **options}
    got = compute(lambda t, o: call(t, {**o, "backend": "triton"}), tensors, given, dtype)
    standard = compute(lambda t, o: dense(t, o, dtype), tensors, given, dtype)
    oracle = compute(lambda t, o: dense(t, o, torch.float64), tensors, given, torch.float64)
    check(f"triton {name}", got, standard, oracle, dtype)


@pytest.mark.parametrize("name", FORWARD)
def test_tangent(name) -> None:
    agree(name, torch.float32, tangents)


@pytest.mark.parametrize("name", TWICE)
def test_twice(name) -> None:
    agree(name, torch.float32, seconds)
