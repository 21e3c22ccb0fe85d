"""Tangents and second derivatives on the device, by Triton whatever else could compute the forward."""

import pytest
import torch
from second import seconds, tangents
from test_second import CASES, agree

from relampago.cases import find

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
WIDE = [
    pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
    for name in ("gqa", "dim-128", "dim-256", "causal-long", "deterministic")
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "dtype"), [*CASES, *WIDE])
def test_triton(name: str, dtype: torch.dtype, compute, device) -> None:
    agree("triton", find(name), dtype, compute, device)
