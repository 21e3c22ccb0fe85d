"""Fixtures of all suites."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """The device the suite runs on; tests/gpu overrides it."""
    return "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
