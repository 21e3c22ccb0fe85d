"""The Triton kernels without a GPU: the suite runs in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("numpy")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "suite",
        "offsets_suite",
        "decode_suite",
        "tangent_suite",
        "statistics_suite",
        "tables_suite",
        "quant_suite",
        "invariance_suite",
    ],
)
def test_kernels_in_the_interpreter(name: str) -> None:
    suite = Path(__file__).parent / f"{name}.py"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(suite), "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning"],
        env={**os.environ, "TRITON_INTERPRET": "1", **threads},
        cwd=suite.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
