"""Statistics over virtual ranks, every strategy: those of one device in fp64, exactly; traffic; refusals."""

from __future__ import annotations

import pytest
import torch

import relampago as rl
from distributed.problems import LENGTH, MASKS, tensors, with_sinks
from relampago import statistics
from relampago.distributed import ContextParallelPlan, attention, measure
from relampago.distributed import statistics as spread
from relampago.distributed.exchange import Scores
from relampago.distributed.sight import Sight
from relampago.distributed.simulator import Simulation
from relampago.errors import InvalidInput, Unsupported

MESHES = {
    "ring": (1, 3, 4), "allgather": (1, 3, 4), "halo": (1, 3, 4), "ulysses": (1, 2, 4), "usp": ((1, 2), (3, 2), (2, 4)),
}  # fmt: skip
CHOSEN = [-1, 7, 60, 7, 0]


def simulated(plan, make, q, k, options, *more, lse=()):
    """Each rank's answer; `more` goes to the program, `lse` likewise, a rank's rows of it."""
    options = dict(options)
    sinks = options.pop("sinks", None)
    scores = Scores(softcap=options.pop("softcap", None))
    sight = Sight.of(plan.length, documents=plan.documents, **options)
    course = plan.course(q, k, k, sight, scores, sinks=sinks, whole=True)
    run = Simulation(plan, seed=2)

    def program(rank, links):
        own = [plan.shard(t, 2, rank) for t in lse]
        return make(course, links, *(plan.shard(t, 1, rank) for t in (q, k)), sinks, *own, *more)

    return run.run(course, program)


def joined(plan, parts, dim):
    """Ranks' parts in the order of the sequence."""
    order = torch.cat([plan.positions(r) for r in range(plan.size)]).argsort()
    return torch.cat(parts, dim).index_select(dim, order)


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def plans(strategy):
    for i, mesh in enumerate(MESHES[strategy]):
        layout = ("zigzag", "contiguous", "striped")[i]
        yield ContextParallelPlan(mesh, LENGTH, strategy=strategy, layout=layout, chunk=1 + i % 2)
    yield ContextParallelPlan(MESHES[strategy][-1], LENGTH, strategy=strategy)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", MESHES)
def test_equals_one_device(strategy, mask) -> None:
    q, k, v = tensors()
    options = with_sinks(MASKS[mask], 4)
    want = statistics.rows(q, k, **options)
    columns, few = (statistics.column_sums(q, k, last=n, **options) for n in (None, 45))
    *_, top = rl.attention(q, k, v, return_max_logits=True, **options)
    torch.testing.assert_close(top, want.max_logits)
    for plan in plans(strategy):
        out, lse, most = Simulation(plan).attention(
            q, k, v, return_lse=True, return_max_logits=True, **options
        )
        same(most, top)
        for got, expected in zip(
            (out, lse), rl.attention(q, k, v, return_lse=True, **options), strict=True
        ):
            same(got, expected)
        found = simulated(plan, measure.rows, q, k, options)
        same(joined(plan, [r.lse for r in found], 2), want.lse)
        same(joined(plan, [r.entropy for r in found], 2), want.entropy)
        for each in found:
            same(each.max_logits, want.max_logits)
        found = simulated(plan, measure.columns, q, k, options, None, LENGTH)
        same(joined(plan, found, 2), columns)
        found = simulated(plan, measure.columns, q, k, options, 45, lse=[want.lse])
        same(joined(plan, found, 2), few)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "usp"])
def test_chosen_rows(strategy, mask) -> None:
    """Rows are asked for by position, in any order and twice; keys come back by position."""
    q, k, _ = tensors()
    options = with_sinks(MASKS[mask], 4)
    want = statistics.weights(q, k, CHOSEN, **options)
    best, index = statistics.top_keys(q, k, CHOSEN, 9, **options)
    for plan in plans(strategy):
        at = torch.tensor(CHOSEN).remainder(LENGTH)
        found = simulated(plan, measure.chosen_weights, q, k, options, at)
        same(joined(plan, found, 3), want)
        for heaviest, keys in simulated(plan, measure.chosen_keys, q, k, options, at, 9):
            same(heaviest, best)
            assert torch.equal(keys, index)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mesh"), [(8, 1, 4), (8, 2, 8), (12, 3, 2), (12, 2, 3), (6, 6, 6)]
)
def test_heads_find_their_places_under_ulysses(heads, kv_heads, mesh) -> None:
    q, k, v = tensors(length=37, heads=heads, kv_heads=kv_heads)
    q = q * torch.linspace(0.5, 3, heads, dtype=q.dtype)[:, None]  # each head its own largest logit
    want = statistics.rows(q, k, causal=True)
    columns = statistics.column_sums(q, k, causal=True)
    for strategy, shape in (("ulysses", mesh), ("usp", (2, mesh))):
        plan = ContextParallelPlan(shape, 37, strategy=strategy)
        _, top = Simulation(plan).attention(q, k, v, causal=True, return_max_logits=True)
        same(top, want.max_logits)
        for each in simulated(plan, measure.rows, q, k, {"causal": True}):
            same(each.max_logits, want.max_logits)
        found = simulated(plan, measure.columns, q, k, {"causal": True}, None, 37)
        same(joined(plan, found, 2), columns)


