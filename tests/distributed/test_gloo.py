"""Four gloo processes, started once: every check of worker.py on every rank."""

from __future__ import annotations

from pathlib import Path

from distributed.processes import complaints


def test_every_check_on_four_processes(tmp_path) -> None:
    """One test, because one start must do: pytest-xdist would share parametrised ones out, and start them twice."""
    found = complaints(Path(__file__).with_name("worker.py"), 4, tmp_path)
    assert not found, "\n\n".join(found)
