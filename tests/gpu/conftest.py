"""The GPU suite: collected only where there is a device. What is reported of a GPU comes from a run of this.

In Triton's interpreter (TRITON_INTERPRET=1) those files are collected whose tests can be rehearsed without one.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from gpu import card, record

# Those that take longest begin first: a worker that takes them up last would be the only one at work.
LONGEST_FIRST = (
    "sanitizer",
    "derivatives_gpu",
    "invariance_gpu",
    "device",
    "dropin_gpu",
    "fp8_gpu",
    "partial_gpu",
)

# A segment of torch's allocator for large tensors of any size, for large ones up to 10 MiB, and for small ones.
POISON = (1 << 26, 5 << 20, 1 << 18, 1 << 18)  # fp32

REHEARSED = not card.PRESENT and os.environ.get("TRITON_INTERPRET") == "1"
if not card.PRESENT:
    collect_ignore_glob = (
        [f"test_{name}.py" for name in ("contract_gpu", "device", "dropin_gpu", "warm_gpu")]
        if REHEARSED
        else ["test_*.py"]
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record the run; torch may say that a thread of autograd's met cuBLAS first, which is no fault of a test's."""
    if card.PRESENT or REHEARSED:
        record.watch(config)
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by LONGEST_FIRST; the rest keep their order."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture
def device() -> str:
    """The contract suite runs here."""
    return card.DEVICE


@pytest.fixture(autouse=True)
def _poisoned():
    """Freed memory holds NaN: a kernel that leaves part of its output unwritten shows it.

    Afterwards all goes back to the card, which several processes share.
    """
    if not card.PRESENT:
        yield
        return
    poison = [torch.full((n,), math.nan, device="cuda") for n in POISON]
    del poison
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
