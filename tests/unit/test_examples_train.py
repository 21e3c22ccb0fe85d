"""`examples/train_tiny.py` and `train_7b.py`, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_curves_lie_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_tiny

    words = [
        "--steps",
        "12",
        "--length",
        "64",
        "--hidden",
        "64",
        "--batch",
        "2",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", ["train_tiny.py", *words])
    train_tiny.main()  # raises SystemExit if they do not
    record = json.loads((tmp_path / "train-tiny.json").read_text())
    curves = {kind: run["losses"] for kind, run in record["runs"].items()}
    assert set(curves) == {"eager", "sdpa", "relampago"}
    assert all(len(losses) == 12 and losses[-1] < losses[0] for losses in curves.values())
    assert curves["relampago"][0] == pytest.approx(curves["eager"][0], rel=1e-5)
    assert (tmp_path / "train-tiny.png").read_bytes().startswith(b"\x89PNG")
    # a relampago that learns otherwise than eager
    monkeypatch.setattr(
        train_tiny,
        "train",
        lambda kind, text, options, device: (
            {"losses": [4.0, 3.0 + (kind == "relampago")], "seconds": 1.0}
        ),
    )
    with pytest.raises(SystemExit, match="do not lie on each other"):
        train_tiny.main()


def test_7b_says_what_it_would_measure(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_7b

    assert train_7b.arguments(tiny=True)[:4] == ["--device", "cpu", "--model", "tiny"]
