"""Which tests also run with the newest Triton: Hopper's, and those of features; `make test` runs them last."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the sample: rows of other architectures take minutes with a compiler they were not sized for."""
    for item in items:
        where = item.nodeid.rsplit("/", 1)[-1]
        arch = next((a for a in ("sm80", "sm89", "sm100", "sm120", "gfx") if a in where), None)
        if arch is None and item.get_closest_marker("pinned") is None:
            item.add_marker(pytest.mark.sample)
