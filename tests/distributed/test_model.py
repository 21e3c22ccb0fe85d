"""The performance model: what follows from the formulas when links are free, the choice of auto, the command line."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from relampago.cli import app
from relampago.cli.report import tables
from relampago.cli.report.results import load
from relampago.distributed.cost import Sizes, sent
from relampago.distributed.exchange import Scores
from relampago.distributed.model import MACHINES, Shape, plans, rank_strategies
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.sight import Sight
from relampago.errors import InvalidInput

SHAPE = Shape(32, 8, 128, 128)
FREE = MACHINES["h200"]._replace(
    memory_rate=1e30, fast=1e30, slow=1e30, latency=0.0, launch=0.0, name="free links"
)


def modelled(strategy, size, length, machine=FREE, layout="zigzag", **sees):
    plan = ContextParallelPlan(size, length, strategy=strategy, layout=layout)
    sight = Sight.of(length, **sees)
    found = rank_strategies(plan.tokens, plan.shape, SHAPE, sight, machine, 1)
    return {e.strategy: e for e in found}[strategy]


@pytest.mark.parametrize("size", [2, 8])
def test_with_free_links_only_balance_counts(size) -> None:
    length = size * 8192
    for strategy in ("ring", "allgather", "ulysses"):
        even = modelled(strategy, size, length, causal=True)
        assert even.efficiency == pytest.approx((1, 1), abs=0.02)
    skewed = modelled("ring", size, length, causal=True, layout="contiguous")
    assert skewed.efficiency[0] == pytest.approx(size / (2 * size - 1), rel=0.02)


MEASURED = load("h200/ring-one-gpu.json")
APART = 0.07  # one and the same call, both ways, takes 219.7 to 225.8 ms on 64k tokens in that file
CARD = MACHINES["h200"]._replace(fast=1e30, slow=1e30, latency=0.0, name="an H200 without links")


RINGS = [row for row in MEASURED["rows"] if row["strategy"] == "ring" and row["tokens"] >= 65536]


@pytest.mark.parametrize("row", RINGS, ids=lambda row: f"{row['ranks']} ranks, {row['tokens']}")
def test_the_model_says_what_one_card_measured(row) -> None:
    """One call on the whole, and the steps of all virtual ranks together: computing, no links, both ways."""
    for ranks, measured in (
        (1, sum(row["one_ms"].values())),
        (row["ranks"], row["sum"]["forward_ms"] + row["sum"]["backward_ms"]),
    ):
        found = modelled("ring", ranks, row["tokens"], machine=CARD, causal=True)
        said = (found.forward + found.backward) * 1e3 * ranks
        assert said == pytest.approx(measured, rel=APART), ranks


def test_the_machine_is_the_measured_one() -> None:
    """Rates of the long causal shape in the sweeps, each of another day and with 16 heads on 16; memory."""
    forward = tables.of_first_run(128, 128, True, 1, 32768)["ours"]
    plan = tables.BACKWARD[128, 1][-1]
    backward = tables.backward_rates(tables.BACKWARD_RUNS[0])[128, 1, 1, 32768, plan]
    machine = MACHINES["h200"]
    assert machine.forward / 1e12 == pytest.approx(forward, rel=0.1)
    assert machine.backward / 1e12 == pytest.approx(backward, rel=0.1)
    (gpu,) = load("h200/train-step.json")["machine"]["gpus"]
    assert machine.memory == pytest.approx(gpu["memory"], rel=1e-3)


def test_bytes_and_calls_are_those_of_the_plan() -> None:
    plan = ContextParallelPlan(4, 512, strategy="ring")
    q, k = (torch.empty(1, 512, h, 128, device="meta") for h in (32, 8))
    sight = Sight.of(512, causal=True)
    course = plan.course(q, k, k, sight, Scores(), whole=True)
    e = modelled("ring", 4, 512, machine=MACHINES["h200"], causal=True)
    found = [sent(course, r, Sizes(1, 128, 128, 2)) for r in range(4)]
    assert (e.forward_calls, e.forward_bytes) == (found[0][0], max(b for _, b in found))
    # modelled on fewer tokens, bytes are the same multiple
    large = modelled("ring", 4, 512 * 64, machine=MACHINES["h200"], causal=True)
    assert large.forward_bytes == 64 * e.forward_bytes


def test_slow_links_favour_what_hides_or_saves_bytes() -> None:
    """Known regimes: long sequences hide rings; windows want halos; few tokens on slow links want fewer bytes."""
    assert modelled("ring", 8, 1 << 20, machine=MACHINES["h200"], causal=True).efficiency[1] > 0.97
    best = plans(
        8,
        1 << 17,
        SHAPE,
        Sight.of(1 << 17, causal=True, window=(1023, 0)),
        MACHINES["h200"],
        1,
        "zigzag",
    )
    assert best[0].strategy == "halo"
    slow = MACHINES["h200"]._replace(node=1)
    short = plans(8, 8192, SHAPE, Sight.of(8192, causal=True), slow, 1, "zigzag")
    assert short[0].forward_bytes == min(e.forward_bytes for e in short)


def test_what_does_not_fit_comes_last() -> None:
    small = MACHINES["h200"]._replace(memory=1.5e9)
    found = plans(64, 1 << 20, SHAPE, Sight.of(1 << 20, causal=True), small, 8, "contiguous")
    fits = [e.fits for e in found]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]


def test_auto_says_why() -> None:
    plan = ContextParallelPlan(8, 1 << 17, machine="h200")
    text = plan.explain(32, 8, 128, causal=True, window=(1023, 0))
    assert text.startswith("halo: fastest in the model of h200")
    assert "allgather" in text
    assert "ring" in text
    assert plan.choose(32, 8, 128, 2, Sight.of(1 << 17, causal=True, window=(1023, 0))) == "halo"
    assert (
        ContextParallelPlan(8, 64, strategy="ring").explain(8, 8, 16).startswith("ring: asked for")
    )
    assert ContextParallelPlan((2, 2), 64).choose(4, 2, 8, 2, Sight.of(64)) == "usp"
    with pytest.raises(InvalidInput, match="machine is 'abacus'"):
        ContextParallelPlan(8, 64, machine="abacus").explain(8, 8, 16)


def test_command_line() -> None:
    run = CliRunner().invoke(app, ["plan", "--seq", "16384", "--gpus", "4"])
    assert run.exit_code == 0, run.output
    for word in ("ring", "allgather", "ulysses", "usp 2×2", "projected", "not measured"):
        assert word in run.output
    for wrong, words in (
        (["--machine", "abacus"], "machine is 'abacus'"),
        (["--kv-heads", "5"], "kv_heads is 5"),
        (["--gpus", "0"], "gpus is 0"),
    ):
        run = CliRunner().invoke(app, ["plan", "--seq", "64", *wrong])
        assert run.exit_code == 2
        assert words in run.output
