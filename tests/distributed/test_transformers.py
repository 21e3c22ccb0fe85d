"""Whole models of Transformers over two gloo processes, against eager attention in one: see models.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.processes import complaints

pytest.importorskip("transformers", reason="transformers is not installed")


def test_models_on_two_processes(tmp_path) -> None:
    found = complaints(Path(__file__).with_name("models.py"), 2, tmp_path)
    assert not found, "\n\n".join(found)
