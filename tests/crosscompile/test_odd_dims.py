"""Rows whose head dims are multiples of 8 but not of 16 come 16 bytes at a time, and so compile like any others.

Triton knows of a number that it is given only whether 16 divides it; see `tile.stepped`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile import test_decode_compiles, test_triton
from crosscompile.offline import Built
from crosscompile.test_descriptors import CAPPED, PLAN
from crosscompile.test_invariance_compiles import Asked, build
from crosscompile.test_triton import CAUSAL

from relampago.plan import Plan

ODD = (40, 72)
# Bytes of a thread that may be spilled: two acc of a span, 256 bytes each (`test_invariance_compiles`), and as much for
# softcap. Where rows came number by number these were 5476 and 10758.
MOST = 1024


def narrow(built: Built) -> list[str]:
    """Accesses of rows, in bf16, that are not of 16 bytes: facts of rows are of 4 bytes or more."""
    return re.findall(r"(?:ld|st)\.global\S*\.b16\b.*", built.asm["ptx"])


def copies(built: Built) -> list[int]:
    """Bytes of each asynchronous copy."""
    found = re.findall(
        r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+)", built.asm["ptx"]
    )
    return [int(n, 16) for n in found]


@pytest.mark.parametrize(("keys", "rows"), [("packed", 512), ("page33", 1)])
def test_batch_invariant(keys: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in pages of 33 took ptxas longest, and spilled most."""
    built = build(monkeypatch, "sm90", PLAN, Asked(ODD, rows=rows, keys=keys), **CAPPED)[0]
    assert narrow(built) == []
    assert set(copies(built)) == {16}
    assert built.spills <= MOST


def plainly(
    monkeypatch: pytest.MonkeyPatch, arch: str, kernel: str, dims: tuple[int, int]
) -> Built:
    """A kernel of a dense call."""
    plan = Plan(block_q=64, block_k=64, warps=4, stages=2)
    case = replace(CAUSAL, dim=dims[0], dim_v=dims[1])
    return test_triton.build(monkeypatch, arch, kernel, case, torch.bfloat16, plan)


@pytest.mark.parametrize(
    ("arch", "kernel"), [("sm80", "forward"), ("sm90", "backward_dkdv"), ("sm90", "backward_dq")]
)
def test_forward_and_backward(arch: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = plainly(monkeypatch, arch, kernel, ODD)
    assert narrow(built) == []
    assert copies(built).count(16) >= 8


@pytest.mark.parametrize("page", [0, 7])
def test_decoding(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(block_q=16, block_k=64, warps=4, stages=4)
    built = test_decode_compiles.build(monkeypatch, "sm90", plan, dims=ODD, page=page)[0]
    assert narrow(built) == []
    assert set(copies(built)) == {16}
    assert built.spills == 0


def test_rows_of_4_come_4_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever power of two divides a row."""
    built = plainly(monkeypatch, "sm90", "forward", (36, 36))
    assert narrow(built) == []
    assert set(copies(built)) == {8}
