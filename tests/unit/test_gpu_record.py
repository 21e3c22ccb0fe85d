"""A run of tests/gpu that is cut has named what failed and what had begun, also through xdist and with -q."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

CONFTEST = "from gpu.record import watch as pytest_configure"
SUITE = """
import os

def test_right():
    pass

def test_wrong():
    assert 1 + 1 == 3, "a sum"

def test_that_is_cut():
    os._exit(1)
"""


def test_what_a_cut_run_has_told(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(SUITE)
    record = tmp_path / "record.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--max-worker-restart", "0"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "GPU_RECORD": str(record)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    told = record.read_text()
    assert "began test_some.py::test_that_is_cut" in told, done.stdout + done.stderr
    assert "passed test_some.py::test_right" in told
    assert "FAILED test_some.py::test_wrong (call" in told
    assert "AssertionError: a sum" in told
    assert "FAILED test_some.py::test_wrong: AssertionError: a sum" in done.stdout
