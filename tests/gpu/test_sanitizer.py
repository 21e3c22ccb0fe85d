"""NVIDIA's compute-sanitizer over small launches: no access outside of an allocation, no race in shared memory.

Each allocation is torch's own call of cudaMalloc, without a cache between, so that the tool knows where it ends.

What racecheck says of a kernel whose warps are specialised is no finding. On an H200 (Triton 3.6) it named these, at
addresses in whose SASS a barrier orders them:

- A tile's numbers (tiles.py), where tiles are drawn: the producer's stores, and the consumers' loads. All lanes of
  one warp store, meet (bar.warp.sync, for which ptxas leaves a NOP, since they go together), and one arrives at `full`,
  on which each reading thread waits; the readers meet (bar.sync), and one arrives at `empty`, on which each storing
  lane waits.
- The word by which Triton sends a warp to its partition (the lines of `warp_specialize`). Its stores and loads stand
  between barriers of all threads of the block (barrier 1, without a count), and nothing of the kernel's own writes it.

The second is ordered whatever the timing: the tool loses track, we do not know why. So of these kernels synccheck
watches the barriers; the compiled code is searched for arrivals before which a partition has not met
(crosscompile/test_arrivals.py); and rings, turns and phases are simulated over random schedules
(unit/test_gluon_protocol.py). Races of all other kernels count.
"""

from __future__ import annotations

import os
import re
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
    *(("synccheck", name) for name in ("gluon-64", "gluon-128") if name in NAMES),
]
SPECIALISED = {"attend", "by_keys"}
RACES = {"triton": set(), "gluon-64": SPECIALISED}  # kernels of which racecheck may say anything
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
    command = [str(sanitizer()), "--tool", tool, "--error-exitcode", str(FAULTS), "--print-limit", "200",
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


def races(report: str) -> set[str]:
    """The kernels of whose accesses racecheck speaks."""
    return set(re.findall(r"(?:Read|Write) access at (.+?)\+0x", report))


def test_a_report_is_read() -> None:
    report = """
========= Error: Race reported between Write access at attend+0x7360 in tiles.py:67
=========     and Read access at attend+0x610 in tiles.py:74 [16 hazards]
========= Error: Race reported between Read access at void at::fill<int>(T1, int)+0x110 in fill.cuh:36
"""
    assert races(report) == {"attend", "void at::fill<int>(T1, int)"}
    assert not races("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")


class TestWatched:
    """Each in a process of its own."""

    pytestmark = needs_tool

    @pytest.mark.parametrize(("tool", "name"), WATCHED)
    def test_nothing_is_found(self, tool: str, name: str) -> None:
        done = watch(tool, name)
        assert done.returncode == 0, f"{tool} {name}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"

    @pytest.mark.parametrize("name", [name for name in RACES if name in NAMES])
    def test_no_race_is_found(self, name: str) -> None:
        done = watch("racecheck", name)
        said = f"{name}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        assert "RACECHECK SUMMARY" in done.stdout, said
        assert "Traceback" not in done.stderr, said
        found = races(done.stdout)
        assert done.returncode == (FAULTS if found else 0), said
        assert found <= RACES[name], said

    def test_a_race_is_found(self) -> None:
        done = watch("racecheck", "raced")
        assert done.returncode == FAULTS, done.stdout[-6000:]
        assert races(done.stdout) == {"_raced"}

    def test_a_read_beyond_is_found(self) -> None:
        done = watch("memcheck", "beyond")
        assert done.returncode == FAULTS, done.stdout[-6000:]
        assert "Invalid __global__ read" in done.stdout
