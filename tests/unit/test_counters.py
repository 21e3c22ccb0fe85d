"""`relampago explain --measure`: ncu's CSV, what is said without it, and the sums beside the formulas.

`ncu.csv` has the raw page's form as Nsight Compute prints it: program output and `==` lines around, units in the second
line, names with commas, thousands separated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from relampago.cli import app, counters, measured
from relampago.work import Work

SAMPLE = (Path(__file__).parent / "ncu.csv").read_text(encoding="utf-8")
WORK = Work(pairs=8 * 64 * 64, rows=8 * 64, keys=8 * 64, dim=16, dim_v=16, scores=8 * 64 * 64)


def test_parse() -> None:
    first, second, third = counters.parse(SAMPLE)
    assert first.name.startswith(
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10"
    )
    assert (first.read, first.written) == (536_870_912, 536_902_144)
    assert first.seconds == pytest.approx(301.28e-6)
    assert second.name == "_attend"
    assert (third.read, third.seconds) == (3.5e6, pytest.approx(0.0125e-3))


def test_units_and_gaps() -> None:
    assert counters.parse("nothing to see\n") == []
    with pytest.raises(counters.NoCounters, match="'n/a' in 'byte'"):
        counters.parse(SAMPLE.replace("536,870,912", "n/a"))
    with pytest.raises(counters.NoCounters, match="printed no dram__bytes_write"):
        counters.parse(SAMPLE.replace("dram__bytes_write.sum", "other"))


def pretend(tmp_path: Path, monkeypatch, program: str) -> None:
    """An ncu that does what `program` says."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!{sys.executable}\n{program}\n", encoding="utf-8")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_ncu_is_asked_for_the_raw_page(tmp_path, monkeypatch) -> None:
    (tmp_path / "sample").write_text(SAMPLE, encoding="utf-8")
    pretend(
        tmp_path, monkeypatch,
        f"import sys; a = sys.argv; assert a[-1] == 'program' and '--csv' in a and a[a.index('--page') + 1] == 'raw'\n"
        f"print(open({str(tmp_path / 'sample')!r}).read())",
    )  # fmt: skip
    assert len(counters.profile(["program"], 30, {})) == 3


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')", "may not read"),
        ("print('==ERROR== Failed to initialize the profiler: LibraryNotLoaded')", "LibraryNotLoaded"),
        ("raise SystemExit(3)", "said nothing"),
        ("import time; time.sleep(9)", "more than 1 s"),
    ],
)  # fmt: skip
def test_no_counters(tmp_path, monkeypatch, program: str, said: str) -> None:
    pretend(tmp_path, monkeypatch, program)
    with pytest.raises(counters.NoCounters, match=said):
        counters.profile(["x"], 1 if "sleep" in program else 30, {})


def test_no_ncu(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(counters.NoCounters, match="not installed"):
        counters.profile(["x"], 1, {})


def job(contestant: str, direction: str, **changed) -> measured.Job:
    words = {"q": (1, 24, 4, 8), "k": (1, 24, 2, 8), "v": (1, 24, 2, 8), "dtype": "float64",
             "causal": True, "window": (5, 0), "softcap": 3.0}  # fmt: skip
    return measured.Job(contestant, direction, **(words | changed))


def test_contestants_compute_the_same() -> None:
    for way in measured.DIRECTIONS:
        ours, theirs = (job(who, way).call("cpu")() for who in ("cpu", "standard"))
        torch.testing.assert_close(ours, theirs)


def test_without_counters_time_only(monkeypatch) -> None:
    def profile(*_):
        raise counters.NoCounters("none here")

    monkeypatch.setattr(counters, "profile", profile)
    monkeypatch.setattr(
        measured, "_timed_only",
        lambda job: {"kernels": [{"name": "k", "read": None, "written": None, "seconds": 2e-6}]},
    )  # fmt: skip
    (entry,), why = measured.measure([job("cpu", "forward")])
    assert why == "none here"
    row = measured.summarise(entry, WORK, 2, None)
    assert (row["moved"], row["read"], row["of_roofline"]) == (None, None, None)
    assert row["seconds"] == 2e-6
    assert measured.cells(row)[:3] == ["-", "-", "-"]
    nothing = measured.summarise({**entry, "kernels": []}, WORK, 2, (1.0, 1.0, ""))
    assert measured.cells(nothing)[-3:] == ["-", "-", "-"]


def test_sums_beside_formulas() -> None:
    kernels = [{"name": n, "read": 100.0, "written": 50.0, "seconds": 1e-3} for n in "ab"]
    entry = {"contestant": "standard", "direction": "forward", "kernels": kernels}
    row = measured.summarise(entry, WORK, 2, (1e9, 1e6, ""))
    assert (row["read"], row["written"], row["moved"], row["seconds"]) == (200, 100, 300, 2e-3)
    expected = 2 * 32 * (512 + 512) + 4 * 2 * WORK.scores
    assert row["formula"] == {"flops": WORK.forward_flops, "bytes": expected}
    assert row["of_roofline"] == pytest.approx(expected / 1e6 / 2e-3)
    assert row["flops_per_second"] == WORK.forward_flops / 2e-3
    assert measured.table([row]).row_count == 1


def test_backward_bytes_are_each_tensor_once() -> None:
    tensors = {"q": (512, 16), "k": (512, 16), "v": (512, 16), "out": (512, 16), "dout": (512, 16),
               "dq": (512, 16), "dk": (512, 16), "dv": (512, 16)}  # fmt: skip
    once = sum(a * b for a, b in tensors.values())
    assert WORK.flash_backward_bytes(2) == 2 * once + 4 * 512
    found = measured.formulas(WORK, "standard", "backward", 2)["bytes"]
    assert found == 2 * (once - 512 * 16) + 7 * 2 * WORK.scores  # needs no output


def test_measure_needs_the_gpu_it_speaks_of() -> None:
    assert not torch.cuda.is_available()
    found = CliRunner().invoke(app, ["explain", "--measure", "--len-q", "64", "--device", "sm90"])
    assert found.exit_code == 2
    assert "--measure with --device sm90" in found.stderr
