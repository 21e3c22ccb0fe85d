"""A warm call launches what a cold one does, to the byte, at other addresses: on a libcuda that is not there.

`pretended_cuda` is the stand-in; Triton's compiler, binder, launchers and TMA's descriptors are the real ones.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import types
import weakref
from typing import Any

import pretended_cuda as cuda
import pytest
import torch
from torch import Tensor
from triton import knobs

import relampago as rl
from relampago import start, tape, warm
from relampago.backends.gluon import launch as gluon_launch
from relampago.cache import CacheView
from relampago.shards import Rows

pytestmark = [
    pytest.mark.skipif(cuda.COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real libcuda"),
]


@pytest.fixture
def card(monkeypatch):
    """The device that is not there; nothing is known of calls yet."""
    monkeypatch.setattr(warm, "_known", {})
    monkeypatch.setattr(tape, "_known", {})
    with cuda.pretended() as made:
        yield made


@pytest.fixture
def played(monkeypatch) -> list[bool]:
    """Whether each call that could be played was."""
    found: list[bool] = []
    play = tape.Played.__call__

    def noted(self, given):
        results = play(self, given)
        found.append(results is not None)
        return results

    monkeypatch.setattr(tape.Played, "__call__", noted)
    return found


@contextlib.contextmanager
def cold():
    """Inside, no call is like another."""
    call = tape.Like.__call__
    tape.Like.__call__ = lambda self, given, anew: anew(given)
    try:
        yield
    finally:
        tape.Like.__call__ = call


def draw(
    length: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    keys: int | None = None,
    batch: int = 1,
):
    shapes = [(batch, length, heads, 64), *[(batch, keys or length, kv_heads or heads, 64)] * 2]
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def run(call: Any, given: list[Tensor]) -> tuple[list[cuda.Launch], list[Tensor]]:
    """What a call launches, and its results."""
    with cuda.written() as launches:
        found = call(*given)
    return launches, [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]


def number(parameter: bytes) -> int:
    return int.from_bytes(parameter[:8], "little")


def assert_alike(
    a: list[cuda.Launch], b: list[cuda.Launch], before: list[Tensor], after: list[Tensor]
) -> None:
    """Equal but for addresses, which move as these tensors do; those of memory in between move together."""
    moves = {x.data_ptr(): y.data_ptr() for x, y in zip(before, after, strict=True)}
    assert a
    assert len(a) == len(b)
    for one, two in zip(a, b, strict=True):
        assert one[:-1] == two[:-1]
        assert len(one.parameters) == len(two.parameters)
        for x, y in zip(one.parameters, two.parameters, strict=True):
            assert len(x) == len(y)
            assert x[8:] == y[8:]
            if number(x) != number(y) or number(x) in moves:
                assert len(x) >= 8
                assert number(x) % 16 == number(y) % 16 == 0 or number(x) in moves
                assert moves.setdefault(number(x), number(y)) == number(y)


def forward(**options: Any):
    return lambda q, k, v: rl.attention(q, k, v, return_lse=True, **options)


def gradients(**options: Any):
    def call(q, k, v, dout):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = rl.attention(*leaves, return_lse=True, **options)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    return call


def packed(**options: Any):
    cu = torch.tensor([0, 20, 64], dtype=torch.int32)

    def call(q, k, v):
        return rl.attention_varlen(q[0], k[0], v[0], cu, cu, 44, 44, return_lse=True, **options)

    return call


def shards(q, k, v):
    out, lse = torch.zeros(1, 64, 4, 64), torch.zeros(1, 4, 64)
    return rl.partial(q, k, v, into=(out, lse), causal=True, backend="triton")


def cached(**options: Any):
    def call(q, k, v):
        lengths = torch.full((1,), k.shape[1], dtype=torch.int32)
        return rl.attention_decode(q, CacheView(k, v, lengths), return_lse=True, **options)

    return call


def paged(q, k, v):
    k, v = (t.view(-1, 64, *t.shape[2:]) for t in (k, v))
    table = torch.arange(k.shape[0], dtype=torch.int32)[None]
    lengths = torch.full((1,), 64 * k.shape[0], dtype=torch.int32)
    return rl.attention_decode(q, CacheView(k, v, lengths, table), return_lse=True)


def in_fp8(q, k, v):
    lengths, scale = torch.full((1,), k.shape[1], dtype=torch.int32), torch.ones(k.shape[2])
    view = CacheView(*(t.to(torch.float8_e4m3fn) for t in (k, v)), lengths, None, scale, scale)
    return rl.attention_decode(q, view, return_lse=True)


def packed_steps(q, k, v):
    cu, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [k.shape[1]]))
    more = {"cu_seqlens_q": cu, "max_seqlen_q": 1}
    return rl.attention_decode(q[0], CacheView(k, v, lengths), return_lse=True, **more)


STEP = {"length": 1, "heads": 8, "kv_heads": 2, "keys": 4096}


def added(q, k, v, dout):
    sums = torch.zeros(1, 64, 4, 64), torch.zeros(1, 64, 4, 64), torch.zeros(1, 64, 4, 64)
    lse = torch.zeros(1, 4, 64)
    return rl.partial_backward(dout, q, k, v, dout, lse, into=sums, causal=True, backend="triton")


def held(q, k, v, dout):
    rows = Rows(dout, q, k, v, dout, torch.zeros(1, 4, 64), backend="gluon_sm90")
    return *rows.add(slice(0, 64), k, v, causal=True), rows.finish()


CALLS = {
    "gluon": (forward(causal=True, backend="gluon_sm90"), {}),
    "gluon-packed": (packed(causal=True, backend="gluon_sm90"), {}),
    "gluon-split": (forward(backend="gluon_sm90"), {"length": 16, "keys": 4096}),
    "gluon-gradients": (gradients(causal=True, backend="gluon_sm90"), {"dout": True}),
    "triton": (forward(causal=True, backend="triton"), {}),
    "triton-mask": (forward(mask=rl.Causal(), softcap=5.0, backend="triton"), {}),  # by the op
    "triton-gradients": (gradients(causal=True, backend="triton"), {"dout": True}),
    "triton-into": (shards, {}),
    "triton-added": (added, {"dout": True}),
    "gluon-held": (held, {"dout": True}),
    "decode": (forward(), STEP),
    "cache": (cached(window=(300, 0), sinks=torch.zeros(8)), STEP),
    "cache-pages": (paged, STEP),
    "cache-fp8": (in_fp8, STEP),
    "cache-packed": (packed_steps, STEP),
}


NEWEST = ("gluon", "triton-gradients", "decode")  # that are also launched by the newest Triton


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in NEWEST else pytest.mark.pinned) for n in CALLS]
)
def test_a_warm_call_launches_what_a_cold_one_does(card, played, name) -> None:
    call, sizes = CALLS[name]
    sizes = dict(sizes)
    more = [torch.randn(1, 64, 4, 64, dtype=torch.bfloat16)] if sizes.pop("dout", False) else []
    given = [draw(**sizes) + [t.clone() for t in more] for _ in range(4)]
    runs = [run(call, tensors) for tensors in given]
    assert played
    assert all(played)
    assert all(like.why_not == "" for like in [*tape._known.values()])
    card.stream = 7
    runs.append(run(call, given[0]))
    first, results = runs[0]
    for (launches, found), tensors in zip(runs[1:4], given[1:], strict=True):
        assert [(t.shape, t.dtype, t.stride()) for t in found] == [
            (t.shape, t.dtype, t.stride()) for t in results
        ]
        assert_alike(first, launches, given[0] + results, tensors + found)
    streams = [launch.stream for launch in runs[4][0]]
    assert streams == [7] * len(first)


def unaligned(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


CHANGED = {
    "k's address": (lambda q, k, v: (q, unaligned(k), v), True),
    "strides": (lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v), False),
    "steps of 16 bytes": (lambda q, k, v: (q, torch.cat([k, k[..., :8]], -1)[..., :-8], v), True),
    "an odd stride": (
        lambda q, k, v: (q, torch.cat([k, k[..., :1]], -1)[..., :-1], v),
        False,
    ),  # a copy
    "a length of 1": (lambda q, k, v: (q, k[:, :1], v[:, :1]), True),
    "dtype": (lambda q, k, v: (q.half(), k.half(), v.half()), True),
}


@pytest.mark.pinned
@pytest.mark.parametrize("name", CHANGED)
def test_what_triton_compiles_apart_is_another_call(card, played, name) -> None:
    change, apart = CHANGED[name]
    call, base = forward(causal=True, backend="triton"), draw()
    for _ in range(3):
        launches, _ = run(call, base)
    other = list(change(*draw()))
    for _ in range(3):
        warm_launches, warm_results = run(call, other)
    assert played == [True, True]
    with cold():
        cold_launches, cold_results = run(call, other)
    assert_alike(cold_launches, warm_launches, other + cold_results, other + warm_results)
    assert (launches[0].function != warm_launches[0].function) == apart


def test_keys_that_are_the_values_are_two_tensors_the_next_time(card, played) -> None:
    call = forward(causal=True, backend="triton")
    q, k, v = draw()
    for _ in range(3):
        run(call, [q, k, k])
    again, found = run(call, [q, k, v])
    assert played == [True, True]
    with cold():
        want, results = run(call, [q, k, v])
    assert_alike(want, again, [q, k, v, *results], [q, k, v, *found])
    assert_alike(again, want, [q, k, v, *found], [q, k, v, *results])


@pytest.mark.pinned
def test_saved_tensors_that_come_back_otherwise_are_another_call(card, played) -> None:
    """`saved_tensors_hooks` may give a backward other strides than the forward had."""
    call = gradients(causal=True, backend="triton")
    given = [[*draw(), torch.randn(1, 64, 4, 64, dtype=torch.bfloat16)] for _ in range(2)]
    for _ in range(3):
        run(call, given[0])
    played.clear()

    def turned(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
        for _ in range(3):
            found, results = run(call, given[1])
        with cold():
            want, cold_results = run(call, given[1])
    assert played == [True, True, True, True]  # three forwards, and the third backward
    assert_alike(want, found, given[1] + cold_results, given[1] + results)


def warmed(backend: str = "triton"):
    call, given = forward(causal=True, backend=backend), draw()
    runs = [run(call, given) for _ in range(3)]
    return lambda: run(call, given), runs[0], given


def test_with_a_hook_a_launch_goes_tritons_way(card, played) -> None:
    call, (first, results), given = warmed()
    entered, left, before = [], [], []
    runtime = knobs.runtime
    for chain, seen in ((runtime.launch_enter_hook, entered), (runtime.launch_exit_hook, left)):
        chain.add(seen.append)
        try:
            launches, found = call()
        finally:
            chain.remove(seen.append)
        assert len(seen) == 1
        assert_alike(first, launches, given + results, given + found)
    (known,) = warm._known.values()
    hooks = known.like.played.steps[-1].hooks
    hooks.append(lambda *args, **kwargs: before.append(args))
    try:
        call()
    finally:
        hooks.clear()
    assert len(before) == 1
    assert played == [True, False, False, False]
    call()
    assert played[-1]


def test_calls_with_a_hook_are_written_down_after_it(card, played) -> None:
    call, given, seen = forward(causal=True, backend="triton"), draw(), []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        for _ in range(5):
            run(call, given)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 5
    for _ in range(2):
        run(call, given)
    assert played == [True]
    assert len(seen) == 5


def test_another_threads_launches_do_not_spoil_a_tape(card) -> None:
    call, given = forward(causal=True, backend="triton"), draw()
    with start.counting() as count, cold():
        assert not start.watched()
        other = threading.Thread(target=call, args=given)
        other.start()
        other.join()
        assert count.launches == 0
        call(*given)
        assert count.launches == 1


def test_debugging_and_another_device_go_tritons_way(card, played, monkeypatch) -> None:
    call, (first, results), given = warmed()
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert not played.clear()
    call()
    monkeypatch.setattr(knobs.runtime, "debug", False)
    card.device = 1
    call()
    card.device = 0
    launches, found = call()
    assert played == [False, False, True]
    assert_alike(first, launches, given + results, given + found)


@pytest.mark.parametrize("missing", ["launcher", "maps", "hook", "note"])
def test_where_an_internal_is_missing_launches_go_tritons_way(
    card, played, monkeypatch, missing
) -> None:
    nvidia = start.nvidia
    if missing == "launcher":
        monkeypatch.setattr(nvidia, "CudaLauncher", type("Other", (), {}))
    elif missing == "maps":
        monkeypatch.setattr(
            start, "nvidia", types.SimpleNamespace(CudaLauncher=nvidia.CudaLauncher)
        )
    elif missing == "hook":
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    else:
        monkeypatch.setattr(gluon_launch, "note", lambda *_: None)
    call, (first, results), given = warmed("gluon_sm90")
    launches, found = call()
    assert played == []
    (known,) = warm._known.values()
    assert known.like.why_not
    assert_alike(first, launches, given + results, given + found)


@pytest.mark.parametrize("name", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_kernels_with_memory_or_numbers_of_their_own_go_tritons_way(name) -> None:
    launcher = object.__new__(start.nvidia.CudaLauncher)
    vars(launcher).update(launch=print, global_scratch_size=0, profile_scratch_size=0)
    setattr(launcher, name, 1)
    with pytest.raises(start.NotAgain):
        start.handed_over(types.SimpleNamespace(run=launcher), (1, 1, 1), ())


def test_what_is_known_holds_no_tensor(card, played) -> None:
    call, given = (
        gradients(causal=True, backend="triton"),
        [*draw(), torch.randn(1, 64, 4, 64, dtype=torch.bfloat16)],
    )
    for _ in range(3):
        _, results = run(call, given)
    assert all(played)
    held = [weakref.ref(t) for t in (*given, *results)]
    del given, results
    gc.collect()
    assert not any(ref() is not None for ref in held)


def maps_in(form: start.Form) -> list[start.Map]:
    fills = [fill for _, fill in form.others]
    return [m for f in fills for m in ([f] if isinstance(f, start.Map) else maps_in(f.__self__))]


def test_maps_are_kept_by_address_and_bounded(card, played, monkeypatch) -> None:
    monkeypatch.setattr(start, "MOST_MAPS", 3)
    call, kept = forward(causal=True, backend="triton"), [draw() for _ in range(9)]
    for given in kept:
        run(call, given)
    (known,) = warm._known.values()
    maps = maps_in(known.like.played.steps[-1].form)
    assert len(maps) == 2  # of keys and of values
    assert all(1 <= len(m.known) <= 3 for m in maps)
    before = [dict(m.known) for m in maps]
    run(call, kept[-1])
    assert [m.known for m in maps] == before


UNSURE = {
    "data": lambda given: (given[0] * given[0].sum().item(),),
    "chance": lambda given: (given[0] * torch.rand(3),),
    "another tensor": lambda given: (given[0] + SOMETHING,),
    "no launch": lambda given: (given[0] + 1,),
    "itself": lambda given: (SOMETHING,),
}
SOMETHING = torch.ones(3)


@pytest.mark.parametrize("name", UNSURE)
def test_what_cannot_be_written_down_is_done_anew(card, played, name) -> None:
    known, anew = tape.Like(), UNSURE[name]
    for n in range(6):
        known([torch.full((3,), float(n))], anew)
    assert known.why_not
    assert known.played is None


def test_hopper_leaves_a_result_as_it_is_for_a_shard_without_keys(card) -> None:
    q, k, v = draw()
    whole = torch.randn(1, 64, 4, 64), torch.randn(1, 4, 64)
    kept = [t.clone() for t in whole]
    none = k[:, :0], v[:, :0]
    rl.partial(q, *none, into=whole, backend="gluon_sm90")
    assert all(torch.equal(a, b) for a, b in zip(whole, kept, strict=True))
    dq, dk, dv = rl.partial_backward(q, q, *none, *whole, backend="gluon_sm90")
    assert not dq.any()
    assert dk.shape == dv.shape == none[0].shape
