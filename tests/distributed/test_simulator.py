"""The simulator itself: deadlocks, hanging ranks, wrong messages, latencies, clocks."""

from __future__ import annotations

import pytest
import torch

from distributed.problems import tensors
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.simulator import Simulation, VirtualTransport, World
from relampago.distributed.transport import RankFailure, Shape


@pytest.mark.parametrize("strategy", ["ring", "allgather", "halo", "ulysses"])
def test_a_hanging_rank_is_named_with_its_step(strategy) -> None:
    run = Simulation(ContextParallelPlan(4, 101, strategy=strategy), faults={2: 0}, timeout=5)
    with pytest.raises(RankFailure, match=rf"heard nothing from rank .* at {strategy} forward"):
        run.attention(*tensors())
    assert 2 not in run.world.failures
    named = [str(error) for error in run.world.failures.values()]
    assert len(named) == 3
    assert any("nothing from rank 2 at" in text for text in named)


def test_a_rank_that_hangs_when_others_need_it_no_more() -> None:
    run = Simulation(ContextParallelPlan(4, 101, strategy="halo"), faults={2: 1})
    with pytest.raises(RankFailure, match="rank 2 hangs"):
        run.attention(*tensors())


def test_a_deadlock_is_found_at_once() -> None:
    world = World(2)

    def waits(rank):
        link = VirtualTransport(world, [0, 1], rank, "x")
        yield link.exchange(
            [], [(1 - rank, Shape((1,), torch.float32))], torch.device("cpu"), "step 7"
        )

    with pytest.raises(RankFailure, match="at step 7"):
        world.run([waits(0), waits(1)])
    assert set(world.failures) == {0, 1}


def test_a_message_of_another_shape_is_an_error() -> None:
    world = World(2)

    def talks(rank):
        link = VirtualTransport(world, [0, 1], rank, "x")
        cpu = torch.device("cpu")
        yield link.exchange(
            [(1 - rank, torch.zeros(2 + rank))],
            [(1 - rank, Shape((2,), torch.float32))],
            cpu,
            "step 0",
        )

    with pytest.raises(RankFailure, match=r"got \(3,\)"):
        world.run([talks(0), talks(1)])


def test_messages_are_copied_when_they_are_sent() -> None:
    world = World(2)

    def writes(rank):
        link = VirtualTransport(world, [0, 1], rank, "x")
        value = torch.full((1,), float(rank))
        pending = link.exchange(
            [(1 - rank, value)], [(1 - rank, Shape((1,), value.dtype))], value.device, "s"
        )
        value.fill_(9.0)
        (got,) = yield pending
        return got.item()

    assert world.run([writes(0), writes(1)]) == [1.0, 0.0]


def test_the_clock_moves_with_latency_and_work() -> None:
    ticks = iter(range(100000))
    plan = ContextParallelPlan(4, 101, strategy="ring")
    slow = Simulation(plan, latency=3.0, seed=1)
    slow.attention(*tensors())
    assert 3 < max(slow.world.clock) <= 9  # three hops
    busy = Simulation(plan, latency=0.0, measure=lambda: float(next(ticks)))
    busy.attention(*tensors())
    assert all(len(b) == 4 for b in busy.world.busy)  # three waits: four stretches of work
