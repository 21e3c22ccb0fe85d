"""The kernels of statistics, max logits and argument gradients compile for real architectures, with no GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from relampago.api import Options, prepare
from relampago.cases import Case, find
from relampago.mods import alibi, relative_bias
from relampago.op import arrays_of
from relampago.plan import Plan
from relampago.problem import Saved, Wanted

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder
from crosscompile.sample import pinned

from relampago.backends.triton import argument_gradients, backward, forward, statistics

PLAN = Plan(block_q=64, block_k=64, warps=4, stages=2)
LONG = Case(
    name="causal", batch=1, len_q=512, len_k=512, heads=4, dim=128, options={"causal": True}
)
ARCHS = ("sm90", pinned("gfx942"))


def arrays(case: Case):
    tensors, options = case.make(torch.bfloat16)
    return arrays_of(prepare(*tensors, Options(**options)))


def recorded(monkeypatch: pytest.MonkeyPatch, arch: str, only: str | None = None) -> list[Built]:
    recorder = Recorder(arch, only)
    for module in (forward, backward, statistics, argument_gradients):
        monkeypatch.setattr(module, "launch", recorder)
    return recorder.built


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "case", [LONG, find("user-mod"), find("block-sparse")], ids=lambda c: c.name
)
def test_statistics(case: Case, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = recorded(monkeypatch, arch)
    x = arrays(case)
    lse = statistics.row_statistics(x, PLAN, 64).lse
    statistics.column_sums(replace(x, shard=True), PLAN, lse, 64)
    assert [b.name for b in built] == ["describe", "receive"]
    if case is LONG:
        assert all(b.spills <= 64 for b in built)


@pytest.mark.parametrize("arch", ARCHS)
def test_max_logits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost the forward neither shared memory nor a register that spills."""
    built = recorded(monkeypatch, arch)
    x = arrays(LONG)
    forward.forward(x, PLAN)
    forward.forward(replace(x, max_logits=torch.full((1, 4), -torch.inf)), PLAN)
    plain, more = built
    assert (plain.shared, plain.spills) == (more.shared, more.spills)


@pytest.mark.parametrize("arch", ARCHS)
def test_argument_gradients(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = recorded(monkeypatch, arch, "by_argument")
    places = torch.arange(512) // 3
    mods = (
        alibi(torch.rand(4)),
        relative_bias(torch.randn(4, 41)),
        relative_bias(torch.randn(9), places),
    )
    x = arrays(replace(LONG, options={"causal": True, "score_mod": mods}))
    saved = Saved(torch.zeros_like(x.q), torch.zeros(1, 4, 512))
    wanted = Wanted(mod_args=(True, True, True, False))
    backward.backward(x, PLAN, PLAN, saved, saved.out, None, wanted, False)
    assert len(built) == 3
