"""Warm calls: the short way gives what the op gives, and is not taken where someone would miss the op."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import relampago as rl
from relampago import warm


@pytest.fixture
def taken(monkeypatch):
    """How often a call has gone the short way."""
    counts = {"first": 0, "again": 0}
    first, run = warm.first, warm._run

    def counted_first(*args):
        counts["first"] += 1
        counts["again"] -= 1
        return first(*args)

    def counted_run(*args):
        counts["again"] += 1
        return run(*args)

    monkeypatch.setattr(warm, "_known", {})
    monkeypatch.setattr(warm, "first", counted_first)
    monkeypatch.setattr(warm, "_run", counted_run)
    return counts


def make(length: int = 20, heads: int = 4, dim: int = 16) -> list[torch.Tensor]:
    return [torch.randn(2, length, heads, dim) for _ in range(3)]


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window": (5, 0), "softcap": 3.0},
    {"scale": 0.3, "sinks": torch.randn(4)},
    {"mask": rl.Causal()},  # goes the op's way
    {"causal": True, "backend": "reference"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_same_result_as_the_op(taken, options) -> None:
    q, k, v = make()
    for _ in range(3):
        out, lse = rl.attention(q, k, v, **options, return_lse=True)
        with FlopCounterMode(display=False):
            want, want_lse = rl.attention(q, k, v, **options, return_lse=True)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    assert taken == ({"first": 0, "again": 0} if "mask" in options else {"first": 1, "again": 2})


def test_other_shapes_strides_options_and_states_are_other_calls(taken) -> None:
    q, k, v = make()
    rl.attention(q, k, v)
    rl.attention(q, k, v, causal=True)
    rl.attention(q, k, v, deterministic=True)
    rl.attention(q[:, :7], k, v)
    rl.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    rl.attention(q.double(), k.double(), v.double())
    with rl.using(backend="reference"):
        rl.attention(q, k, v)
    assert taken == {"first": 7, "again": 0}


def test_bad_input_is_refused_after_a_like_call(taken) -> None:
    q, k, v = make()
    rl.attention(q, k, v)
    with pytest.raises(rl.InvalidInput):
        rl.attention(q, k[:, :5], v)
    with pytest.raises(rl.InvalidInput):
        rl.attention(q, k, v.double())
    with pytest.raises(rl.InvalidInput):
        rl.attention(q, k, v, window=[3])


def test_gradients_and_those_who_watch_ops_go_the_ops_way(taken) -> None:
    q, k, v = make()
    rl.attention(q, k, v)
    leaf = q.clone().requires_grad_()
    rl.attention(leaf, k, v).sum().backward()
    assert leaf.grad is not None
    with FlopCounterMode(display=False) as counter:
        rl.attention(q, k, v)
    assert counter.get_total_flops() > 0
    torch.func.vmap(lambda x: rl.attention(x, x, x))(torch.randn(3, *q.shape))
    torch.func.grad(lambda x: rl.attention(x, k, v).sum())(q)
    with torch.profiler.profile() as profile:
        rl.attention(q, k, v)
    assert any("relampago::forward" in event.key for event in profile.key_averages())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rl.attention(q, k, v).dtype == torch.bfloat16
    assert taken == {"first": 1, "again": 0}
    with torch.no_grad():
        rl.attention(leaf, k, v)
    assert taken == {"first": 1, "again": 1}


def test_what_is_kept_is_bounded_and_holds_no_tensor(taken, monkeypatch) -> None:
    monkeypatch.setattr(warm, "MOST", 3)
    for length in range(1, 9):
        rl.attention(*make(length))
    assert len(warm._known) <= 3
    for known in warm._known.values():
        assert not any(isinstance(x, torch.Tensor) for x in known.fields.values())
