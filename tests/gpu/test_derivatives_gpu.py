"""Tangents, second derivatives and gradients of score mods' tables by the kernels of a card."""

from __future__ import annotations

import pytest
import torch
from contract.test_second import CASES, agree
from gpu.card import LENGTHS, sized
from second import seconds, tangents
from unit import test_table_gradients as tables

from relampago.cases import Case, find
from relampago.mods import relative_bias, t5_bias, window_bias

# torch's own forward mode of a dense softmax compiles decompositions by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_catalogue(name: str, dtype: torch.dtype, compute, device: str) -> None:
    agree("triton", find(name), dtype, compute, device)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", [64, 128])
def test_several_tiles(dim: int, length: int, compute, deterministic: bool, device: str) -> None:
    case = sized(length, dim, causal=True, deterministic=deterministic)
    agree("triton", case, torch.bfloat16, compute, device)


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["user-mod", "sinks-window", "packed-dropout"])
def test_reference(name: str, compute, device: str) -> None:
    agree("reference", find(name), torch.float32, compute, device)


TABLES = (
    "one for all heads",
    "all axes per sequence",
    "slopes per sequence",
    "places per sequence",
)


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, device: str) -> None:
    tables.judge("triton", name, (torch.float32,), device)


def test_tables_of_packed_sequences(device: str) -> None:
    tables.test_packed_sequences("triton", device)


LARGE = {
    "distance": (lambda t: {"score_mod": relative_bias(t[0]), "window": (300, 40)}, (4, 401)),
    "t5 decoder": (
        lambda t: {"score_mod": t5_bias(t[0], bidirectional=False), "causal": True},
        (32, 4),
    ),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", LARGE)
def test_tables_of_several_tiles(name: str, length: int, device: str) -> None:
    make, shape = LARGE[name]
    learn(sized(length), make, shape, device)


@pytest.mark.parametrize("window", [(7, 7), (2, 8, 8)], ids=str)
def test_windows_of_swin(window: tuple[int, ...], device: str) -> None:
    """Many small windows, whose rows all add to one table."""
    n, rows = 1, 1
    for w in window:
        n, rows = n * w, rows * (2 * w - 1)
    case = Case(name="swin", batch=64 if device == "cuda" else 2, len_q=n, len_k=n)
    learn(case, lambda t: {"score_mod": window_bias(t[0], window)}, (rows, 4), device)


def learn(case: Case, make, shape: tuple[int, ...], device: str) -> None:
    """Gradients of one table of fp32, beside q, k and v in bf16."""
    tensors, _ = case.make(torch.bfloat16, device)
    table = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(device)
    tables.agree(tensors, [table], make, torch.bfloat16, "triton")
