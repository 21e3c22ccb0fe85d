"""This machine and the ones we know: what doctor prints, what a benchmark file records, what --device may name."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from relampago.errors import InvalidInput
from relampago.problem import Device

# Multiprocessors and the shared memory that a block may use, by the vendors' programming guides.
ARCHITECTURES = {
    "cpu": Device("cpu", "x86_64", 1),
    "sm80": Device("cuda", "sm80", 108, 163 * 1024),
    "sm89": Device("cuda", "sm89", 128, 99 * 1024),
    "sm90": Device("cuda", "sm90", 132, 227 * 1024),
    "sm100": Device("cuda", "sm100", 148, 227 * 1024),
    "gfx942": Device("hip", "gfx942", 304, 64 * 1024),
}


def device_named(name: str) -> Device:
    """`cpu`, `cuda` (the GPU present) or an architecture, as a Device."""
    if name == "cpu":
        return Device.of(torch.device("cpu"))
    if name == "cuda" and torch.cuda.is_available():
        return Device.of(torch.device("cuda"))
    if name not in ARCHITECTURES:
        present = " (there is no GPU here)" if name == "cuda" else ""
        raise InvalidInput(
            f"device is {name!r}{present}; expected one of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def best_device() -> str:
    """`cuda` if there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def version(package: str) -> str | None:
    """The installed version of a package; None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name."""
    with open_or_nothing("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def memory_total() -> int | None:
    """Bytes of main memory."""
    return _meminfo("MemTotal")


def memory_available() -> int | None:
    """Bytes of main memory that a program can still take."""
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int | None:
    with open_or_nothing("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def open_or_nothing(path: str):
    """A text file, or an empty one where there is none (/proc exists on Linux only)."""
    return open(path if Path(path).is_file() else os.devnull, encoding="utf-8")


def driver() -> str | None:
    """The GPU driver's version."""
    if not torch.cuda.is_available() or torch.version.hip or not shutil.which("nvidia-smi"):
        return None
    asked = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return asked.splitlines()[0] if asked else None


def commit() -> str | None:
    """The git commit of the working tree relampago runs from, marked if it has changes; None outside one."""
    here = ["git", "-C", str(Path(__file__).parent)]
    # an installed copy lies in somebody else's tree, if in any: ask only where this very file is tracked
    if _output([*here, "ls-files", "--error-unmatch", "--", "../__init__.py"]) is None:
        return None
    head = _output([*here, "rev-parse", "HEAD"])
    changed = _output([*here, "status", "--porcelain", "--untracked-files=no"])
    return f"{head}{' with changes' if changed else ''}" if head else None


def _output(command: list[str]) -> str | None:
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def gpus() -> list[dict[str, Any]]:
    """Name, architecture and memory of each GPU."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        arch = Device.of(torch.device("cuda", index)).arch
        found.append({"name": facts.name, "arch": arch, "memory": facts.total_memory})
    return found


def facts() -> dict[str, Any]:
    """What a measurement must record of where it was made."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": memory_total(),
        "gpus": gpus(),
        "driver": driver(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": version("triton"),
        "relampago": version("relampago"),
        "commit": commit(),
    }
