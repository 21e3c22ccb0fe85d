"""What needs no second rank: the custom ops, autograd, autocast, refusals; and decoding over virtual ranks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import relampago as rl
from distributed.problems import tensors
from relampago.cache import KVCache, PagedKVCache
from relampago.distributed import ContextParallelPlan, attention
from relampago.distributed.context import context_parallel
from relampago.distributed.decode import ShardedKVCache, decode_program
from relampago.distributed.exchange import Scores
from relampago.distributed.sight import Sight
from relampago.distributed.simulator import VirtualTransport, World
from relampago.errors import InvalidInput, Unsupported


@pytest.mark.parametrize("strategy", ["ring", "allgather", "halo", "ulysses", "auto"])
def test_one_rank_is_attention(strategy) -> None:
    q, k, v = tensors(length=40)
    plan = ContextParallelPlan(1, 40, strategy=strategy)
    got = attention(q, k, v, plan=plan, causal=True, window=(9, None))
    want = rl.attention(q, k, v, causal=True, window=(9, None))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_ops_are_good_citizens() -> None:
    plan = ContextParallelPlan(1, 12, strategy="ring")
    q, k, v = (t.requires_grad_() for t in tensors(length=12, dim=4, dim_v=4, batch=1))
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    text = repr((tuple(Sight.of(12, causal=True)), tuple(Scores()), True))
    op = torch.ops.relampago.context_forward.default
    torch.library.opcheck(op, (q, k, v, sinks, plan.token, text))

    def call(q, k, v, sinks):
        return attention(q, k, v, plan=plan, causal=True, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


@pytest.mark.parametrize("strategy", ["ring", "allgather", "halo", "ulysses"])
def test_ops_return_what_their_fakes_say_however_inputs_lie(strategy) -> None:
    plan = ContextParallelPlan(1, 12, strategy=strategy)
    tensors_ = tensors(length=12, dim=4, dim_v=4, batch=2)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors_)
    sinks = torch.zeros(8, dtype=torch.float64)[::2]
    said = (plan.token, repr((tuple(Sight.of(12, causal=True)), tuple(Scores()), False)))
    ops, only = torch.ops.relampago, "test_faketensor"
    torch.library.opcheck(ops.context_forward.default, (q, k, v, sinks, *said), test_utils=only)
    out, lse, joint, rows, _ = ops.context_forward(q, k, v, sinks, *said)
    saved = (q, k, v, sinks, out, lse, joint, rows)
    torch.library.opcheck(
        ops.context_backward.default, (torch.ones_like(out), None, *saved, *said), test_utils=only
    )


@pytest.mark.parametrize("option", ["window", "scale", "softcap"])
def test_compile_takes_another_number_in_each_call(option) -> None:
    torch._dynamo.reset()
    plan, (q, k, v) = ContextParallelPlan(1, 16, strategy="ring"), tensors(length=16)

    def fn(q, k, v, number):
        words = {"window": (number, 0)} if option == "window" else {option: number}
        return attention(q, k, v, plan=plan, **words)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for number in (4, 6, 8) if option == "window" else (0.5, 0.7, 0.9):
        torch.testing.assert_close(compiled(q, k, v, number), fn(q, k, v, number))


def test_numbers_of_numpy_and_of_python() -> None:
    plan, (q, k, v) = ContextParallelPlan(1, 16), tensors(length=16)
    want = attention(q, k, v, plan=plan, scale=0.5)
    for scale in (np.float64(0.5), np.float64(0.5).item()):
        assert torch.equal(attention(q, k, v, plan=plan, scale=scale), want)


def test_a_copied_plan_is_a_plan() -> None:
    q, k, v = tensors(length=16)
    copies = [f(ContextParallelPlan(1, 16, documents=(0, 5))) for f in (copy.copy, copy.deepcopy)]
    copies.append(pickle.loads(pickle.dumps(ContextParallelPlan(1, 16, documents=(0, 5)))))
    want = rl.attention(q, k, v, mask=rl.Document(torch.tensor([0, 5])))
    for plan in copies:
        torch.testing.assert_close(attention(q, k, v, plan=plan), want)


def test_a_plan_is_made_outside_of_a_graph() -> None:
    torch._dynamo.reset()
    fn = torch.compile(lambda: ContextParallelPlan(1, 16), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="made inside a graph"):
        fn()


def test_autocast_casts_at_the_door() -> None:
    q, k, v = tensors(torch.float32, length=16)
    plan = ContextParallelPlan(1, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v, plan=plan).dtype == torch.bfloat16


def test_refusals() -> None:
    plan = ContextParallelPlan(1, 16)
    q, k, v = tensors(length=16)
    with pytest.raises(Unsupported, match="mask is a function"):
        attention(q, k, v, plan=plan, mask=lambda b, h, i, j: i >= j)
    with pytest.raises(InvalidInput, match="mask is a int"):
        attention(q, k, v, plan=plan, mask=3)
    for words, message in (
        ({"scale": float("inf")}, "scale is inf"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": torch.tensor(0.5)}, "scale is 0.5; expected a finite number"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"window": (-1, 0)}, "window has left = -1"),
        ({"window": (1,)}, "window is .*; expected a pair"),
        ({"mask": rl.Window(0, -1)}, "mask: Window has right = -1"),
        ({"mask": rl.Causal() & rl.Prefix(1.5)}, "mask: Prefix length is 1.5"),
    ):
        with pytest.raises(InvalidInput, match=message):
            attention(q, k, v, plan=plan, **words)
    with pytest.raises(InvalidInput, match="mask is for 3 sequences"):
        attention(q, k, v, plan=plan, mask=rl.Prefix(torch.tensor([1, 2, 3])))
    with pytest.raises(InvalidInput, match="rank is 5"):
        ContextParallelPlan(4, 16).shard(q, rank=5)
    with pytest.raises(InvalidInput, match="whole has 16 tokens"):
        ContextParallelPlan(4, 17).shard(q, rank=0)
    with pytest.raises(InvalidInput, match="rank is missing"):
        ContextParallelPlan(4, 16).shard(q)
    with pytest.raises(InvalidInput, match="buffers have"):
        context_parallel(1, buffers=[q, q[:, 1:]], buffer_seq_dims=[1, 1]).__enter__()


def test_buffers_come_back_after_an_error_unless_they_may_stay() -> None:
    q, k, _ = tensors(length=16)
    whole = q.clone()

    def fails() -> None:
        with context_parallel(1, buffers=[q, k], buffer_seq_dims=[1, 1], no_restore_buffers={k}):
            q.data, k.data = q.data[:, :3], k.data[:, :3]
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert torch.equal(q, whole)
    assert k.shape[1] == 3


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("interleave", [1, 4])
def test_decoding_over_virtual_ranks(size, interleave) -> None:
    """Ragged appends, several rows, pages: as one cache would answer."""
    g = torch.Generator().manual_seed(0)
    whole = KVCache(2, 64, 2, 8, dtype=torch.float64)
    world = World(size)
    room = 64 // size + 2 * interleave
    shares = []
    for rank in range(size):
        link = VirtualTransport(world, range(size), rank, "decode")
        if rank % 2:
            share: KVCache = PagedKVCache(2, 40, 4, 2, 8, dtype=torch.float64)
        else:
            share = KVCache(2, room, 2, 8, dtype=torch.float64)
        shares.append(ShardedKVCache(share, link, interleave=interleave))
    for n in (17, 1, 4, 1):
        q, k, v = (torch.randn(2, n, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2))
        counts = torch.tensor([n, max(0, n - 2)], dtype=torch.int32)
        want, want_lse = rl.attention_decode(q, whole, k, v, counts=counts, return_lse=True)
        programs = [
            decode_program(q, share, k, v, counts, True, (None, None, None), None, {})
            for share in shares
        ]
        for got, lse in world.run(programs):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    assert torch.is_grad_enabled()
    assert sum(int(share.cache.lengths[1]) for share in shares) == int(whole.lengths[1])


def test_a_full_share_refuses_before_it_writes() -> None:
    cache = ShardedKVCache(KVCache(1, 3, 1, 4, dtype=torch.float32))
    token = torch.zeros(1, 4, 1, 4)
    with pytest.raises(InvalidInput, match="room is 3"):
        cache.append(token, token)
    assert int(cache.lengths) == 0
