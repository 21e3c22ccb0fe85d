"""Forward-mode AD on the Triton kernel, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run this through test_interpreter.py"

from budget import check
from contract.test_contract import call
from interpreter import exact
from oracle import dense
from second import seconds, tangents

import relampago as rl
from relampago.api import Options, prepare
from relampago.backends.triton.tangent import tangent
from relampago.cases import find
from relampago.op import arrays_of, tangent_op
from relampago.plan import Plan
from relampago.problem import Tangents

exact.patch()
torch.set_num_threads(1)
# torch's own forward mode of a dense softmax compiles decompositions by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

FP32 = (
    "bottom-right", "dim-40-v-72", "documents-per-sequence", "dense-mask-broadcast", "block-sparse", "user-mod",
    "bias-row", "sinks-window", "dropout", "packed-cross",
)  # fmt: skip


def agree(name: str, dtype: torch.dtype) -> None:
    tensors, options = find(name).make(dtype)
    got = tangents(lambda t, o: call(t, {**o, "backend": "triton"}), tensors, options, dtype)
    standard = tangents(lambda t, o: dense(t, o, dtype), tensors, options, dtype)
    oracle = tangents(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    check(f"triton {name}", got, standard, oracle, dtype)


@pytest.mark.parametrize("name", FP32)
def test_fp32(name) -> None:
    agree(name, torch.float32)


@pytest.mark.parametrize("name", ["bottom-right", "bias", "sinks"])
def test_half(name) -> None:
    agree(name, torch.bfloat16)


@pytest.mark.parametrize("moving", ["q", "k", "v"])
def test_one_tangent_alone(moving) -> None:
    tensors, options = find("bottom-right").make(torch.float32)
    call = prepare(*tensors, Options(**options))
    along = Tangents(
        *(torch.ones_like(t) if n == moving else None for n, t in zip("qkv", call, strict=False))
    )
    got = tangent(arrays_of(call), Plan(block_q=32, block_k=32), along)
    torch.testing.assert_close(
        got, tangent_op(*along, *prepare(*tensors, Options(**options, backend="cpu")))
    )


def test_second_derivatives_are_refused_by_name() -> None:
    tensors, options = find("causal").make(torch.float32)
    with pytest.raises(rl.Unsupported, match="does not know second derivatives"):
        seconds(
            lambda t, o: rl.attention(*t, **o, backend="triton", return_lse=True),
            tensors, options, torch.float32,
        )  # fmt: skip
