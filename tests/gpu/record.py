"""A run's record: tests as they begin and end, written at once, so that a run that is cut has told what it knew.

With xdist the controller writes for all of its workers. Failures go to the terminal as well, `-q` or not.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

VARIABLE = "GPU_RECORD"  # names the file
LINES = 15  # of a failure, from its end


class Record:
    """A plugin of pytest's."""

    def __init__(self, config: pytest.Config, path: str | None) -> None:
        self.plugins = config.pluginmanager
        self.file = None if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115
        self.began = time.monotonic()

    def _say(self, text: str) -> None:
        if self.file is not None:
            print(f"{time.monotonic() - self.began:6.1f} {text}", file=self.file, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins; one that never ends is one that the limit cut, or that hung."""
        self._say(f"began {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's setup, body or teardown ended."""
        if report.failed:
            text = "\n".join(report.longreprtext.splitlines()[-LINES:])
            self._say(f"FAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{text}")
            terminal: Any = self.plugins.get_plugin("terminalreporter")
            if terminal is not None:
                terminal.ensure_newline()
                terminal.write_line(f"FAILED {report.nodeid}: {_cause(report)}")
        elif report.when == "call" or report.skipped:
            self._say(f"{report.outcome} {report.nodeid} ({report.duration:.1f} s)")


def _cause(report: pytest.TestReport) -> str:
    """The first line of what was raised, or of what pytest marks."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.split("\n")[0]
    lines = report.longreprtext.splitlines()
    marked = (line[1:].strip() for line in lines if line.startswith("E  "))
    return next(marked, (lines or [""])[-1])


def watch(config: pytest.Config) -> None:
    """Record this run, unless this is one of xdist's workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config, os.environ.get(VARIABLE)), "gpu-record")
