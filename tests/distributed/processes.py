"""Gloo processes of a worker script: started together, and asked for what each of its checks had to complain about."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path


def checks(worker: Path) -> list[str]:
    """The names in a worker's CHECKS, read without starting it."""
    for node in ast.parse(worker.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CHECKS":
            return [name.id for name in node.value.elts]  # type: ignore[attr-defined]
    raise AssertionError(f"{worker.name} has no CHECKS")


def complaints(worker: Path, size: int, folder: Path) -> list[str]:
    """Run `worker <rank> <size> <folder>` as so many processes; what went wrong, by rank and check."""
    logs = [(folder / f"{rank}.log").open("w") for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(size), str(folder)], stdout=log, stderr=log
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
    found = []
    for rank in range(size):
        said = folder / f"{rank}.json"
        results = json.loads(said.read_text()) if said.exists() else {}
        found += [f"rank {rank}: {name}\n{text}" for name, text in results.items() if text]
        missing = [name for name in checks(worker) if name not in results]
        if missing:
            tail = (folder / f"{rank}.log").read_text()[-3000:]
            found.append(f"rank {rank} did not come to {missing[0]}:\n{tail}")
    return found
