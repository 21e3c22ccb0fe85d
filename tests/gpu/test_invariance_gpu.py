"""Batch invariance on a card: 12 random batches, in which each sequence gets the bits that it gets alone; gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu import card
from interpreter.invariance_suite import PLAN, compare_gradients
from unit.invariance import Batch

import relampago as rl
from relampago.api import Options, prepare
from relampago.backends.triton import invariant
from relampago.op import decide, gather

EACH = 2  # batches of a setting: each new form of a batch is a kernel to compile
LONGEST = 1500 if card.PRESENT else 9
BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = [  # head dims; kv heads and query heads of each; dtype; window, softcap, whether there are sinks
    ((64, 64), (1, 4), BF16, (100, 0), None, True),
    ((128, 128), (2, 3), BF16, None, None, False),
    ((40, 72), (4, 2), BF16, (57, 0), 3.0, False),
    ((16, 16), (2, 1), FP32, None, 3.0, True),
    ((40, 72), (2, 3), FP32, (33, 0), None, True),
    ((64, 64), (2, 3), FP32, None, None, False),
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_sequence_has_the_bits_it_has_alone(number: int, device: str) -> None:
    dims, groups, dtype, window, cap, sinks = SETTINGS[number]
    heads = groups[0] * groups[1]
    more = {
        "window": window,
        "softcap": cap,
        "sinks": torch.randn(heads).to(device) if sinks else None,
    }
    small = rl.using(plan=PLAN)
    with contextlib.nullcontext() if card.PRESENT else small:
        for seed in range(EACH * number, EACH * number + (EACH if card.PRESENT else 1)):
            Batch(
                seed, LONGEST, (dtype,), device, "triton", more, dims=(dims,), groups=(groups,)
            ).check()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_alone_packed_and_padded(dims: tuple[int, int], dtype, device: str) -> None:
    """Lengths that are odd: what is aligned alone is not in a batch."""
    heads = ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    compare_gradients((77, 1001) if card.PRESENT else (5, 9), heads, dtype, device)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 33, 200])
def test_a_long_cache(dim: int, rows: int, device: str) -> None:
    """The last rows of a sequence as a prefill has them, few of them, and with their spans shared in every way."""
    length = 5000 if card.PRESENT else 40
    rows = rows if card.PRESENT else min(rows, 5)
    q, k, v = (torch.randn(1, length, h, dim).to(device, BF16) for h in (8, 2, 2))
    options = {"causal": True, "batch_invariant": True, "backend": "triton"}
    with contextlib.nullcontext() if card.PRESENT else rl.using(plan=PLAN):
        whole, whole_lse = rl.attention(q, k, v, **options, return_lse=True)
        x, facts = gather(prepare(q[:, -rows:], k, v, Options(**options)))
        _, _, plan = decide(x, facts)
    for chunks in (None, 1, 2, 7):  # not by `attention`, which does a like call's launches again
        out, lse = invariant.invariant(x, plan, chunks=chunks)
        assert torch.equal(out, whole[:, -rows:])
        assert torch.equal(lse, whole_lse[..., -rows:])
