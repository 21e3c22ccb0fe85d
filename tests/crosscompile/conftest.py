"""Marks the sample, which the newest Triton compiles too: `make test` runs it last. `sample.py` says what is chosen."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("pinned") is None:
            item.add_marker(pytest.mark.sample)
