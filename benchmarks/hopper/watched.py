"""Jobs in processes of their own, which are ended when they take too long: a hang costs one job, not the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

Rows = list[dict[str, Any]]
MARK = "@@"
BEGUN = time.time()


class Job(NamedTuple):
    """A process and where it writes."""

    process: subprocess.Popen[str]
    output: TextIO
    begun: float
    words: tuple[str, ...]


def say(kind: str, **row: Any) -> None:
    """A job's way to report: one row."""
    print(MARK + json.dumps({"kind": kind, **row}), flush=True)


def elapsed() -> float:
    """Seconds since the program began."""
    return time.time() - BEGUN


def keep(rows: Rows, name: str) -> Path:
    """Write $OUT/NAME.json, or into the folder for temporary files."""
    target = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"{name}.json"
    target.write_text(json.dumps(rows))
    return target


def _start(words: tuple[str, ...], module: str) -> Job:
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the job has ended
    command = [sys.executable, "-m", module, "--job", *words]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
    return Job(process, output, time.time(), words)


def watch(
    todo: list[tuple[Any, ...]], each: float, until: float, module: str = "benchmarks.hopper"
) -> Rows:
    """All jobs at once; the rows that they report. Those above `each` seconds, or `until` in all, are ended."""
    live = [_start(tuple(map(str, words)), module) for words in todo]
    rows: Rows = []
    while live:
        for job in list(live):
            code: Any = job.process.poll()
            if code is None and (time.time() - job.begun > each or elapsed() > until):
                job.process.kill()
                code = "time-out"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(5)
            if code is not None:
                live.remove(job)
                rows += _rows_of(job, code)
        time.sleep(0.05)
    return rows


def _rows_of(job: Job, code: Any) -> Rows:
    job.output.seek(0)
    lines = job.output.read().splitlines()
    rows = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
    if code != 0:
        last = [row for row in rows if row["kind"] == "start"][-1:]
        said = " | ".join(line for line in lines if not line.startswith(MARK))[-600:]
        after = time.time() - job.begun
        print(
            f"!! {job.words} ended with {code} after {after:.0f} s; last {last} {said}", flush=True
        )
        rows.append({"kind": "lost", "words": job.words, "code": code, "last": last})
    return rows
