"""Four gloo processes, started once: every check of worker.py on every rank."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
SIZE = 4


def checks() -> list[str]:
    """The names in worker.CHECKS, read without starting it."""
    for node in ast.parse(WORKER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CHECKS":
            return [name.id for name in node.value.elts]  # type: ignore[attr-defined]
    raise AssertionError("worker.py has no CHECKS")


def test_every_check_on_four_processes(tmp_path) -> None:
    """One test, because one start must do: pytest-xdist would share parametrised ones out, and start them twice."""
    logs = [(tmp_path / f"{rank}.log").open("w") for rank in range(SIZE)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(SIZE), str(tmp_path)],
            stdout=log,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=250)
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            log.close()
    complaints = []
    for rank in range(SIZE):
        said = tmp_path / f"{rank}.json"
        found = json.loads(said.read_text()) if said.exists() else {}
        complaints += [f"rank {rank}: {name}\n{text}" for name, text in found.items() if text]
        missing = [name for name in checks() if name not in found]
        if missing:
            tail = (tmp_path / f"{rank}.log").read_text()[-3000:]
            complaints.append(f"rank {rank} did not come to {missing[0]}:\n{tail}")
    assert not complaints, "\n\n".join(complaints)
