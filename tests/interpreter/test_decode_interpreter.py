"""Flash decoding without a GPU: the suite runs in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("numpy")

SUITE = Path(__file__).parent / "decode_suite.py"


@pytest.mark.timeout(600)
def test_decode_in_the_interpreter() -> None:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(SUITE), "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning"],
        env={**os.environ, "TRITON_INTERPRET": "1", **threads},
        cwd=SUITE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
