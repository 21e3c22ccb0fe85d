"""Warm calls on a real device: what is launched the short way gives the bits of Triton's own launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import relampago as rl
from relampago import tape, warm
from relampago.cache import CacheView


@pytest.fixture
def played(monkeypatch) -> list[bool]:
    """Whether each call that could be played was; nothing is known of calls yet."""
    found: list[bool] = []
    play = tape.Played.__call__

    def noted(self, given):
        results = play(self, given)
        found.append(results is not None)
        return results

    monkeypatch.setattr(warm, "_known", {})
    monkeypatch.setattr(tape, "_known", {})
    monkeypatch.setattr(tape.Played, "__call__", noted)
    return found


def draw(length=64, heads=4, kv_heads=4, keys=None, dim=64) -> list[Tensor]:
    shapes = [(1, length, heads, dim), *[(1, keys or length, kv_heads, dim)] * 2]
    return [torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in shapes]


def packed(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    cu = torch.tensor([0, 20, 64], dtype=torch.int32, device="cuda")
    return rl.attention_varlen(q[0], k[0], v[0], cu, cu, 44, 44, return_lse=True, **options)


def gradients(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = rl.attention(*leaves, return_lse=True, deterministic=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def from_cache(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    lengths = torch.full((1,), k.shape[1] - 5, dtype=torch.int32, device="cuda")
    return rl.attention_decode(q, CacheView(k, v, lengths), return_lse=True, **options)


def from_pages(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    lengths = torch.full((1,), k.shape[1] - 5, dtype=torch.int32, device="cuda")
    table = torch.arange(k.shape[1] // 64, dtype=torch.int32, device="cuda").flip(0)[None]
    view = CacheView(*(t.view(-1, 64, *t.shape[2:]) for t in (k, v)), lengths, table)
    return rl.attention_decode(q, view, return_lse=True, **options)


def plain(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    return rl.attention(q, k, v, return_lse=True, **options)


FEW = {"length": 1, "heads": 8, "kv_heads": 2, "keys": 4096}
CALLS = {
    "plain": (plain, {}),
    "dim 128": (plain, {"dim": 128}),
    "packed": (packed, {}),
    "gradients": (gradients, {}),
    "one query": (plain, FEW),
    "cache": (from_cache, FEW),
    "pages": (from_pages, FEW),
}


DECODED = ("one query", "cache", "pages")  # what gluon_sm90 leaves to Triton
PAIRS = [("triton", name) for name in CALLS] + [
    ("gluon_sm90", n) for n in CALLS if n not in DECODED
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def need(backend: str) -> None:
    if backend == "gluon_sm90" and not HOPPER:
        pytest.skip("needs Hopper")


def launch_by_triton(monkeypatch) -> None:
    """Nothing is played from now on."""
    monkeypatch.setattr(tape.Like, "__call__", lambda self, given, anew: anew(given))


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_played_results_are_those_of_tritons_launches(played, monkeypatch, backend, name) -> None:
    need(backend)
    call, sizes = CALLS[name]
    options = {"causal": True, "backend": backend}
    given = [draw(**sizes) for _ in range(4)]
    got = [call(*tensors, **options) for tensors in given]
    assert played == [True] * (4 if name == "gradients" else 2)  # a backward is a call of its own
    assert not any(like.why_not for like in tape._known.values())
    launch_by_triton(monkeypatch)
    for tensors, found in zip(given, got, strict=True):
        for a, b in zip(call(*tensors, **options), found, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["gluon_sm90", "triton"])
def test_a_played_call_in_a_graph_and_on_another_stream(played, backend) -> None:
    need(backend)
    q, k, v = draw(length=512)
    want = rl.attention(q, k, v, causal=True, backend=backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            assert torch.equal(rl.attention(q, k, v, causal=True, backend=backend), want)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rl.attention(q, k, v, causal=True, backend=backend)
    assert all(played)
    assert len(played) >= 3
    other = draw(length=512)
    for mine, theirs in zip((q, k, v), other, strict=True):
        mine.copy_(theirs)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, rl.attention(*other, causal=True, backend=backend))


def test_maps_follow_memory_that_is_used_again(played, monkeypatch) -> None:
    """A map is kept by its address: another tensor there has the same shape, or another call."""
    for _ in range(12):
        given = draw(length=256)
        wide = [torch.cat([t, t], 1)[:, ::2] for t in given]
        for tensors in (given, wide):
            got = rl.attention(*tensors, causal=True, backend="triton")
            with monkeypatch.context() as here:
                launch_by_triton(here)
                assert torch.equal(got, rl.attention(*tensors, causal=True, backend="triton"))
        del given, wide, tensors, got
    assert all(played)
    assert len(played) >= 20
