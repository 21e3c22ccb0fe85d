"""NVIDIA's compute-sanitizer over small launches: no access outside of an allocation, no race in shared memory.

Each allocation is torch's own call of cudaMalloc, without a cache between, so that the tool knows where it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.card import HOPPER, PRESENT
from gpu.launches import LAUNCHES, launch

HERE = Path(__file__).parent
ON_HOPPER = ("gluon-64", "gluon-128", "gluon-packed", "gluon-shards", "fp8")
NAMES = [name for name in LAUNCHES if HOPPER or name not in ON_HOPPER]
WATCHED = [
    *(("memcheck", name) for name in NAMES),
    *(("racecheck", name) for name in ("triton", "gluon-64") if name in NAMES),
    *(("synccheck", name) for name in ("gluon-64", "gluon-128") if name in NAMES),
]
FAULTS = 9  # the exit status that stands for a finding


def sanitizer() -> str | None:
    """The tool: on the path, in a CUDA toolkit, or of the package nvidia-cuda-sanitizer-api."""
    toolkits = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
        *Path("/usr/local").glob("cuda-*"),
    ]
    wheels = [toolkit for folder in sys.path for toolkit in Path(folder).glob("nvidia/*")]
    bins = [str(toolkit / "bin") for toolkit in (*toolkits, *wheels)]
    return shutil.which(
        "compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *bins])
    )


needs_tool = [
    pytest.mark.skipif(not PRESENT, reason="compute-sanitizer watches a card"),
    pytest.mark.skipif(sanitizer() is None, reason="compute-sanitizer is not installed"),
]


@pytest.mark.skipif(PRESENT, reason="rehearsed where there is no card to watch")
@pytest.mark.parametrize("name", NAMES)
def test_launches(name: str) -> None:
    launch(name)


def watch(tool: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run a launch under a tool; ends with FAULTS where it finds one. A call by which torch tries an API is none."""
    command = [str(sanitizer()), "--tool", tool, "--error-exitcode", str(FAULTS), "--print-limit", "5",
               "--report-api-errors", "no", "--target-processes", "application-only",
               sys.executable, str(HERE / "launches.py"), name]  # fmt: skip
    return subprocess.run(
        command,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=240,
    )


class TestWatched:
    """Each in a process of its own."""

    pytestmark = needs_tool

    @pytest.mark.parametrize(("tool", "name"), WATCHED)
    def test_nothing_is_found(self, tool: str, name: str) -> None:
        done = watch(tool, name)
        assert done.returncode == 0, f"{tool} {name}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"

    def test_a_read_beyond_is_found(self) -> None:
        done = watch("memcheck", "beyond")
        assert done.returncode == FAULTS, done.stdout[-6000:]
        assert "Invalid __global__ read" in done.stdout
