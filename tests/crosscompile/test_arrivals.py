"""Who arrives at an mbarrier speaks for all threads of its partition: they must have met before.

One thread arrives, and the other side takes that for word that all have read a tile, or written a number. A barrier of
the partition between their last access and the arrival makes it true; Triton puts it there, and this looks for it in
what it made. racecheck cannot tell on a card: see tests/gpu/test_sanitizer.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from relampago.plan import Row

triton = pytest.importorskip("triton", minversion="3.6")

from crosscompile.test_gluon import TABLE
from crosscompile.test_gluon import arrays as forward_arrays
from crosscompile.test_gluon import build as build_forward
from crosscompile.test_gluon_backward_compiles import KEYS
from crosscompile.test_gluon_backward_compiles import build as build_backward

MEETING = re.compile(r"\bbar(\.warp)?\.sync\s+(-1|\d+, (128|256))")
ARRIVAL = re.compile(r"\bmbarrier\.arrive\.shared")
# where a thread may be ahead of another, or touches what it speaks for
EVENT = re.compile(
    r"^\$L__BB|\bbra\b|\b(ld|st)\.shared|\b(st|ld)matrix|\bmbarrier\.|\bwgmma\.|\bcp\.async\.bulk\."
    r"|\b(red|atom)\.global"
)


def unannounced(ptx: str) -> tuple[list[str], int]:
    """The arrivals before which no barrier stands alone, and how many arrivals there are."""
    met, found, count = False, [], 0
    for line in ptx.splitlines():
        if ARRIVAL.search(line):
            count += 1
            if not met:
                found.append(line.strip())
        if MEETING.search(line):
            met = True
        elif EVENT.search(line):
            met = False
    return found, count


def first(rows: tuple[Row, ...], **plan: int) -> Row:
    """A row of head dim 64, planned otherwise."""
    row = next(r for r in rows if dict(r.when).get("dim_max") == 64)
    return replace(row, plan=replace(row.plan, **plan))


@pytest.mark.parametrize("plan", [{"schedule": 2}, {"schedule": 2, "chain": 1}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_forward(plan, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = first(TABLE, **plan)
    x = forward_arrays(row, "causal", torch.bfloat16, packed)
    found, count = unannounced(build_forward(monkeypatch, row.plan, x).asm["ptx"])
    assert count >= 10, "a barrier's arrival is written otherwise now"
    assert not found


@pytest.mark.parametrize("plan", [{"schedule": 0}, {"schedule": 2}, {"ordered": 1}], ids=str)
def test_backward(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, that a warpgroup has added to dQ is known by an arrival too."""
    built = build_backward(monkeypatch, first(KEYS, **plan), "causal", "ordered" in plan)
    found, count = unannounced(built["by_keys"].asm["ptx"])
    assert count >= 6, "a barrier's arrival is written otherwise now"
    assert not found


def test_a_missing_barrier_is_found() -> None:
    read, meet, arrive = (
        "ld.shared.b32 %r1, [%r2];",
        "bar.sync 2, 128;",
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];",
    )
    assert unannounced("\n".join((read, meet, arrive))) == ([], 1)
    assert unannounced("\n".join((meet, read, arrive))) == ([arrive], 1)
    assert unannounced("\n".join((read, meet, "$L__BB0_1:", arrive))) == ([arrive], 1)
