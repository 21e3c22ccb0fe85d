"""Batch invariance on a card: 54 random batches, in which every sequence gets the bits that it gets alone."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu import card
from interpreter.invariance_suite import test_gradients_are_left_to_others  # noqa: F401
from unit.invariance import Batch

import relampago as rl
from relampago.plan import Plan

EACH = 9  # batches of a setting, which share their kernels
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
    small = rl.using(plan=Plan(block_q=16, block_k=4))
    with contextlib.nullcontext() if card.PRESENT else small:
        for seed in range(EACH * number, EACH * number + (EACH if card.PRESENT else 1)):
            Batch(
                seed, LONGEST, (dtype,), device, "triton", more, dims=(dims,), groups=(groups,)
            ).check()
