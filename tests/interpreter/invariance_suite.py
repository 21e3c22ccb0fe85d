"""Batch invariance of the Triton kernels on tiny problems, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import pytest
import torch
from unit.invariance import Batch

import relampago as rl
from relampago.plan import Plan


@pytest.mark.parametrize(("seed", "window"), [(206, (3, 0)), (212, None)])
def test_a_sequence_has_the_bits_it_has_alone(seed, window) -> None:
    """Two short sequences, GQA: fp16, and fp32 with sinks and a softcap."""
    with rl.using(plan=Plan(block_q=16, block_k=4)):
        Batch(
            seed, 9, (torch.float32, torch.float16), backend="triton", more={"window": window}
        ).check()


def test_gradients_are_left_to_others(device) -> None:
    q = torch.randn(1, 8, 2, 16, device=device, requires_grad=True)
    out = rl.attention(q, q, q, batch_invariant=True, backend="triton")
    with pytest.raises(rl.Unsupported, match="batch invariance forward only"):
        out.sum().backward()
