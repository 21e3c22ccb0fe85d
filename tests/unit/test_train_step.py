"""`relampago train-step`: its cells on tiny models, the counts behind MFU, the order, the estimates."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from relampago.cli import app, train_step
from relampago.cli.train_step import cell as cells
from relampago.cli.train_step import rows, workers
from relampago.cli.train_step.cell import WITHOUT, Cell
from relampago.cli.train_step.optimiser import OPTIMISERS, held_per_parameter
from relampago.cli.train_step.order import order
from relampago.cli.train_step.shapes import SHAPES, shape_of
from relampago.cli.train_step.tokens import sequence, tokens
from relampago.errors import InvalidInput

TINY = Cell("tiny-mistral", 1, 130, "eager", "full", "fp32", "cpu", 1)


@pytest.fixture(scope="module")
def text():
    return tokens(400)


def test_text_is_real_and_a_ring(text) -> None:
    assert len(text) > 100_000
    assert 256 < text.max() < 400
    run = sequence(text, 1000, 200)
    start = 200_000 % len(text)
    assert torch.equal(run, torch.cat([text[start:], text])[:1001])


@pytest.fixture
def quick_text(monkeypatch: pytest.MonkeyPatch, text) -> None:
    monkeypatch.setattr(cells, "tokens", lambda vocabulary: text % vocabulary)


@pytest.mark.usefixtures("quick_text")
def test_all_kinds_of_attention_take_the_same_step() -> None:
    found = {
        kind: cells.measure(dataclasses.replace(TINY, attention=kind))
        for kind in ("eager", "sdpa", "relampago", WITHOUT)
    }
    losses = {kind: result["losses"] for kind, result in found.items()}
    for kind in ("sdpa", "relampago"):  # bf16: a few roundings of 2^-8 in a loss of ln 1024
        assert losses[kind] == pytest.approx(losses["eager"], rel=2e-4)
    assert losses[WITHOUT] != pytest.approx(losses["eager"], rel=2e-4)
    eager = found["eager"]
    assert eager["parameters"] == TINY.shape.parameters
    assert eager["bytes"]["weights"] == eager["bytes"]["gradients"] == 2 * eager["parameters"]
    assert len(eager["samples"]) == 1


@pytest.mark.usefixtures("quick_text")
@pytest.mark.parametrize("precision", list(OPTIMISERS))
def test_optimisers_hold_what_they_say_and_learn(precision: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
    before = weight.detach().clone()
    adamw = OPTIMISERS[precision]([weight], lr=0.1, fused=False)
    weight.grad = weight.detach().sign()
    adamw.step()
    assert (weight.abs().sum() < before.abs().sum()).item()
    counted = adamw.held() + 4 * weight.numel()  # and weight and gradient
    assert counted - held_per_parameter(precision) * weight.numel() in range(9)  # and a step count


def test_master_weights_keep_what_bf16_would_lose() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    adamw = OPTIMISERS["fp32"]([weight], lr=1e-3, fused=False)
    for _ in range(8):  # each too small for bf16 alone: 1 - 2^-8 is the next number
        weight.grad = torch.ones_like(weight)
        adamw.step()
    assert weight.item() == pytest.approx(1 - 8e-3, abs=2**-9)


@pytest.mark.usefixtures("quick_text")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_checkpoints_change_what_is_made_again_not_the_step(monkeypatch) -> None:
    from relampago.backends.cpu import Cpu

    calls = []
    forward = Cpu.forward
    monkeypatch.setattr(Cpu, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    monkeypatch.setattr(cells, "cpu_growth", lambda step: None)
    traced = functools.partial(torch.compile, backend="aot_eager")  # the same sums
    monkeypatch.setattr(torch, "compile", traced)
    losses = []
    for checkpoint, passes in (("full", 2), ("most", 1), ("attention", 1), ("none", 1)):
        for compiled in (False, True):
            calls.clear()
            made = dataclasses.replace(
                TINY, attention="relampago", checkpoint=checkpoint, compiled=compiled
            )
            losses.append(cells.measure(made)["losses"])
            steps = cells.WARM_UP + made.repeats
            assert len(calls) == passes * steps * made.shape.layers, (checkpoint, compiled)
    assert all(found == losses[0] for found in losses)


def test_logits_in_slices_give_the_gradients_of_the_whole(monkeypatch) -> None:
    monkeypatch.setattr(cells, "HEAD_ROWS", 5)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False)
    leaf = torch.randn(1, 13, 8, requires_grad=True)
    labels = torch.randint(30, (1, 13))
    total = cells.backward(head, leaf * 2, labels)
    found = (leaf.grad.clone(), head.weight.grad.clone())
    leaf.grad = head.weight.grad = None
    whole = torch.nn.functional.cross_entropy(head(leaf[0] * 2), labels[0])
    whole.backward()
    torch.testing.assert_close(total, whole.detach())
    torch.testing.assert_close(found, (leaf.grad, head.weight.grad))


def test_running_out_of_memory_is_a_result(monkeypatch) -> None:
    def build(cell):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 GiB.\nmore")

    monkeypatch.setattr(cells, "build", build)
    found = cells.measure(TINY)
    assert found["out_of_memory"] == "CUDA out of memory. Tried to allocate 34.00 GiB."
    assert found["stage"] == "building"


def test_parameters_are_those_of_the_papers() -> None:
    assert SHAPES["llama-7b"].parameters == 6_738_415_616
    assert SHAPES["mistral-7b"].parameters == 7_241_732_096
    assert shape_of("llama-7b", 2).layers == 2


@pytest.mark.parametrize("model", ["llama-7b", "mistral-7b"])
def test_flops(model: str) -> None:
    shape, length = SHAPES[model], 8192
    rows_seen = [min(row + 1, shape.window or length) for row in range(length)]
    attention = 12 * shape.hidden * sum(rows_seen) * shape.layers
    matrices = shape.parameters - shape.head - shape.hidden * (2 * shape.layers + 1)
    assert shape.model_flops(length) == 6 * matrices * length + attention


def test_order_puts_first_what_matters() -> None:
    shape = SHAPES["llama-7b"]
    lengths = [2048, 4096, 8192, 16384, 32768]
    kinds = ["eager", "sdpa", "relampago", WITHOUT]
    found = order(lengths, kinds, shape, 40 * 2**30)
    assert found[0] == (32768, "relampago")
    assert set(found[1:5]) == {(8192, kind) for kind in kinds}
    assert {n for n, _ in found[5:8]} == {32768}
    assert sorted(found) == sorted((n, kind) for n in lengths for kind in kinds)
    assert order(lengths, kinds, shape, None)[1][0] == 32768


def measured(seconds: float, beyond: int) -> dict:
    sizes = {"weights": 10, "gradients": 10, "optimiser": 40}
    return {"samples": [seconds], "bytes": sizes, "beyond": beyond, "peak": beyond + 60}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_estimates_grow_as_scores_do_and_are_marked(kind: str) -> None:
    shape = SHAPES["llama-7b"]
    gone = {"out_of_memory": "CUDA out of memory.", "stage": "warming up"}
    made = rows.rows(
        {
            (1024, kind): measured(3.0, 300), (1024, WITHOUT): measured(1.0, 100),
            (2048, kind): gone, (2048, WITHOUT): measured(2.0, 200), (4096, kind): gone,
            (2048, "relampago"): measured(4.0, 260),
        },
        shape,
    )  # fmt: skip
    (guess,) = (row for row in made if row.estimate)
    assert (guess.length, guess.kind) == (2048, kind)
    pairs = shape.attention(2048).pairs / shape.attention(1024).pairs
    assert guess.seconds == pytest.approx(2.0 + (4 if kind == "eager" else pairs) * 2.0)
    assert guess.split["attention"] == (4 if kind == "eager" else 2) * 200
    assert guess.peak == 60 + 200 + guess.split["attention"]
    (unknown,) = (row for row in made if row.length == 4096)
    assert unknown.seconds is None
    assert unknown.short == "out of memory"
    assert rows.gains(made) == []  # an estimate is no measurement


def test_gains_are_at_the_longest_common_length() -> None:
    found = {
        (n, kind): measured(s, b)
        for n, kind, s, b in [(1, "relampago", 1, 9), (2, "relampago", 1, 10), (2, "eager", 4, 40),
                              (1, "eager", 9, 90), (3, "relampago", 1, 10)]
    }  # fmt: skip
    (said,) = rows.gains(rows.rows(found, SHAPES["tiny"]))
    assert said.startswith("2 tokens: 4.00× the speed of eager, 75% less memory beyond")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One real process; the others are played by it, one runs out of memory, one does not get its turn."""
    real: dict = {}

    def measure(self, cell, limit, say):
        if not real:
            real.update(original(self, cell, limit, say))
        if (cell.length, cell.attention) == (96, "eager"):
            return {"out_of_memory": "CUDA out of memory. Tried", "stage": "measuring"}
        if (cell.length, cell.attention) == (96, "sdpa"):
            return {"not_reached": "in the time given"}
        return real

    original = workers.Workers.measure
    monkeypatch.setattr(workers.Workers, "measure", measure)
    found = CliRunner().invoke(
        app, ["train-step", "--device", "cpu", "--layers", "1", "--lengths", "48,96",
              "--repeats", "1", "--out", str(tmp_path)],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert real["losses"]
    record = json.loads((tmp_path / "train-step.json").read_text())
    assert len(record["cells"]) == 8
    assert record["cells"][0]["attention"] == "relampago"
    assert (tmp_path / "train-step.png").read_bytes().startswith(b"\x89PNG")
    for words in ("out of memory: while measuring", "not reached", "~", "speed of sdpa"):
        assert words in found.output


def test_a_process_that_dies_or_lingers_is_reported(monkeypatch) -> None:
    dead = ("python3", "-c", "import sys; sys.exit('no such luck')")
    monkeypatch.setattr(workers, "COMMAND", dead)
    with workers.Workers(ahead=True) as some:
        assert some.measure(TINY, 60, print) == {"failed": "exit 1: no such luck"}
    slow = ("python3", "-c", 'import time; print(\'{"stage": "s"}\', flush=True); time.sleep(60)')
    monkeypatch.setattr(workers, "COMMAND", slow)
    with workers.Workers(ahead=False) as some:
        assert some.measure(TINY, 0.5, print) == {"stopped": "after 0 s"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--lengths", "2k,many"), "'many'"),
        (("--model", "llama-70b"), "'llama-70b'"),
        (("--attention", "flash"), "'flash'"),
        (("--checkpoint", "some"), "'some'"),
        (("--checkpoint", "full,most"), "'full,most'"),
        (("--device", "abacus"), "'abacus'"),
    ],
)
def test_refuses(arguments: tuple[str, ...], said: str) -> None:
    found = CliRunner().invoke(app, ["train-step", *arguments])
    assert found.exit_code == 2
    assert said in found.stderr


def test_lengths() -> None:
    assert train_step.parse_lengths("2k,512,2048") == [512, 2048]
    with pytest.raises(InvalidInput, match="counts of tokens"):
        train_step.parse_lengths("0")
