"""Peak memory of one call. On a GPU by the allocator; on the CPU by the kernel's own mark, in a process of its own.

Linux keeps the greatest resident size of a process (VmHWM) and lets it be set back (5 into /proc/self/clear_refs). A
child builds the inputs, makes one small call so that threads and libraries exist, returns freed memory to the system,
sets the mark back and makes the call once. Each point has a child of its own, forked from a process that has imported
torch and has run nothing. What is reported is the growth during the call, its result included.

This file is also the program of that process: `python -m relampago.cli.memory`, with jobs as JSON on stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Call = Callable[[], object]
_MARK = "/proc/self/clear_refs"


def on_gpu(call: Call) -> int:
    """Bytes by which the allocator's peak rises during a call."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def on_cpu(factory: str, jobs: Iterable[dict[str, Any]]) -> Iterator[int | None]:
    """Bytes by which each job's process grows at its peak; None where it cannot be measured (not Linux) or failed.

    Args:
        factory: "module:function"; called with a job's entries it returns (small call, call to measure).
        jobs: keyword arguments for the factory, plain values.
    """
    jobs = list(jobs)
    if not os.access(_MARK, os.W_OK):
        yield from [None] * len(jobs)
        return
    command = [sys.executable, "-m", "relampago.cli.memory", factory]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin as question, child.stdout as answers:
        for job in jobs:
            with contextlib.suppress(BrokenPipeError):  # the process is gone: no answer follows
                question.write(json.dumps(job) + "\n")
                question.flush()
            line = answers.readline().strip()
            yield int(line) if line.isdigit() else None


def growth(warm: Call, call: Call) -> int:
    """In this process: bytes by which its resident size rises above the present one during a call."""
    warm()
    _give_back()
    Path(_MARK).write_text("5", encoding="ascii")
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    return max(0, peak - before)


def _give_back() -> None:
    """Return freed memory to the system, so that the call cannot hide in it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def serve(factory: str) -> None:
    """Answer each line of stdin, a job, by a line with its bytes, or by a dash if the job failed."""
    module, function = factory.split(":")
    make = getattr(importlib.import_module(module), function)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(_answer(make, json.loads(line))).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        print(answer or "-", flush=True)


def _answer(make: Callable[..., tuple[Call, Call]], job: dict[str, Any]) -> int | str:
    try:
        return growth(*make(**job))
    except Exception as error:  # the parent must get its line
        print(f"{job}: {error}", file=sys.stderr)
        return "-"


if __name__ == "__main__":
    serve(sys.argv[1])
