"""One rank of the gloo tests: `python worker.py <rank> <size> <folder> [checks]`. A start costs seconds: there is one.

Each check is a function; what it raises goes into <folder>/<rank>.json under its name. A check runs on all ranks in the
same order. The last ones end with a hanging and a dead rank.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import relampago as rl
from relampago import statistics as alone
from relampago.cache import KVCache
from relampago.distributed import ContextParallelPlan, RankFailure, attention, statistics
from relampago.distributed import ring_flash_attn as names
from relampago.distributed.context import context_parallel, unshard_buffers
from relampago.distributed.cost import Sizes, sent
from relampago.distributed.decode import ShardedKVCache, attention_decode
from relampago.distributed.exchange import Scores
from relampago.distributed.sight import Sight
from relampago.errors import InvalidInput, Unsupported

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
FOLDER = Path(sys.argv[3])
LENGTH = 53
found: dict[str, str] = {}


def tensors(length=LENGTH, dtype=torch.float64, heads=4, kv=2, dim=8, batch=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, length, heads, dim), (batch, length, kv, dim), (batch, length, kv, dim))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def compare(plan, bound=1e-12, dtype=torch.float64, **options):
    """attention over the plan against rl.attention on whole tensors: out, LSE, gradients."""
    whole = [t.requires_grad_() for t in tensors(plan.length, dtype)]
    local = [plan.shard(t.detach()).requires_grad_() for t in whole]
    out, lse = attention(*local, plan=plan, return_lse=True, **options)
    if plan.documents is not None:
        options["mask"] = rl.Document(torch.tensor(plan.documents))
    want, want_lse = rl.attention(*whole, return_lse=True, **options)
    g = torch.Generator().manual_seed(9)
    dout, dlse = (
        torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in (want, want_lse)
    )
    grads = torch.autograd.grad([want, want_lse], whole, [dout, dlse])
    mine = torch.autograd.grad([out, lse], local, [plan.shard(dout), plan.shard(dlse, 2)])
    pairs = [(out, plan.shard(want)), (lse, plan.shard(want_lse, 2))]
    pairs += [(a, plan.shard(b)) for a, b in zip(mine, grads, strict=True)]
    for got, expected in pairs:
        error = (got - expected).abs().max().item() if got.numel() else 0.0
        assert error <= bound * max(1.0, expected.abs().max().item()), error


def raises(kind, words, call):
    with pytest.raises(kind, match=re.escape(words)) as caught:
        call()
    return str(caught.value)


def strategies():
    for strategy, layout in (
        ("ring", "zigzag"), ("ring", "striped"), ("allgather", "zigzag"), ("halo", "contiguous"), ("ulysses", "zigzag"),
    ):  # fmt: skip
        plan = ContextParallelPlan(dist.group.WORLD, LENGTH, strategy=strategy, layout=layout)
        compare(plan, causal=True)
        compare(plan, causal=True, window=(7, None), softcap=3.0)


def documents():
    for strategy in ("ring", "allgather"):
        plan = ContextParallelPlan(
            dist.group.WORLD, LENGTH, strategy=strategy, documents=(0, 9, 11, 30)
        )
        compare(plan, causal=True)


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    plan = ContextParallelPlan(mesh, LENGTH, strategy="usp")
    compare(plan, causal=True)
    x = torch.arange(LENGTH)[None, :, None].double()
    assert torch.equal(plan.unshard(plan.shard(x)), x)
    compare(ContextParallelPlan(mesh["context"], LENGTH, strategy="ring"), causal=True)


def subgroups():
    """Two processes each, whose ranks do not start at 0."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for strategy in ("ring", "ulysses"):
        compare(ContextParallelPlan(pairs[RANK // 2], LENGTH, strategy=strategy), causal=True)


def half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        plan = ContextParallelPlan(dist.group.WORLD, LENGTH, strategy="ring")
        compare(plan, bound=2 * torch.finfo(dtype).eps, dtype=dtype, causal=True)


def traffic():
    for strategy in ("ring", "allgather", "ulysses"):
        plan = ContextParallelPlan(dist.group.WORLD, LENGTH, strategy=strategy)
        local = [plan.shard(t).requires_grad_() for t in tensors()]
        out = attention(*local, plan=plan, causal=True)
        counter = plan.groups[0].traffic
        counter.calls = counter.bytes = 0
        out = attention(*local, plan=plan, causal=True)
        course = plan.course(*local, Sight.of(LENGTH, causal=True), Scores())
        sizes = Sizes(2, 8, 8, 8, wide=8)
        assert (counter.calls, counter.bytes) == sent(course, RANK, sizes)
        counter.calls = counter.bytes = 0
        out.sum().backward()
        assert (counter.calls, counter.bytes) == sent(course, RANK, sizes, backward=True)


def shards():
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    x = torch.randn(2, LENGTH, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    local = plan.shard(x)
    whole = plan.unshard(local * 2)
    assert torch.equal(whole, x * 2)
    weight = torch.arange(LENGTH)[None, :, None].float().expand_as(x)
    (whole * weight).sum().backward()
    mine = torch.zeros_like(x)
    mine[:, plan.positions()] = plan.shard(2 * weight)
    assert torch.equal(x.grad, mine)
    raises(InvalidInput, "local has", lambda: plan.unshard(x))


def measured(plan, **options):
    """Statistics over a plan against those of whole tensors."""

    def same(got, want):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    q, k, v = tensors(plan.length)
    local = [plan.shard(t) for t in (q, k)]
    want = alone.rows(q, k, **options)
    _, top = attention(*local, plan.shard(v), plan=plan, return_max_logits=True, **options)
    same(top, want.max_logits)
    found = statistics.rows(*local, plan=plan, **options)
    same(found.max_logits, top)
    same(found.entropy, plan.shard(want.entropy, 2))
    for more in ({}, {"lse": found.lse, "last": 9}):
        sums = statistics.column_sums(*local, plan=plan, **more, **options)
        whole = alone.column_sums(q, k, last=more.get("last"), **options)
        same(sums, plan.shard(whole, 2))
    rows = [-1, 20]
    some = statistics.weights(*local, rows, plan=plan, **options)
    same(some, plan.shard(alone.weights(q, k, rows, **options), 3))
    best, keys = statistics.top_keys(*local, rows, 4, plan=plan, **options)
    heaviest, index = alone.top_keys(q, k, rows, 4, **options)
    same(best, heaviest)
    assert torch.equal(keys, index)


def statistics_of_shards():
    """Over two processes, four, and a mesh; then a rank that asks for something else."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    for group, strategy in (
        (pairs[RANK // 2], "ring"), (pairs[RANK // 2], "ulysses"), (dist.group.WORLD, "allgather"),
        (dist.group.WORLD, "halo"), (mesh, "usp"),
    ):  # fmt: skip
        plan = ContextParallelPlan(group, LENGTH, strategy=strategy)
        measured(plan, causal=True)
        measured(plan, causal=True, window=(9, None), softcap=2.0, sinks=sinks)
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    q, k, _ = (plan.shard(t) for t in tensors())
    rows = [3, 5 if RANK == 1 else 4]
    raises(InvalidInput, "calls with", lambda: statistics.weights(q, k, rows, plan=plan))
    kept = len(plan.agreed)
    for row in range(3):  # other rows each time, which no plan should remember
        statistics.weights(q, k, [row], plan=plan)
    assert len(plan.agreed) == kept


def bad_inputs():
    """On every rank, before any communication: the counters stand still."""
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    q, k, v = tensors()
    local = [plan.shard(t) for t in (q, k, v)]
    raises(InvalidInput, "see plan.shard", lambda: attention(q, k, v, plan=plan))
    heads = [t[:, :, :1] for t in local]
    other = ContextParallelPlan(dist.group.WORLD, LENGTH, strategy="ulysses")
    raises(InvalidInput, "multiple of the 4 ranks", lambda: attention(*heads, plan=other))
    dense = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    raises(Unsupported, "mask is a Tensor", lambda: attention(*local, plan=plan, mask=dense))
    raises(InvalidInput, "plan is a int", lambda: attention(*local, plan=4))
    raises(InvalidInput, "mesh is a str", lambda: ContextParallelPlan("world", LENGTH))
    virtual = ContextParallelPlan(4, LENGTH)
    raises(InvalidInput, "virtual ranks", lambda: attention(*local, plan=virtual))
    cu = torch.tensor([0, 7])
    prepare = names.llama3_flash_attn_prepare_cu_seqlens
    raises(InvalidInput, "expected a multiple", lambda: prepare(cu, True, 0, 4))
    # the refusals, told to the others
    assert [p.groups[0].traffic.calls for p in (plan, other)] == [2, 1]


def one_rank_is_wrong():
    """The first call is agreed on: all raise what one refuses."""
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    local = [plan.shard(t) for t in tensors()]
    if RANK == 2:
        local[1] = local[1][:, :-1]
    words = "v has another length" if RANK == 2 else "rank 2 refuses the call: v has another length"
    raises(InvalidInput, words, lambda: attention(*local, plan=plan))
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    local = [plan.shard(t) for t in tensors()]
    scale = float("nan") if RANK == 2 else None
    words = "scale is nan" if RANK == 2 else "rank 2 refuses the call: scale is nan"
    raises(InvalidInput, words, lambda: attention(*local, plan=plan, scale=scale))
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    local = [plan.shard(t) for t in tensors(batch=3 if RANK == 1 else 2)]
    raises(InvalidInput, "calls with", lambda: attention(*local, plan=plan))


def compiled():
    """On two ranks, since tracing costs seconds. Traced first: what layouts keep must not be a tracer's tensors."""
    pair = dist.new_group([0, 1])
    if RANK > 1:
        return

    for strategy, length in (("ring", 31), ("ulysses", 33), ("auto", 35)):
        plan = ContextParallelPlan(pair, length, strategy=strategy)
        local = [plan.shard(t).requires_grad_() for t in tensors(length, torch.float32)]

        def model(q, k, v, plan=plan):
            return attention(q * 2, k, v, plan=plan, causal=True).square()

        fast = torch.compile(model, fullgraph=True, backend="aot_eager")
        one = torch.autograd.grad(fast(*local).sum(), local)
        two = torch.autograd.grad(model(*local).sum(), local)
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def checkpoints():
    """A plain checkpoint repeats the forward's communication; one that keeps the op's outputs does not."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    plan = ContextParallelPlan(dist.group.WORLD, LENGTH, strategy="ring")
    local = [plan.shard(t).requires_grad_() for t in tensors()]
    kept = [torch.ops.relampago.context_forward.default]

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(**options):
        out = checkpoint(
            lambda *t: attention(*t, plan=plan, causal=True), *local, use_reentrant=False, **options
        )
        counter = plan.groups[0].traffic
        counter.calls = 0
        grads = torch.autograd.grad(out.sum(), local)
        return counter.calls, grads

    attention(*local, plan=plan, causal=True)
    plain, first = run()
    selective, second = run(context_fn=lambda: create_selective_checkpoint_contexts(policy))
    assert plain == selective + SIZE - 1, (plain, selective)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def managed():
    """F.scaled_dot_product_attention, however it was imported; buffers come back."""
    from torch.nn.functional import scaled_dot_product_attention as imported

    q, k, v = (t.transpose(1, 2) for t in tensors(kv=4))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    buffers = [t.clone() for t in (q, k, v)]
    for strategy in ("allgather", "ring"):
        with context_parallel(
            dist.group.WORLD, buffers=buffers, buffer_seq_dims=[2, 2, 2], strategy=strategy
        ) as plan:
            assert buffers[0].shape[2] == plan.local_length()
            for call in (F.scaled_dot_product_attention, imported):
                out = call(*buffers, is_causal=True)
                (whole,) = unshard_buffers(plan, [out], [2])
                torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-12)
            raises(
                Unsupported,
                "attn_mask",
                lambda: F.scaled_dot_product_attention(*buffers, attn_mask=torch.ones(1)),
            )
        assert torch.equal(buffers[1], k)
        assert F.scaled_dot_product_attention(q, k, v).shape == q.shape


def ring_flash_attn_names():
    q, k, v = (t.requires_grad_() for t in tensors(48))
    for func, layout in (
        (names.ring_flash_attn_func, "contiguous"), (names.zigzag_ring_flash_attn_func, "zigzag"),
        (names.stripe_flash_attn_func, "striped"),
    ):  # fmt: skip
        for window in ((-1, -1), (5, -1)):
            plan = ContextParallelPlan(dist.group.WORLD, 48, layout=layout)
            local = [plan.shard(t) for t in (q, k, v)]
            out, lse, _ = func(*local, causal=True, window_size=window, return_attn_probs=True)
            seen = None if window[0] < 0 else (window[0], None)
            want, want_lse = rl.attention(q, k, v, causal=True, window=seen, return_lse=True)
            torch.testing.assert_close(out, plan.shard(want), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse, plan.shard(want_lse, 2), rtol=1e-12, atol=1e-12)
    packed = torch.stack([t.detach() for t in tensors(48, kv=4)], 2)
    plan = ContextParallelPlan(dist.group.WORLD, 48, layout="zigzag")
    out = names.zigzag_ring_flash_attn_qkvpacked_func(plan.shard(packed), causal=True)
    want = rl.attention(*packed.unbind(2), causal=True)
    torch.testing.assert_close(out, plan.shard(want), rtol=1e-12, atol=1e-12)
    raises(Unsupported, "dropout_p", lambda: names.ring_flash_attn_func(q, k, v, dropout_p=0.1))


def ring_flash_attn_varlen_names():
    cu = torch.tensor([0, 16, 40, 64], dtype=torch.int32)
    q, k, v = (t[0].requires_grad_() for t in tensors(64, batch=1))
    want, want_lse = rl.attention_varlen(q, k, v, cu, cu, 24, 24, causal=True, return_lse=True)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=want.dtype)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    for func, layout in (
        (names.ring_flash_attn_varlen_func, "documents_contiguous"),
        (names.zigzag_ring_flash_attn_varlen_func, "documents_zigzag"),
    ):
        plan = ContextParallelPlan(dist.group.WORLD, 64, layout=layout, documents=(0, 16, 40))
        local = [plan.shard(t.detach(), 0).requires_grad_() for t in (q, k, v)]
        out, lse, _ = func(*local, cu // SIZE, 6, causal=True, return_attn_probs=True)
        torch.testing.assert_close(out, plan.shard(want, 0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, plan.shard(want_lse, 1), rtol=1e-12, atol=1e-12)
        mine = torch.autograd.grad(out, local, plan.shard(dout, 0))
        for a, b in zip(mine, grads, strict=True):
            torch.testing.assert_close(a, plan.shard(b, 0), rtol=1e-12, atol=1e-12)
    part = slice(RANK * 16, RANK * 16 + 16)
    local = [t.detach()[part].requires_grad_() for t in (q, k, v)]
    made = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, RANK, SIZE)
    out, lse, _ = names.llama3_flash_attn_varlen_func(
        *local, *made[:4], 1, made[4], causal=True, return_attn_probs=True
    )
    torch.testing.assert_close(out, want[part], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse[:, part], rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(out, local, dout[part]), grads, strict=True):
        torch.testing.assert_close(a, b[part], rtol=1e-12, atol=1e-12)


def decoding():
    g = torch.Generator().manual_seed(4)
    whole = KVCache(2, 40, 2, 8, dtype=torch.float32)
    share = ShardedKVCache(
        KVCache(2, 14, 2, 8, dtype=torch.float32), dist.group.WORLD, interleave=2
    )
    sinks = torch.linspace(-1, 1, 4)
    for n in (11, 1, 3, 1):
        q, k, v = (torch.randn(2, n, h, 8, generator=g) for h in (4, 2, 2))
        want, want_lse = rl.attention_decode(q, whole, k, v, sinks=sinks, return_lse=True)
        got, lse = attention_decode(q, share, k, v, sinks=sinks, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    raises(Unsupported, "window", lambda: attention_decode(q, share, window=(3, 0)))


def transformers_adapter():
    from relampago.distributed.transformers import attend, use_plan

    q, k, v = tensors()
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    local = [plan.shard(t).transpose(1, 2) for t in (q, k, v)]
    with use_plan(plan):
        out, _ = attend(None, *local, None, scaling=0.3, sliding_window=8)
    want = rl.attention(q, k, v, causal=True, window=(7, None), scale=0.3)
    torch.testing.assert_close(out, plan.shard(want), rtol=1e-12, atol=1e-12)
    raises(InvalidInput, "use_plan", lambda: attend(None, *local, None))


def hanging():
    """Rank 3 does not come: the others raise within the time-out, and name it and the step."""
    group = dist.new_group(list(range(SIZE)))
    plan = ContextParallelPlan(group, LENGTH, strategy="ring", timeout=2.0)
    local = [plan.shard(t) for t in tensors()]
    attention(*local, plan=plan)
    dist.barrier()
    start = time.monotonic()
    if RANK == 3:
        time.sleep(5)
        return
    text = raises(RankFailure, "ring forward, step", lambda: attention(*local, plan=plan))
    assert time.monotonic() - start < 30  # 2 s and the search for who is silent, on a busy machine
    assert re.search("dead, hung or still waiting: rank [0-9, ]*3", text), text


def dying():
    group = dist.new_group(list(range(SIZE)))
    plan = ContextParallelPlan(group, LENGTH, strategy="allgather", timeout=5.0)
    local = [plan.shard(t) for t in tensors()]
    attention(*local, plan=plan)
    dist.barrier()
    if RANK == 3:
        found["dying"] = ""
        save()
        os._exit(0)
    start = time.monotonic()
    text = raises(RankFailure, "allgather forward, heads", lambda: attention(*local, plan=plan))
    assert time.monotonic() - start < 30
    assert re.search("dead, hung or still waiting: rank [0-9, ]*3", text), text


CHECKS = (
    strategies, documents, meshes, subgroups, half_precision, traffic, shards, statistics_of_shards, bad_inputs,
    one_rank_is_wrong, compiled, checkpoints, managed, ring_flash_attn_names, ring_flash_attn_varlen_names, decoding,
    transformers_adapter, hanging, dying,
)  # fmt: skip


def save():
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")


def main():
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module="relampago")
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=SIZE,
        timeout=datetime.timedelta(seconds=180),
    )  # fmt: skip
    chosen = sys.argv[4:]
    for check in CHECKS:
        if chosen and check.__name__ not in chosen:
            continue
        start = time.monotonic()
        try:
            check()
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
        save()
        if chosen:
            print(
                RANK,
                check.__name__,
                f"{time.monotonic() - start:.2f} s",
                found[check.__name__],
                flush=True,
            )
    os._exit(0)


if __name__ == "__main__":
    main()
