"""Tangents and second derivatives against the fp64 oracle, held to the same budget as the first."""

from __future__ import annotations

import pytest
import torch
from budget import check
from contract.test_contract import call
from oracle import dense
from second import seconds, tangents

import relampago as rl
from relampago.backends import BACKENDS
from relampago.cases import Case, find

# torch's own forward mode of a dense softmax compiles decompositions by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
FP32 = (
    "bottom-right", "dim-40-v-72", "prefix-window", "documents-per-sequence", "dense-mask-broadcast", "block-sparse",
    "user-mod", "bias-shared", "bias-row", "bias-minus-inf", "bias-finfo-min", "sinks-window", "dropout", "packed",
    "packed-cross", "packed-bias", "no-keys",
)  # fmt: skip
HALF = ("bottom-right", "user-mod", "packed-cross")
CASES = [
    *(pytest.param(name, torch.float32, id=f"{name}-fp32") for name in FP32),
    *(pytest.param(name, torch.bfloat16, id=f"{name}-bf16") for name in HALF),
]


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_cpu(name: str, dtype: torch.dtype, compute) -> None:
    agree("cpu", find(name), dtype, compute)


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["user-mod", "bias-shared", "sinks-window", "packed-dropout"])
def test_reference(name: str, compute) -> None:
    agree("reference", find(name), torch.float32, compute)


def agree(backend: str, case: Case, dtype: torch.dtype, compute, device: str = "cpu") -> None:
    tensors, options = case.make(dtype, device)
    got = compute(lambda t, o: call(t, {**o, "backend": backend}), tensors, options, dtype)
    standard = compute(lambda t, o: dense(t, o, dtype), tensors, options, dtype)
    oracle = compute(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    check(f"{backend} {case.name} {compute.__name__}", got, standard, oracle, dtype)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_every_backend_differentiates_or_refuses_by_name(backend) -> None:
    tensors, options = find("causal").make(torch.float32)
    if backend.name in ("cpu", "reference"):
        agree(backend.name, find("causal"), torch.float32, tangents)
        return
    with pytest.raises(rl.Unsupported, match=backend.name):
        tangents(
            lambda t, o: call(t, {**o, "backend": backend.name}), tensors, options, torch.float32
        )
