"""benchmarks/multigpu.py runs from end to end, dry: two gloo processes, tiny shapes; a card's session has one try."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = {"ring", "allgather", "ulysses"}
THEIRS = {"torch allgather", "torch alltoall"}


def test_dry_run_on_two_processes(tmp_path) -> None:
    out = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(BENCHMARKS / "multigpu.py"), "--dry", "--budget", "200", "--out", str(out)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["left_out"] == []
    assert {row["strategy"] for row in report["correctness"]} == OURS
    assert all(row["passed"] for row in report["correctness"])
    rows = {(row["strategy"], row["tokens"]): row for row in report["rows"]}
    lengths = {tokens for _, tokens in rows}
    assert len(lengths) == 4
    assert set(rows) == {(name, n) for name in OURS | THEIRS for n in lengths}
    for (name, _), row in rows.items():
        assert row["ranks"] == 2, row
        if name in OURS:
            for way in ("forward", "backward"):
                assert min(row[f"{way}_ms"], row[f"silent_{way}_ms"], row[f"model_{way}_ms"]) > 0
                assert row[f"{way}_efficiency"] > 0
        else:
            assert row["not_run"].startswith("torch's context_parallel has no attention for cpu")
