"""benchmarks/ring_errors.py: what was committed keeps the issue's bounds, and the script still writes such a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from relampago.cli.report.results import load

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ring_errors.py"


def test_what_was_measured_keeps_the_bounds() -> None:
    """bf16 at most 1.25 times one device's error, flat from 2 to 32 ranks; fp64 at most 1e-12."""
    data = load("cpu/ring-errors.json")
    alone, *rings = [r for r in data["rows"] if r["travel"] == "fp32"]
    assert [r["ranks"] for r in rings] == [2, 8, 32]
    for name, error in alone["errors"].items():
        assert all(r["errors"][name] <= 1.25 * error for r in rings), name
        assert rings[-1]["errors"][name] <= 1.1 * rings[0]["errors"][name], name
    assert max(data["fp64"].values()) <= 1e-12
    assert data["example"]["difference"] <= 1e-12


def test_the_script_writes_such_a_file(tmp_path) -> None:
    """Small; wires that round show in dk and dv, and in nothing else."""
    out = tmp_path / "errors.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--length", "128", "--dim", "16", "--steps", "0", "--out", str(out)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, committed = json.loads(out.read_text(encoding="utf-8")), load("cpu/ring-errors.json")
    assert {*committed} - {*found} == {"example"}
    rows = {(r["ranks"], r["travel"]): r["errors"] for r in found["rows"]}
    assert {*rows} == {(r["ranks"], r["travel"]) for r in committed["rows"]}
    wide, narrow = rows[32, "fp32"], rows[32, "bf16"]
    assert (narrow["out"], narrow["dq"]) == (wide["out"], wide["dq"])
    assert min(narrow[name] / wide[name] for name in ("dk", "dv")) > 1.5
