"""The support table: a reviewed snapshot, made by `relampago matrix --text > tests/support_matrix.txt`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from relampago.cli import app, matrix
from relampago.cli.machine import ARCHITECTURES
from relampago.problem import FEATURES, FP8_CACHE, FP8_PRODUCTS

SNAPSHOT = Path(__file__).parent.parent / "support_matrix.txt"


def test_snapshot() -> None:
    found = CliRunner().invoke(app, ["matrix", "--text"])
    assert found.exit_code == 0
    assert found.output == SNAPSHOT.read_text(encoding="utf-8"), (
        "support changed: review `relampago matrix --text` and write it to tests/support_matrix.txt"
    )


def test_every_feature_has_a_row() -> None:
    shown: set[str] = set()
    for row in matrix.rows():
        for problem in row.problems(ARCHITECTURES["cpu"]):
            shown |= problem.features()
    assert shown == FEATURES | {FP8_PRODUCTS, FP8_CACHE}


def test_markdown_has_the_same_rows_and_columns() -> None:
    lines = [line for line in matrix.as_markdown().splitlines() if line.startswith("|")]
    columns = len(matrix.columns()) + 1
    assert {line.count("|") for line in lines} == {columns + 1}
    for row in matrix.rows():
        assert any(row.label in line for line in lines)


def test_terminal_table() -> None:
    found = CliRunner().invoke(app, ["matrix"])
    assert found.exit_code == 0
    assert "head dim 512" in found.output
