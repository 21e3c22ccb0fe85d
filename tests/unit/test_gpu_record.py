"""Runs of tests/gpu: one that is cut has named what failed and what had begun; no test lacks a fixture it asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(SUITE)
    record = tmp_path / "record.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--max-worker-restart", "0"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "GPU_RECORD": str(record), "PYTHONPATH": str(Path(__file__).parents[1])},
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


def test_what_is_taken_over_from_the_interpreter_finds_its_fixtures() -> None:
    """Nothing runs: only what can be rehearsed is collected, and set up on paper."""
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--setup-plan", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
