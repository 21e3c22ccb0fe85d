"""P virtual ranks in one process: the strategies' own programs on seeded latencies, with counters and a virtual clock.

Programs are generators, so no thread is needed: the world resumes one rank at a time, in a seeded order, whenever what
it waits for has come. A message is copied when it is sent, as a wire does, so that no aliasing can hide. When no rank
can go on, that is a deadlock (or a rank that hangs), and each waiting rank gets the error it would get on a cluster.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relampago.distributed.exchange import Scores
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.program import Course, Forward, backward, forward
from relampago.distributed.sight import Sight
from relampago.distributed.transport import Links, Program, RankFailure, Shape, Traffic

Key = tuple[str, int, int, int]  # channel, from, to, number


class World:
    """The wires and clocks of `size` virtual ranks.

    Args:
        size: ranks.
        seed: of latencies and of the order in which ranks run.
        latency: greatest seconds, on the virtual clock, that a message takes; each draws its own.
        timeout: seconds a rank waits for a message.
        faults: {rank: calls}: the rank hangs for ever when it has been resumed that often (0: from the start).
        measure: a clock in seconds, to charge ranks with what they compute; None charges nothing.
        copies: whether a message is copied when it is sent; False to time the computing alone.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        latency: float = 0.02,
        timeout: float = 60.0,
        faults: dict[int, int] | None = None,
        measure: Callable[[], float] | None = None,
        copies: bool = True,
    ) -> None:
        self.size, self.latency, self.timeout, self.copies = size, latency, timeout, copies
        self.random = random.Random(seed)
        self.faults = dict(faults or {})
        self.measure = measure
        self.clock = [0.0] * size
        self.busy: list[list[float]] = [[] for _ in range(size)]  # seconds computed, by resumption
        self.wires: dict[Key, tuple[float, Tensor]] = {}
        self.numbers: dict[tuple[str, int, int, str], int] = defaultdict(int)
        self.failures: dict[int, RankFailure] = {}

    def number(self, channel: str, source: int, target: int, end: str) -> int:
        """Counts the messages of a wire, at either end: the n-th sent is the n-th received."""
        key = (channel, source, target, end)
        self.numbers[key] += 1
        return self.numbers[key]

    def send(self, channel: str, source: int, target: int, tensor: Tensor) -> None:
        """Put a copy on the wire."""
        key = (channel, source, target, self.number(channel, source, target, "out"))
        arrival = self.clock[source] + self.random.uniform(0, self.latency)
        self.wires[key] = (arrival, tensor.clone() if self.copies else tensor)

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Every rank's result. Raises the first RankFailure if there is one; `failures` has them all."""
        results: list[Any] = [None] * self.size
        waiting: dict[int, Expected | None] = dict.fromkeys(range(self.size))
        self.failures = {}
        while waiting:
            ready = [r for r, e in waiting.items() if self._ready(r, e)]
            if not ready:
                self._stuck(programs, waiting)
                break
            rank = self.random.choice(ready)
            expected = waiting.pop(rank)
            before = self.measure() if self.measure else 0.0
            try:
                asked = programs[rank].send(None if expected is None else self._take(expected))  # type: ignore[arg-type]
                waiting[rank] = asked  # type: ignore[assignment]
            except StopIteration as stop:
                results[rank] = stop.value
            if self.measure:
                spent = self.measure() - before
                self.busy[rank].append(spent)
                self.clock[rank] += spent
            self.faults = {r: n - (r == rank) for r, n in self.faults.items()}
        if self.failures:
            raise next(iter(self.failures.values()))
        if waiting:
            raise RankFailure(
                f"rank {', '.join(map(str, waiting))} hangs; the others have finished"
            )
        return results

    def _ready(self, rank: int, expected: Expected | None) -> bool:
        if self.faults.get(rank, 1) <= 0:
            return False
        return expected is None or all(key in self.wires for key in expected.keys)

    def _take(self, expected: Expected) -> list[Tensor]:
        found = []
        for key, shape in zip(expected.keys, expected.shapes, strict=True):
            arrival, tensor = self.wires.pop(key)
            rank = key[2]
            self.clock[rank] = max(self.clock[rank], arrival)
            if tuple(tensor.shape) != tuple(shape.shape) or tensor.dtype != shape.dtype:
                raise RankFailure(
                    f"rank {rank} got {tuple(tensor.shape)} {tensor.dtype} from rank {key[1]} at {expected.step}; "
                    f"expected {tuple(shape.shape)} {shape.dtype}"
                )
            found.append(tensor)
        return expected.finish(found)

    def _stuck(self, programs: Sequence[Program], waiting: dict[int, Expected | None]) -> None:
        for rank, expected in waiting.items():
            if expected is None or self.faults.get(rank, 1) <= 0:
                continue  # it hangs, and raises nothing
            missing = sorted({key[1] for key in expected.keys if key not in self.wires})
            names = ", ".join(map(str, missing))
            error = RankFailure(
                f"rank {rank} heard nothing from rank {names} at {expected.step} (time-out {self.timeout:g} s)"
            )
            self.clock[rank] += self.timeout
            try:
                programs[rank].throw(error)
            except RankFailure as raised:
                self.failures[rank] = raised


class Expected:
    """What a virtual rank waits for."""

    def __init__(
        self,
        keys: list[Key],
        shapes: list[Shape],
        step: str,
        finish: Callable[[list[Tensor]], list[Tensor]] = list,
    ) -> None:
        self.keys, self.shapes, self.step, self.finish = keys, shapes, step, finish

    def wait(self) -> list[Tensor]:
        """Virtual ranks yield what they wait for; only World.run resumes them."""
        raise RuntimeError("a virtual rank cannot block; expected World.run to drive it")


