"""The commands, run as a user runs them, and the instruments that they measure with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from relampago import cases
from relampago.cases import Case
from relampago.cli import accuracy, app, console, contestants, machine, memory, timing
from relampago.cli.doctor import hints
from relampago.cli.explain import parse_window
from relampago.errors import InvalidInput

TINY = (
    Case(name="tiny", batch=1, len_q=48, len_k=48, options={"causal": True}),
    Case(name="tiny-softcap", batch=1, len_q=48, len_k=48, options={"softcap": 5.0}),
)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command() -> None:
    found = run("--help")
    assert found.exit_code == 0
    for command in ("doctor", "explain", "bench", "matrix", "plan", "demo"):
        assert command in found.output


def test_doctor() -> None:
    found = run("doctor")
    assert found.exit_code == 0
    for word in ("relampago", torch.__version__, "reference", "fast fp32"):
        assert word in found.output


def test_hints() -> None:
    said = "\n".join(hints(threads=1, cores=4, gpus=1, triton=None))
    assert "1 of 4 cores" in said
    assert "no triton" in said
    assert "no GPU" not in said
    assert "no GPU" in "\n".join(hints(threads=4, cores=4, gpus=0, triton="3.6.0"))


def test_explain_prints_the_papers_numbers() -> None:
    found = run(
        "explain", "--batch", "2", "--len-q", "1024", "--heads", "4", "--full", "--dtype", "fp32"
    )
    assert found.exit_code == 0
    flops = 4 * 2 * 4 * 1024**2 * 64
    assert f"{flops / 1e9:.3g} G" in found.output
    assert console.size(2 * 4 * 2 * 4 * 1024**2) in found.output  # S and P in fp32
    assert "standard attention" in found.output


@pytest.mark.parametrize("arch", list(machine.ARCHITECTURES))
def test_explain_on_a_machine_that_is_not_here(arch: str) -> None:
    found = run(
        "explain", "--device", arch, "--window", "127,0", "--kv-heads", "2", "--softcap", "30"
    )
    assert found.exit_code == 0
    assert "backend" in found.output
    assert ("data sheet)" in found.output) == (arch != "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kv-heads", "3"), "divisor of q's heads"),
        (("--window", "3"), "expected two counts"),
        (("--window", "a,b"), "expected two counts"),
        (("--softcap", "-1"), "softcap is -1.0"),
        (("--dtype", "int8"), "dtype is 'int8'"),
        (("--device", "sm7"), "device is 'sm7'"),
        (("--dim", "0"), "--dim is 0"),
        (("--backend", "nobody"), "backend is 'nobody'"),
        (("--backend", "cpu", "--device", "sm90"), "cannot run"),
    ],
)
def test_explain_refuses_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    found = run("explain", *arguments)
    assert found.exit_code == 2
    assert found.stderr.splitlines()[0].startswith("error: ")
    assert said in found.stderr
    assert "Traceback" not in found.output


def test_window() -> None:
    assert parse_window(None) is None
    assert parse_window("1023,0") == (1023, 0)
    assert parse_window("none 5") == (None, 5)
    with pytest.raises(InvalidInput, match="expected two counts"):
        parse_window("1,2,3")


def test_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cases, "BENCH", TINY)
    out = tmp_path / "new" / "bench.json"
    found = run(
        "bench", "--case", "tiny*", "--backends", "cpu,reference", "--dtype", "fp32,bf16",
        "--direction", "forward,both", "--repeats", "3", "--device", "cpu", "--out", str(out),
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    record = json.loads(out.read_text())
    assert {"cpu", "torch", "python", "relampago", "driver", "commit", "date"} <= set(
        record["machine"]
    )
    rows = record["rows"]
    assert len(rows) == 2 * 2 * 2 * 3
    for row in rows:
        if row["case"] == "tiny-softcap" and row["backend"] == "sdpa":
            assert "seconds" not in row
            assert row["refused"]
            continue
        assert len(row["seconds"]["samples"]) == 3
        assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert set(row["error"]) == (
            {"out"} if row["direction"] == "forward" else {"out", "dq", "dk", "dv"}
        )
        assert max(error["rms"] for error in row["error"].values()) < (
            1e-5 if row["dtype"] == "fp32" else 0.1
        )
    assert "vs SDPA" in found.output


def test_bench_says_why_a_backend_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Case(name="not-asked-before", batch=7, len_q=48, len_k=48)  # choices are cached
    monkeypatch.setattr(cases, "BENCH", (other,))
    monkeypatch.setattr("relampago.backends.cpu.Cpu.why_not", lambda self, p: "is on holiday")
    found = run("bench", "--backends", "reference,cpu", "--repeats", "1", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "cpu: is on holiday" in found.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--case", "nothing*"), "matches nothing"),
        (("--backends", "nobody"), "'nobody'"),
        (("--dtype", "int8"), "'int8'"),
        (("--direction", "sideways"), "'sideways'"),
        (("--direction", ""), "--direction has ''"),
        (("--device", "abacus"), "'abacus'"),
    ],
)
def test_bench_refuses(arguments: tuple[str, ...], said: str) -> None:
    found = run("bench", *arguments)
    assert found.exit_code == 2
    assert said in found.stderr


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize(
    "name",
    [
        "full",
        "causal",
        "bottom-right",
        "one-query",
        "gqa",
        "scale",
        "window",
        "window-causal",
        "packed",
        "dim-40-v-72",
    ],
)
def test_sdpa_is_asked_for_the_same(name: str, direction: str) -> None:
    case = cases.find(name)
    tensors, options = case.make(torch.float64)
    dout = contestants.gradient(tensors, direction)
    ours, theirs = (
        contestants.contestant(who, case, tensors, options, dout) for who in ("reference", "sdpa")
    )
    assert ours is not None
    assert theirs is not None
    assert theirs.exact
    for got, expected in zip(theirs.call(), ours.call(), strict=True):
        torch.testing.assert_close(theirs.unpad(got), expected)


def test_sdpa_counterparts_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("softcap", "sinks", "packed-window"):
        case = cases.find(name)
        assert contestants.contestant("sdpa", case, *case.make(torch.float32)) is None
    monkeypatch.setattr(contestants, "LARGEST_MASK", 10)
    case = cases.find("window-causal")
    entrant = contestants.contestant("sdpa", case, *case.make(torch.float32))
    assert entrant is not None
    assert (entrant.note, entrant.exact) == ("full causal", False)


def test_oracle_by_blocks_of_rows_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        name="any", batch=1, len_q=100, len_k=130, options={"causal": True, "window": (50, 0)}
    )
    tensors, options = case.make(torch.float64)
    dout = contestants.gradient(tensors, "both")
    entrant = contestants.contestant("cpu", case, tensors, options, dout)
    assert entrant is not None
    whole = accuracy.Oracle(case, tensors, options, dout).errors(entrant, entrant.call())
    assert set(whole) == {"out", "dq", "dk", "dv"}
    monkeypatch.setattr(accuracy, "WHOLE", 0)
    oracle = accuracy.Oracle(case, tensors, options, dout)
    assert sum(out.shape[1] for _, out in oracle.out) == 3 * accuracy.BLOCK
    parts = oracle.errors(entrant, entrant.call())
    assert set(parts) == {"out"}
    assert max(parts["out"]["max"], whole["out"]["max"]) < 1e-13


def test_samples_alternate() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timing_of = timing.alternate(calls, device="cpu", repeats=3, warm=False)
    assert order == list("abbaab")
    assert all(len(t.samples) == 3 for t in timing_of.values())
    assert timing.Timing((3.0, 1.0, 2.0)).median == 2.0
    assert timing.Timing((3.0, 1.0, 2.0)).quartiles() == (1.5, 2.5)


def test_a_short_call_fills_a_sample() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    timing.alternate({"a": call}, device="cpu", repeats=1)
    assert count[0] > 100


def test_peak_memory_in_a_process_of_its_own() -> None:
    jobs = [
        {"case": "causal-d64-1k", "name": name, "dtype": "fp32", "direction": "forward"}
        for name in ("sdpa", "reference", "nobody")
    ]
    sdpa, reference, nobody = memory.on_cpu("relampago.cli.contestants:for_memory", jobs)
    assert nobody is None
    if not os.access("/proc/self/clear_refs", os.W_OK):
        assert (sdpa, reference) == (None, None)
        return
    assert sdpa is not None
    assert reference is not None
    assert 2**20 < sdpa < 32 * 2**20  # the output alone is 2 MiB
    assert reference > 2 * 4 * 8 * 1024**2  # S and P


def test_numbers() -> None:
    assert console.seconds(0.00123) == "1.23 ms"
    assert console.seconds(5e-10) == "0.5 ns"
    assert console.seconds(float("nan")) == "-"
    assert console.between(0.0271, 0.036) == "27.1 to 36 ms"
    assert console.size(1536) == "1.5 KiB"
    assert console.size(None) == "-"
