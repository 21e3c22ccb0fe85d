"""The GPU suite: collected only where there is a device. What is reported of a GPU comes from a run of this.

In Triton's interpreter (TRITON_INTERPRET=1) those files are collected whose tests can be rehearsed without one.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from gpu import card

if not card.PRESENT:
    rehearsed = os.environ.get("TRITON_INTERPRET") == "1"
    collect_ignore_glob = (
        [f"test_{name}.py" for name in ("contract_gpu", "device", "dropin_gpu")]
        if rehearsed
        else ["test_*.py"]
    )


@pytest.fixture
def device() -> str:
    """The contract suite runs here."""
    return card.DEVICE


@pytest.fixture(autouse=True)
def _poisoned():
    """Freed memory holds NaN: a kernel that leaves part of its output unwritten shows it."""
    if not card.PRESENT:
        yield
        return
    poison = [
        torch.full((n,), math.nan, device="cuda") for n in (1 << 26, 1 << 20, 1 << 18, 1 << 16)
    ]
    del poison
    yield
    torch.cuda.synchronize()