class VirtualTransport:
    """A group of virtual ranks, seen from one of them."""

    def __init__(self, world: World, members: Sequence[int], rank: int, name: str) -> None:
        self.world, self.members, self.name = world, list(members), name
        self.rank, self.size = self.members.index(rank), len(self.members)
        self.me = rank
        self.traffic = Traffic()

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape]],
        device: torch.device,
        step: str,
    ) -> Expected:
        """As `Transport.exchange`."""
        for peer, tensor in sends:
            self.world.send(self.name, self.me, self.members[peer], tensor)
        self.traffic.add([t for _, t in sends])
        return Expected([self._key(peer) for peer, _ in receives], [s for _, s in receives], step)

    def all_gather(self, tensor: Tensor, step: str) -> Expected:
        """As `Transport.all_gather`."""
        self.traffic.add([tensor], self.size - 1)
        shape = Shape(tuple(tensor.shape), tensor.dtype)
        own = tensor.clone()
        keys = self._everyone([tensor] * self.size)
        return Expected(
            keys, [shape] * len(keys), step, lambda got: [torch.stack(self._insert(got, own))]
        )

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Shape], step: str) -> Expected:
        """As `Transport.all_to_all`."""
        self.traffic.add([t for i, t in enumerate(sends) if i != self.rank])
        own = sends[self.rank].clone()
        keys = self._everyone(sends)
        shapes = [s for i, s in enumerate(receives) if i != self.rank]
        return Expected(keys, shapes, step, lambda got: self._insert(got, own))

    def _everyone(self, sends: Sequence[Tensor]) -> list[Key]:
        others = [i for i in range(self.size) if i != self.rank]
        for peer in others:
            self.world.send(self.name, self.me, self.members[peer], sends[peer])
        return [self._key(peer) for peer in others]

    def _insert(self, got: list[Tensor], own: Tensor) -> list[Tensor]:
        return [*got[: self.rank], own, *got[self.rank :]]

    def _key(self, peer: int) -> Key:
        source = self.members[peer]
        return (self.name, source, self.me, self.world.number(self.name, source, self.me, "in"))


class Simulation:
    """A plan over virtual ranks, on whole tensors: shard, run every rank, put together. Differentiable.

    Args:
        plan: with a mesh of ints.
        options: those of `World`.
    """

    def __init__(self, plan: ContextParallelPlan, **options: Any) -> None:
        self.plan = plan
        self.world = World(plan.size, **options)
        self.traffic: list[Traffic] = []  # by rank, of the last forward or backward

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        mask: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_max_logits: bool = False,
        backend: str | None = None,
    ) -> Any:
        """`distributed.attention` on whole tensors (B, S, …); sinks get their whole gradient."""
        plan = self.plan
        sight = Sight.of(
            plan.length, causal=causal, window=window, mask=mask, documents=plan.documents
        )
        scores = Scores(scale, softcap, deterministic, backend)
        course = plan.course(q, k, v, sight, scores, sinks=sinks, whole=True)
        course = course._replace(max_logits=return_max_logits)
        out, lse, top = _Simulated.apply(self, course, q, k, v, sinks)  # type: ignore[misc]
        more = [lse] * return_lse + [top] * return_max_logits
        return (out, *more) if more else out

    def run(self, course: Course, make: Callable[[int, Links], Program]) -> list[Any]:
        """Run one program per rank."""
        links = self._links(course)
        results = self.world.run([make(rank, links[rank]) for rank in range(self.plan.size)])
        self.traffic = [Traffic() for _ in links]
        for total, link in zip(self.traffic, links, strict=True):
            for transport in link:
                if transport is not None:
                    total.calls += transport.traffic.calls
                    total.bytes += transport.traffic.bytes
        return results

    def _links(self, course: Course) -> list[Links]:
        every, members = range(self.plan.size), course.members
        found = []
        for rank in every:
            context = [r for r in every if r % members == rank % members]
            heads = [r for r in every if r // members == rank // members]
            found.append(
                Links(
                    VirtualTransport(self.world, context, rank, "context"),
                    VirtualTransport(self.world, heads, rank, "heads") if members > 1 else None,
                )
            )
        return found


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Simulation, course: Course, q, k, v, sinks):
        layout = course.layout
        places = [layout.positions(r).to(q.device) for r in range(layout.size)]
        shards: list[Any] = [[t.index_select(1, at) for t in (q, k, v)] for at in places]
        results = run.run(
            course,
            lambda r, links: forward(course, links, *shards[r], sinks),  # pyright: ignore
        )
        ctx.run, ctx.course, ctx.places = run, course, places
        ctx.had = [
            Forward(q, k, v, sinks, out, lse, saved)
            for (q, k, v), (out, lse, saved, _) in zip(shards, results, strict=True)
        ]
        out = _joined([out for out, *_ in results], places, 1)
        lse = _joined([lse for _, lse, *_ in results], places, 2)
        top = lse.new_empty(0)
        if course.max_logits:
            top, *others = [top for *_, top in results]
            assert all(torch.equal(other, top) for other in others)
        ctx.mark_non_differentiable(top)
        return out, lse, top

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dout, dlse, _ = gradients
        douts = [dout.index_select(1, at) for at in ctx.places]
        dlses = [dlse.index_select(2, at) for at in ctx.places]
        results = ctx.run.run(
            ctx.course, lambda r, links: backward(ctx.course, links, ctx.had[r], douts[r], dlses[r])
        )
        grads = [_joined([result[i] for result in results], ctx.places, 1) for i in range(3)]
        dsinks = None if results[0][3] is None else sum(result[3] for result in results)
        return (None, None, *grads, dsinks)


def _joined(parts: list[Tensor], places: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim).index_select(dim, torch.cat(places).argsort())