def test_documents_and_more_ranks_than_tokens() -> None:
    q, k, _ = tensors(length=5)
    options = {"mask": rl.Causal() & rl.Document(torch.tensor([0, 2]))}
    want = statistics.rows(q, k, **options)
    for strategy in ("ring", "allgather", "halo"):
        plan = ContextParallelPlan(8, 5, strategy=strategy, documents=(0, 2))
        found = simulated(plan, measure.rows, q, k, {"causal": True})
        same(joined(plan, [r.entropy for r in found], 2), want.entropy)
        found = simulated(plan, measure.columns, q, k, {"causal": True}, None, 5)
        same(joined(plan, found, 2), statistics.column_sums(q, k, **options))
        found = simulated(plan, measure.chosen_weights, q, k, {"causal": True}, torch.tensor([4, 1]))  # fmt: skip
        same(joined(plan, found, 3), statistics.weights(q, k, [4, 1], **options))


def test_max_logits_cost_one_small_message_and_no_gradient() -> None:
    """(B, H) to each other rank; out and its gradients are those without."""
    qkv = [t.requires_grad_() for t in tensors(torch.float32)]
    for strategy in ("ring", "allgather", "ulysses"):
        run = Simulation(ContextParallelPlan(4, LENGTH, strategy=strategy))
        plain = run.attention(*qkv, causal=True)
        before = [(t.calls, t.bytes) for t in run.traffic]
        out, top = run.attention(*qkv, causal=True, return_max_logits=True)
        heads = 1 if strategy == "ulysses" else 4  # own heads
        after = [(t.calls - 1, t.bytes - 3 * 2 * heads * 4) for t in run.traffic]
        assert before == after
        assert not top.requires_grad
        torch.testing.assert_close(out, plain)
        grads = [torch.autograd.grad(t.square().sum(), qkv) for t in (out, plain)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_max_logits_under_compile() -> None:
    q, k, v = tensors(torch.float32, length=16)
    plan = ContextParallelPlan(1, 16)

    def call(q):
        return attention(q, k, v, plan=plan, causal=True, return_max_logits=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q), call(q), strict=True):
        torch.testing.assert_close(got, want)


def test_a_shard_raises_the_largest_logits_where_results_are_merged() -> None:
    """`top` of `partial`, alone and with `into`."""
    q, k, v = tensors()
    want, want_lse, top = rl.attention(q, k, v, return_lse=True, return_max_logits=True)
    found = torch.full_like(top, -torch.inf)
    first = rl.partial(q, k[:, :40], v[:, :40], top=found)
    assert bool((found <= top).all())
    assert not torch.equal(found, top)
    out, lse = rl.partial(q, k[:, 40:], v[:, 40:], into=first, top=found)
    for a, b in ((found, top), (out, want), (lse, want_lse)):
        same(a, b)


def test_keys_alone_travel() -> None:
    """A ring's rows send what its forward sends of keys, a sixteenth of it here."""
    q, k, v = tensors(torch.float32, dim=4, dim_v=60)
    plan = ContextParallelPlan(4, LENGTH, strategy="ring")
    run = Simulation(plan)
    run.attention(q, k, v)
    whole = [t.bytes for t in run.traffic]
    course = plan.course(q, k, k, Sight.of(LENGTH), Scores(), whole=True)

    def program(rank, links):
        return measure.rows(course, links, plan.shard(q, 1, rank), plan.shard(k, 1, rank), None)

    run.run(course, program)
    top = 3 * 2 * 4 * 4
    assert [t.bytes - top for t in run.traffic] == [n // 16 for n in whole]


def test_one_rank_and_refusals() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(length=16))
    plan = ContextParallelPlan(1, 16)
    got = spread.rows(q, k, plan=plan, causal=True, softcap=2.0)
    for a, b in zip(got, statistics.rows(q, k, causal=True, softcap=2.0), strict=True):
        same(a, b)
        assert not a.requires_grad
    got = spread.column_sums(q, k, plan=plan, last=3, lse=got.lse, causal=True, softcap=2.0)
    same(got, statistics.column_sums(q, k, last=3, causal=True, softcap=2.0))
    same(spread.weights(q, k, [3, -1], plan=plan), statistics.weights(q, k, [3, -1]))
    for a, b in zip(
        spread.top_keys(q, k, torch.tensor([3]), 20, plan=plan, causal=True),
        statistics.top_keys(q, k, [3], 20, causal=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    for call, words in (
        (lambda: spread.rows(q, k, plan=4), "plan is a int"),
        (lambda: spread.rows(q, k, plan=ContextParallelPlan(4, 16)), "virtual ranks"),
        (lambda: spread.rows(q, k, plan=plan, bias=1), "bias is no option of a statistic"),
        (lambda: spread.rows(q, k[:, 1:], plan=plan), "k has 15 tokens|another length"),
        (lambda: spread.column_sums(q, k, plan=plan, last=0), "last is 0"),
        (lambda: spread.column_sums(q, k, plan=plan, lse=v), "lse has shape"),
        (lambda: spread.weights(q, k, [16], plan=plan), "rows reaches from 16 to 16"),
        (lambda: spread.weights(q, k, [0.5], plan=plan), "rows is torch.float32"),
        (lambda: spread.top_keys(q, k, [1], 0, plan=plan), "n is 0"),
    ):
        with pytest.raises(InvalidInput, match=words):
            call()
    with pytest.raises(Unsupported, match="mask is a function"):
        spread.rows(q, k, plan=plan, mask=lambda b, h, i, j: i >= j)
