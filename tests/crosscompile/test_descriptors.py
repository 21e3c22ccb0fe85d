"""Products read the tiles they are meant to read, in kernels whose rows come number by number."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.descriptors import mixed_up
from crosscompile.offline import Recorder
from crosscompile.sample import pinned
from crosscompile.test_invariance_compiles import SHARED, Asked, build, disassembled

from relampago.backends.triton import arguments as A
from relampago.backends.triton import forward
from relampago.plan import table
from relampago.problem import Device

RIGHT = """
    UIADD3 UR12, UP0, UR8, 0x2, URZ ;
    UMOV UR8, URZ ;
    UIADD3.X UR8, UR8, -0x7fffffe0, URZ, UP0, !UPT ;
    UIADD3 UR26, UP1, UR24, 0x80, URZ ;
    UIADD3.X UR27, UR6, 0x40000040, URZ, UP1, !UPT ;
"""
WRONG = """
    UIADD3 UR10, UP0, UR4, 0x20, URZ ;
    UIADD3.X UR32, UR12, UR11, URZ, UP1, !UPT ;
    UIADD3.X UR7, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
"""
PLAN = next(r.plan for r in table("sm90")["triton.invariant"] if r.plan.block_q == 128)
CAPPED = {"softcap": 3.0, "window": (57, 0)}


def test_what_is_searched_for() -> None:
    assert mixed_up(RIGHT) == []
    assert len(mixed_up(WRONG)) == 1


ODD: list[tuple[Asked, dict[str, Any]]] = [
    (Asked((40, 72), keys="packed"), CAPPED),
    (Asked((35, 67), keys="cache"), {"alibi_slopes": torch.ones(32)}),
    (Asked((67, 67), rows=1, keys="cache"), {}),
]


def _sass(monkeypatch: pytest.MonkeyPatch, asked: Asked, options: dict[str, Any]) -> str:
    return disassembled(build(monkeypatch, "sm90", PLAN, asked, **options)[0])


@pytest.mark.pinned  # to ptxas 12.8, which gets some wrong if head dims are cut in two
@pytest.mark.parametrize(("asked", "options"), ODD)
def test_batch_invariant_kernels(asked, options, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mixed_up(_sass(monkeypatch, asked, options)) == []


@pytest.mark.pinned
def test_in_two_parts_one_is_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else look for another, and if there is none `arguments.parts` has lost its reason: delete it."""
    monkeypatch.setattr(A, "parts", lambda x: (*A.split(x.q.shape[-1]), *A.split(x.v.shape[-1])))
    assert mixed_up(_sass(monkeypatch, *ODD[1]))


@pytest.mark.parametrize("keys", ["packed", pinned("cache")])
def test_forward(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cuda", "sm90", 132, SHARED["sm90"] * 1024)
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    recorder = Recorder("sm90")
    monkeypatch.setattr(forward, "launch", recorder)
    plan = next(
        r.plan for r in table("sm90")["triton.forward"] if dict(r.when).get("dim_max") == 128
    )
    forward.forward(Asked((40, 72), keys=keys).arrays(**CAPPED), plan)
    assert mixed_up(disassembled(recorder.built[0])) == []
