"""Bytes and calls: the counters of a run equal the plan's numbers, and those equal the closed formulas."""

from __future__ import annotations

import pytest
import torch

from relampago.distributed.cost import Sizes, beats, sent
from relampago.distributed.exchange import Scores
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.sight import Sight
from relampago.distributed.simulator import Simulation


def course_of(plan, q, k, v, **options):
    return plan.course(q, k, v, Sight.of(plan.length, **options), Scores(), whole=True)


def counted(plan, q, k, v, **options):
    """Traffic of a forward and a backward, by rank, and the course."""
    run = Simulation(plan)
    q = q.requires_grad_()
    out = run.attention(q, k, v, **options)
    forward = [(t.calls, t.bytes) for t in run.traffic]
    out.sum().backward()
    backward = [(t.calls, t.bytes) for t in run.traffic]
    return forward, backward, course_of(plan, q, k, v, **options)


@pytest.mark.parametrize("strategy", ["ring", "allgather", "halo", "ulysses", "usp"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": (20, None)}], ids=str
)
@pytest.mark.parametrize("length", [96, 101])
def test_counters_equal_the_plan(strategy, options, length) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, h, d, generator=g).bfloat16() for h, d in ((8, 8), (2, 8), (2, 4)))  # fmt: skip
    for layout in ("zigzag", "contiguous"):
        mesh = (2, 4) if strategy == "usp" else 4
        plan = ContextParallelPlan(mesh, length, strategy=strategy, layout=layout)
        forward, backward, course = counted(plan, q, k, v, **options)
        sizes = Sizes(2, 8, 4, 2)
        for rank in range(plan.size):
            assert forward[rank] == sent(course, rank, sizes)
            assert backward[rank] == sent(course, rank, sizes, backward=True)


def courses(strategy, size, heads=(8, 4), causal=False, layout="zigzag", window=None):
    plan = ContextParallelPlan(size, 32 * size, strategy=strategy, layout=layout)
    q, k = (torch.empty(1, 32 * size, h, 16, device="meta") for h in heads)
    return course_of(plan, q, k, k, causal=causal, window=window)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_closed_formulas(size) -> None:
    """KV, Q, W: bytes of one rank's keys and values, queries, and keys and values in fp32."""
    kv, q, wide = 2 * 32 * 4 * 16 * 2, 32 * 8 * 16 * 2, 2 * 32 * 4 * 16 * 4
    lse = 32 * 8 * 4
    sizes = Sizes(1, 16, 16, 2)

    def both(course, rank):
        return [sent(course, rank, sizes, backward=b) for b in (False, True)]

    p = size
    for rank in range(size):
        ring = both(courses("ring", size), rank)
        assert ring == [(p - 1, (p - 1) * kv), (p + (p > 2), (p - 1) * (kv + wide))]
        gather = both(courses("allgather", size), rank)
        assert gather == [(4, (p - 1) * kv), (8, (p - 1) * (kv + wide))]
        if size <= 4:
            ulysses = both(courses("ulysses", size), rank)
            share = (p - 1) * (2 * q + kv) // p
            assert ulysses[0] == (3, share + (p - 1) * lse // p)
            assert ulysses[1] == (4, share + (p - 1) * lse // p)


def test_replicated_kv_heads_travel_to_each_rank_that_needs_them() -> None:
    course = courses("ulysses", 8, heads=(8, 2))
    per_head = 32 * 2 * 16
    assert sent(course, 0, Sizes(1, 16, 16, 2))[1] == 7 * (per_head * (1 + 1 + 2) + 32 * 4)
    assert sent(course, 0, Sizes(1, 16, 16, 2), backward=True)[1] == 7 * (
        per_head * 1
        + 32 * 4
        + per_head * 1
        + per_head * 2 * 2  # dout, delta, dq, dk and dv in fp32
    )


@pytest.mark.parametrize("size", [4, 8])
def test_a_zigzag_ring_sends_no_half_that_nobody_ahead_needs(size) -> None:
    """Block 0's late half is seen by no other rank; gradients grow from half blocks to whole ones."""
    kv = 2 * 32 * 4 * 16 * 2
    for rank in range(size):
        course = courses("ring", size, causal=True)
        saved = kv // 2 if rank < size - 1 else 0
        assert sent(course, rank, Sizes(1, 16, 16, 2))[1] == (size - 1) * kv - saved
    total = sum(sent(course, r, Sizes(1, 16, 16, 2), backward=True)[1] for r in range(size))
    full = size * (size - 1) * 3 * kv
    assert 0.75 * full < total < 0.95 * full


def test_windows_move_only_what_they_see() -> None:
    """Zigzag: two neighbours hold what precedes a rank's two chunks; W tokens of each."""
    sizes, window = Sizes(1, 16, 16, 2), 9
    per_token = 2 * 4 * 16 * 2
    course = courses("halo", 8, causal=True, window=(window, None))
    for rank in range(8):
        edges = (1 if rank else 0) + (
            1 if rank < 7 else 0
        )  # chunks whose successor is on another rank
        calls, count = sent(course, rank, sizes)
        assert calls == 1
        assert count == edges * window * per_token or count <= 2 * 16 * per_token
    total = sum(sent(course, r, sizes)[1] for r in range(8))
    assert total == 14 * window * per_token


def test_messages_fly_while_work_is_done() -> None:
    """In a ring every message but the gradients' last hop has a piece to hide behind."""
    course = courses("ring", 8, causal=True)
    for rank in range(8):
        forward = beats(course, rank, Sizes(1, 16, 16, 2))
        assert all(b.pairs > 0 for b in forward)
        backward = beats(course, rank, Sizes(1, 16, 16, 2), backward=True)
        assert sum(b.bytes > 0 and b.pairs == 0 for b in backward) <= 1
