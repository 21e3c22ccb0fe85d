"""Processes that measure one cell each. On a GPU the next one imports what it needs while the present one measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from relampago.cli.train_step.cell import Cell

COMMAND = (sys.executable, "-m", "relampago.cli.train_step.cell")


class Workers:
    """One process at work and perhaps one that waits for a job; a context, which ends both.

    Args:
        ahead: whether the next process gets ready while one measures; not on a CPU, which both would share.
    """

    def __init__(self, *, ahead: bool) -> None:
        self.ahead = ahead
        self.spare: subprocess.Popen[str] | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.spare is not None:
            self.spare.kill()
            _end(self.spare)

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)  # fmt: skip

    def measure(self, cell: Cell, limit: float, say: Callable[[str], None]) -> dict[str, Any]:
        """A cell's result; {"stopped": ...} after `limit` seconds, {"failed": ...} where the process died.

        Args:
            cell: what to measure.
            limit: seconds.
            say: called with each stage.
        """
        worker = self.spare or self._start()
        self.spare = self._start() if self.ahead else None
        assert worker.stdin is not None
        assert worker.stdout is not None
        clock = threading.Timer(limit, worker.kill)
        clock.start()
        complaints: list[str] = []
        ears = threading.Thread(target=lambda: complaints.extend(worker.stderr or ()), daemon=True)
        ears.start()
        found: dict[str, Any] | None = None
        try:
            worker.stdin.write(json.dumps(asdict(cell)) + "\n")
            worker.stdin.close()
            for line in worker.stdout:
                answer = json.loads(line)
                if "stage" in answer:
                    say(answer["stage"])
                found = answer.get("result", found)
        except BrokenPipeError:
            pass  # it died: what it said last is in `complaints`
        finally:
            in_time = clock.is_alive()
            clock.cancel()
            worker.wait()
            ears.join(timeout=5)
            _end(worker)
        if found is not None:
            return found
        if not in_time:
            return {"stopped": f"after {limit:.0f} s"}
        last = next((c.strip() for c in reversed(complaints) if c.strip()), "no word")
        return {"failed": f"exit {worker.returncode}: {last}"}


def _end(worker: subprocess.Popen[str]) -> None:
    """Wait for a process that has said all, or was killed."""
    worker.wait()
    for pipe in (worker.stdin, worker.stdout, worker.stderr):
        if pipe is not None and not pipe.closed:
            pipe.close()
