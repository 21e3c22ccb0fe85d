"""Nsight Compute's hardware counters: run a program under `ncu`, read its CSV, say plainly where that is not possible.

The raw page has one line per kernel and a line of units below the header; the program's own output and ncu's `==` lines
stand around it (Nsight Compute CLI documentation, "Console Output Options").
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

READ, WRITTEN, DURATION = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
METRICS = (READ, WRITTEN, DURATION)
OPTIONS = (
    "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS),
    "--profile-from-start", "off",  # the program says when: cudaProfilerStart and Stop
    "--clock-control", "none", "--target-processes", "all",
)  # fmt: skip
UNITS = {
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0,
}  # fmt: skip


class NoCounters(Exception):
    """Counters cannot be read here; says why."""


@dataclass(frozen=True)
class Kernel:
    """One launch, by the counters.

    Args:
        name: of the kernel.
        read: bytes from device memory.
        written: bytes to device memory.
        seconds: on the GPU, caches flushed before.
    """

    name: str
    read: float
    written: float
    seconds: float


def profile(command: Sequence[str], limit: float, environment: Mapping[str, str]) -> list[Kernel]:
    """The kernels that a program launches between cudaProfilerStart and Stop.

    Args:
        command: the program.
        limit: seconds it may take.
        environment: of the program.

    Raises:
        NoCounters: no ncu, no permission, or it failed or took too long.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters("Nsight Compute's command line, ncu, is not installed")
    try:
        done = subprocess.run(
            [ncu, *OPTIONS, *command], capture_output=True, text=True, timeout=limit, check=False,
            env=dict(environment),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoCounters(f"ncu took more than {limit:.0f} s") from None
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        raise NoCounters("this user may not read the GPU's counters (ERR_NVGPUCTRPERM)")
    found = parse(done.stdout)
    if done.returncode or not found:
        lines = [line for line in output.splitlines() if "==ERROR==" in line]
        said = (lines or output.strip().splitlines() or ["it said nothing"])[-1]
        raise NoCounters(f"ncu failed: {said.replace('==ERROR==', '').strip()}")
    return found


def parse(output: str) -> list[Kernel]:
    """The kernels of a raw page, in order of launch.

    Raises:
        NoCounters: a metric is absent, or the GPU does not have it.
    """
    lines = output.splitlines()
    start = next((i for i, text in enumerate(lines) if text.startswith('"ID",')), None)
    if start is None:
        return []
    table = csv.DictReader(text for text in lines[start:] if text.startswith('"'))
    absent = [name for name in METRICS if name not in (table.fieldnames or ())]
    if absent:
        raise NoCounters(f"ncu printed no {', '.join(absent)}")
    units = next(table, {})
    return [
        Kernel(row["Kernel Name"], *(_value(row[name], units[name]) for name in METRICS))
        for row in table
    ]


def _value(text: str, unit: str) -> float:
    try:
        return float(text.replace(",", "")) * UNITS[unit]
    except (ValueError, KeyError):
        raise NoCounters(f"ncu printed {text!r} in {unit!r}") from None
