"""The examples run, small; each checks itself and exits with an error if it is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("train_llama.py", ["--steps", "4", "--ranks", "4", "--length", "201"], "4 processes (ring)"),
        ("million_tokens.py", ["--seq", "20001", "--ranks", "8"], "20,001 tokens, 8 virtual ranks"),
    ],
)  # fmt: skip
def test_example(name, arguments, words) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout
