"""The kernel of forward-mode AD compiles for each architecture and fits its shared memory, with no GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Recorder
from crosscompile.test_triton import CAUSAL, SHARED, arrays

from relampago.backends.triton import tangent
from relampago.plan import table
from relampago.problem import Tangents

WIDEST = 256  # head dims beyond are refused by name


@pytest.mark.parametrize(("arch", "row"), [("sm89", 2), ("sm90", 0), ("sm90", 1), ("gfx942", 2)])
def test_row_fits(arch: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = table(arch)["triton.tangent"][row]
    dim = min(dict(found.when).get("dim_max", WIDEST), WIDEST)
    recorder = Recorder(arch)
    monkeypatch.setattr(tangent, "launch", recorder)
    x = arrays(replace(CAUSAL, dim=dim), torch.bfloat16)
    tangent.tangent(x, found.plan, Tangents(x.q, x.k, x.v))
    (built,) = recorder.built
    assert built.shared <= SHARED[arch] * 1024
    if arch == "sm90":
        assert "wgmma.mma_async" in built.asm["ptx"]
