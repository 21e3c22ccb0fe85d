"""Warm calls: the short way gives what the op gives, and is not taken where someone would miss the op."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.flop_counter import FlopCounterMode

import relampago as rl
from relampago import warm
from relampago.cache import KVCache, PagedKVCache


@pytest.fixture
def taken(monkeypatch):
    """How often a call has gone the short way."""
    counts = {"first": 0, "again": 0}

    class Counted(warm.Known):
        __slots__ = ()

        def __init__(self, *args):
            super().__init__(*args)
            counts["first"] += 1
            counts["again"] -= 1

        def __call__(self, given):
            counts["again"] += 1
            return super().__call__(given)

    monkeypatch.setattr(warm, "_known", {})
    monkeypatch.setattr(warm, "Known", Counted)
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


def test_true_is_not_one_and_a_list_is_no_number(taken) -> None:
    """Python calls True and 1 equal, and 5.0 and 5; validation does not."""
    q, k, v = make()
    rl.attention(q, k, v, window=(1, 0))
    for window in ((True, 0), (1.0, 0)):
        with pytest.raises(rl.InvalidInput, match="window has left"):
            rl.attention(q, k, v, window=window)
    with pytest.raises(rl.InvalidInput, match="scale is"):
        rl.attention(q, k, v, scale=[1.0])
    rl.attention(q, k, v)
    with pytest.raises(rl.InvalidInput, match="dropout_p is"):
        rl.attention(q, k, v, dropout_p=torch.tensor(0.0))


CACHES = {
    "room": lambda: KVCache(2, 24, 2, 16, dtype=torch.float32),
    "pages": lambda: PagedKVCache(2, 9, 4, 2, 16, dtype=torch.float32),
    "FP8": lambda: KVCache(
        2, 24, 2, 16, dtype=torch.float8_e4m3fn, k_scale=torch.ones(2), v_scale=torch.ones(2)
    ),
}


def step(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 1, heads, 16).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "options", [{}, {"window": (3, 0), "softcap": 2.0}, {"sinks": torch.randn(4)}]
)
def test_decoding_gives_what_the_op_gives(taken, kind, options) -> None:
    cache, other = CACHES[kind](), CACHES[kind]()
    for _ in range(3):
        q, k, v = step()
        out, lse = rl.attention_decode(q, cache, k, v, return_lse=True, **options)
        with FlopCounterMode(display=False):
            want, want_lse = rl.attention_decode(q, other, k, v, return_lse=True, **options)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    assert taken == {"first": 1, "again": 2}
    leaf = q.clone().requires_grad_()
    assert not rl.attention_decode(leaf, cache, **options).requires_grad


BAD_STEPS = {
    "k_new alone": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k),
        "v_new is given without",
    ),
    "heads": (
        lambda q, k, v, cache: rl.attention_decode(q[:, :, :3], cache, k, v),
        "does not divide",
    ),
    "batch": (
        lambda q, k, v, cache: rl.attention_decode(q[:1], cache, k, v),
        "cache holds 2 sequences",
    ),
    "dtype": (lambda q, k, v, cache: rl.attention_decode(q.half(), cache, k, v), "k has dtype"),
    "dropout": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, dropout_p=0.0),
        "options hold",
    ),
    "deterministic": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, deterministic=None),
        "options hold",
    ),
    "scales": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, k_descale=None),
        "options hold",
    ),
    "cu alone": (
        lambda q, k, v, cache: rl.attention_decode(
            q, cache, k, v, cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32)
        ),
        "max_seqlen_q is given without",
    ),
    "max alone": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, max_seqlen_q=1),
        "max_seqlen_q is given",
    ),
    "cache": (lambda q, k, v, cache: rl.attention_decode(q, None, k, v), "cache is a NoneType"),
    "window": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, window=(True, None)),
        "window has left",
    ),
    "sinks": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, sinks=torch.randn(3)),
        "sinks has shape",
    ),
    "unknown": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, heads=4),
        "unexpected keyword",
    ),
    "the backend": (
        lambda q, k, v, cache: rl.attention_decode(q, cache, k, v, backend="gluon_sm90"),
        "gluon_sm90",
    ),
    "new keys": (lambda q, k, v, cache: rl.attention_decode(q, cache, k.half(), v), "k is"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_of_decoding_is_refused_after_a_like_one(taken, name) -> None:
    """What is known of good calls hides no error, and nothing is appended."""
    cache, (call, message) = CACHES["room"](), BAD_STEPS[name]
    q, k, v = step()
    for options in ({}, {"window": (1, None)}):
        rl.attention_decode(q, cache, k, v, **options)
        rl.attention_decode(q, cache, **options)
    with pytest.raises((rl.InvalidInput, rl.Unsupported, TypeError), match=message):
        call(q, k, v, cache)
    assert cache.lengths.tolist() == [2, 2]
    assert taken["first"] == 4


def test_a_full_cache_is_found_in_a_warm_call(taken) -> None:
    cache, (q, k, v) = KVCache(2, 3, 2, 16, dtype=torch.float32), step()
    for _ in range(3):
        rl.attention_decode(q, cache, k, v)
    with pytest.raises(rl.InvalidInput, match="the room is 3"):
        rl.attention_decode(q, cache, k, v)
    assert taken == {"first": 1, "again": 2}


def test_those_who_watch_ops_see_them(taken) -> None:
    q, k, v = make()
    rl.attention(q, k, v)
    leaf = q.clone().requires_grad_()
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


def test_who_watches_the_backward_alone_sees_its_op(taken) -> None:
    q, k, v = make()
    leaf = q.clone().requires_grad_()
    out = rl.attention(leaf, k, v)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() > 0
    assert taken["first"] == 1


WITH_GRADIENT = [
    {},
    {"causal": True, "window": (5, 0), "softcap": 3.0},
    {"sinks": torch.randn(4, dtype=torch.float64)},
    {"deterministic": True},
]


@pytest.mark.parametrize("options", WITH_GRADIENT, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("uses", ["out", "lse", "both"])
def test_gradients_are_those_of_the_op(taken, options, uses) -> None:
    """First and second ones, of some inputs or all."""
    given = [t.double() for t in make()] + [options[n] for n in ("sinks",) if n in options]

    def gradients(wanted: int, watch: bool) -> list[torch.Tensor | None]:
        leaves = [t.clone().requires_grad_(at < wanted) for at, t in enumerate(given)]
        more = {"sinks": leaves[3]} if len(leaves) > 3 else {}
        with FlopCounterMode(display=False) if watch else contextlib.nullcontext():
            out, lse = rl.attention(*leaves[:3], **{**options, **more}, return_lse=True)
            parts = {"out": [out.cos()], "lse": [lse.sin()], "both": [out.cos(), lse.sin()]}[uses]
            total = sum(part.sum() for part in parts)
            leaves = leaves[:wanted]
            kind = {"create_graph": True, "allow_unused": True}
            first = torch.autograd.grad(total, leaves, **kind)
            again = sum(g.square().sum() for g in first if g is not None)
            return [*first, *torch.autograd.grad(again, leaves, allow_unused=True)]

    for wanted in (1, len(given)):
        for short, long in zip(gradients(wanted, False), gradients(wanted, True), strict=True):
            assert (short is None) == (long is None)
            assert short is None or torch.equal(short, long)
    assert taken["first"] == 1
    assert taken["again"] == 1


def test_batched_gradients_are_refused_as_by_the_op(taken) -> None:
    """`is_grads_batched` hands tensors without memory to a backward, and tells nobody."""
    leaf = make()[0].requires_grad_()
    out = rl.attention(leaf, leaf, leaf)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for relampago::backward"):
        torch.autograd.grad(out, leaf, torch.randn(3, *out.shape), is_grads_batched=True)


def test_gradient_without_a_graph_is_that_of_the_op(taken) -> None:
    q, k, v = make()
    found = []
    for watch in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with FlopCounterMode(display=False) if watch else contextlib.nullcontext():
            rl.attention(*leaves, causal=True).square().sum().backward()
        found.append([t.grad for t in leaves])
    assert taken["first"] == 1
    for short, long in zip(*found, strict=True):
        assert torch.equal(short, long)


def test_checkpoint_recomputes_the_short_way_too(taken) -> None:
    q, k, v = make()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(rl.attention(*leaves).square().sum(), leaves)
    out = torch.utils.checkpoint.checkpoint(rl.attention, *leaves, use_reentrant=False)
    for got, expected in zip(torch.autograd.grad(out.square().sum(), leaves), want, strict=True):
        assert torch.equal(got, expected)
    assert taken == {"first": 1, "again": 2}


def test_an_input_changed_in_place_before_the_backward_is_found(taken) -> None:
    q, k, v = make()
    leaf = q.clone().requires_grad_()
    out = rl.attention(leaf, k, v)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_kept_is_bounded_and_holds_no_tensor(taken, monkeypatch) -> None:
    monkeypatch.setattr(warm, "MOST", 3)
    for length in range(1, 9):
        rl.attention(*make(length))
    assert len(warm._known) <= 3
    for known in warm._known.values():
        assert not any(isinstance(x, torch.Tensor) for x in (*known.arrays.values(), *known.call))
