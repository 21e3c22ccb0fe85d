"""`examples/train_tiny.py` and `train_7b.py`, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_curves_lie_on_each_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_tiny.py"), "--steps", "12", "--length", "64", "--hidden", "64",
         "--batch", "2", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "train-tiny.json").read_text())
    curves = {kind: run["losses"] for kind, run in record["runs"].items()}
    assert set(curves) == {"eager", "sdpa", "relampago"}
    assert all(len(losses) == 12 and losses[-1] < losses[0] for losses in curves.values())
    assert curves["relampago"][0] == pytest.approx(curves["eager"][0], rel=1e-5)
    assert (tmp_path / "train-tiny.png").read_bytes().startswith(b"\x89PNG")


def test_7b_says_what_it_would_measure(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_7b

    assert train_7b.arguments(tiny=True)[:4] == ["--device", "cpu", "--model", "tiny"]
