"""The tables in README and docs are what the committed JSON says; the report's page is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relampago.cli import app
from relampago.cli.report import html, pages, results, tables

ROOT = Path(__file__).parents[2]


def test_tables_are_generated_from_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, f"run python benchmarks/report.py: {done.stdout}{done.stderr}"


def test_a_stale_table_is_found() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert pages.rendered(page) == page
    assert (
        pages.rendered(page.replace("| causal-d64-1k | 1.03×", "| causal-d64-1k | 9.03×")) == page
    )


def test_the_page(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["bench", "--report", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    made = [make() for file, make in tables.TABLES.values() if file and results.there(file)]
    assert page.count("<table>") == sum(text.count("|---:|\n") for text in made)
    assert "<td>---" not in page
    assert page.count("<svg") == 2
    for name in ("hopper", "cpu"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "1.34×" in page  # full-d64-1k, forward, fp32
    assert "**CPU: memory by length**" in (tmp_path / "tables.md").read_text(encoding="utf-8")


def test_markdown_to_html_escapes() -> None:
    text = tables.markdown("a < b", ["x", "y"], [["1", "<i>"]], "a note")
    assert html.of_markdown(text) == (
        "<h2>a &lt; b</h2><table><thead><tr><th>x<th>y<tbody><tr><td>1<td>&lt;i&gt;</table><p>a note</p>"
    )


def test_the_tables_plans_are_in_the_runs() -> None:
    """A row of sm90.toml that no run has timed leaves its cells empty: this says so first."""
    assert all(all(names) for names in tables.BACKWARD.values()), tables.BACKWARD
    timed = {(dim, name) for file in tables.BACKWARD_RUNS
             for dim, _, _, _, name in tables.backward_rates(file)}  # fmt: skip
    assert all((dim, name) in timed for (dim, _), name in tables.BACKWARD_NAMES.items())
    assert "–" not in tables.decode()


def test_a_wheel_has_no_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "nothing")
    found = CliRunner().invoke(app, ["bench", "--report"])
    assert found.exit_code == 2
    assert "in a clone of the repository only" in found.stderr


def test_tables_that_wait_for_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The forms that `train-step` and `explain --measure` write make tables."""
    machine = {
        "gpus": [{"name": "NVIDIA H200", "arch": "sm90"}],
        "torch": "2.11",
        "date": "2026-12-03T",
    }
    cell = {
        "model": "llama-7b",
        "layers": None,
        "length": 8192,
        "checkpoint": "full",
        "optimiser": "fp32",
        "device": "cuda",
    }
    sizes = {"weights": 13 * 2**30, "gradients": 13 * 2**30, "optimiser": 75 * 2**30}
    result = {"samples": [1.0], "bytes": sizes, "peak": 110 * 2**30, "beyond": 9 * 2**30}
    cells = [
        cell | {"attention": kind, "result": result} for kind in ("relampago", "eager", "without")
    ]
    kernels = [{"name": "k", "read": 1e9, "written": 1e8, "seconds": 1e-3}]
    row = {
        "contestant": "triton", "direction": "forward", "kernels": kernels, "read": 1e9, "written": 1e8, "moved": 1.1e9,
        "seconds": 1e-3, "formula": {"flops": 10**12, "bytes": 10**9}, "flops_per_second": 1e15, "of_roofline": 0.5,
    }  # fmt: skip
    asked = {"q": [1, 8192, 16, 128], "dtype": "bfloat16", "causal": True}
    (tmp_path / "h200").mkdir()
    records = {
        "train-step": {"machine": machine, "cells": cells},
        "io": {"machine": machine, "asked": asked, "no_counters": "", "rows": [row]},
    }
    for name, record in records.items():
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    step = tables.training()
    assert "13.0 + 13.0 + 75.0 GiB" in step
    assert "8192 tokens: 1.00× the speed of eager" in step
    assert "NVIDIA H200, torch 2.11, 2026-12-03" in step
    assert "made its causal mask" not in tables.moved()
    kernels = [{"name": name, "read": 2**30, "written": 2**29, "seconds": 1e-3}
               for name in ("product", "arange", "compare", "bitwise_not", "softmax")]  # fmt: skip
    before = [{"contestant": "standard", "direction": "forward", "kernels": kernels}]
    assert "mask in the call: 3 GiB read, 1.5 GiB written, 3 ms" in tables.of_the_mask(before)
    assert (
        "| triton forward | 954 MiB | 95.4 MiB | 1.02 GiB | 954 MiB | 1.10 | 1 ms | 1000 | 50% |"
        in tables.moved()
    )
