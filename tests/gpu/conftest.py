"""The GPU suite: collected only where there is a device. What is reported of a GPU comes from a run of this."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    """The contract suite runs here."""
    return "cuda"


@pytest.fixture(autouse=True)
def _poisoned():
    """Freed memory holds NaN: a kernel that leaves part of its output unwritten shows it."""
    poison = [
        torch.full((n,), math.nan, device="cuda") for n in (1 << 26, 1 << 20, 1 << 18, 1 << 16)
    ]
    del poison
    yield
    torch.cuda.synchronize()
