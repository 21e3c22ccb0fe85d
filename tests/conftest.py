"""Fixtures of all suites."""

from __future__ import annotations

import gc
import os

import pytest
import torch

if (
    os.environ.get("TRITON_INTERPRET") == "1"
):  # suites of tests/interpreter, rehearsals of tests/gpu
    from interpreter import exact

    exact.patch()
    torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    """The device the suite runs on; tests/gpu overrides it."""
    return "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector of cycles need not go through it again and again."""
    gc.collect()
    gc.freeze()
