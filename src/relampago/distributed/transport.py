"""Moving tensors between ranks: the three calls that strategies need, and what they cost.

A strategy is a generator: it posts a call, computes, and yields the call's `Pending` when it needs the result. So the
same strategy runs over process groups here, and over virtual ranks in `simulator.py`. Virtual ranks take turns in one
thread, so a strategy must not yield inside of a context such as `torch.no_grad`.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from relampago.errors import InvalidInput


class RankFailure(RuntimeError):
    """Another rank died, hung or left the common course; the message names it and the step."""


@dataclass
class Traffic:
    """What a rank has sent: calls posted, and bytes that left it (nothing counts that stays)."""

    calls: int = 0
    bytes: int = 0

    def add(self, tensors: Sequence[Tensor], copies: int = 1) -> None:
        """Count one call."""
        self.calls += 1
        self.bytes += copies * sum(t.numel() * t.element_size() for t in tensors)


class Shape(NamedTuple):
    """What a receive expects: a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pending(Protocol):
    """A call under way."""

    def wait(self) -> list[Tensor]:
        """The received tensors; raises RankFailure after the time-out."""
        ...


Program = Generator[Pending, list[Tensor], Any]


class Transport(Protocol):
    """A group of ranks, seen from one of them. Calls must be posted in the same order on all."""

    rank: int
    size: int
    traffic: Traffic

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape]],
        device: torch.device,
        step: str,
    ) -> Pending:
        """Point to point, one batch: (peer, tensor) out, (peer, shape) in; several per peer keep their order."""
        ...

    def all_gather(self, tensor: Tensor, step: str) -> Pending:
        """One result (size, *shape): the same shape on all ranks."""
        ...

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Shape], step: str) -> Pending:
        """The i-th tensor goes to rank i, the i-th result comes from it; shapes may differ."""
        ...


def drive(program: Program) -> Any:
    """Run a strategy over process groups."""
    try:
        pending = next(program)
        while True:
            pending = program.send(pending.wait())
    except StopIteration as stop:
        return stop.value


class Links(NamedTuple):
    """The groups a rank belongs to: those that share the context, and those that share its heads (or None)."""

    context: Transport
    heads: Transport | None = None


class Done(NamedTuple):
    """A call that needed nobody."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        """At once."""
        return self.tensors


class Alone:
    """A group of one: nothing leaves it."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape]],
        device: torch.device,
        step: str,
    ) -> Pending:
        """A schedule of one rank has no messages."""
        raise AssertionError(f"{step}: one rank has nobody to send to")

    def all_gather(self, tensor: Tensor, step: str) -> Pending:
        """The tensor itself."""
        return Done([tensor[None]])

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Shape], step: str) -> Pending:
        """The tensors themselves."""
        return Done(list(sends))


class GroupTransport:
    """A torch.distributed process group: NCCL, gloo or whatever else it is made of."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()
        self.timeout = timeout
        self.device = torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape]],
        device: torch.device,
        step: str,
    ) -> Pending:
        """One batch, so that no order of sends and receives can lock ranks against each other."""
        found = [torch.empty(s.shape, dtype=s.dtype, device=device) for _, s in receives]
        outgoing = [t.contiguous() for _, t in sends]
        ops = [
            dist.P2POp(dist.isend, t, group=self.group, group_peer=peer)
            for (peer, _), t in zip(sends, outgoing, strict=True)
        ] + [
            dist.P2POp(dist.irecv, t, group=self.group, group_peer=peer)
            for (peer, _), t in zip(receives, found, strict=True)
        ]
        self.traffic.add(outgoing)
        peers = [*(peer for peer, _ in sends), *(peer for peer, _ in receives)]
        return self._post(lambda: dist.batch_isend_irecv(ops), found, outgoing, step, peers)

    def all_gather(self, tensor: Tensor, step: str) -> Pending:
        """Into one buffer."""
        tensor = tensor.contiguous()
        found = tensor.new_empty((self.size, *tensor.shape))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self.traffic.add([tensor], self.size - 1)
        flat = found.view(self.size * tensor.shape[0], *tensor.shape[1:])
        return self._post(
            lambda: [gather(flat, tensor, group=self.group, async_op=True)],
            [found],
            [tensor],
            step,
            self._others(),
        )

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Shape], step: str) -> Pending:
        """Through two flat buffers."""
        outgoing = torch.cat([t.reshape(-1) for t in sends])
        sizes = [torch.Size(s.shape).numel() for s in receives]
        incoming = outgoing.new_empty(sum(sizes))
        self.traffic.add([t for i, t in enumerate(sends) if i != self.rank])
        parts = incoming.split(sizes)
        found = [part.view(s.shape) for part, s in zip(parts, receives, strict=True)]
        splits = [t.numel() for t in sends]
        return self._post(
            lambda: [
                dist.all_to_all_single(
                    incoming, outgoing, sizes, splits, group=self.group, async_op=True
                )
            ],
            found,
            [outgoing],
            step,
            self._others(),
        )

    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _post(
        self, start: Any, found: list[Tensor], kept: list[Tensor], step: str, peers: list[int]
    ) -> Pending:
        try:
            works = start()
        except RuntimeError as error:
            raise self.failure(step, peers, error) from error
        return Flight(self, works, found, kept, step, peers)

    def failure(self, step: str, peers: Sequence[int], error: Exception) -> RankFailure:
        """What to raise when a call fails: who was waited for, at which step, and who is to blame for it."""
        awaited = self._names(sorted(set(peers)))
        return RankFailure(
            f"rank {dist.get_rank()} heard nothing from {awaited} at {step} (time-out {self.timeout:g} s)"
            f"{self._silent()}: {str(error).splitlines()[0][:200]}"
        )

    def _silent(self) -> str:
        """One broken connection breaks the next. Whoever fails says so in the store; the cause never does."""
        try:
            store = self.group.get_group_store()
            store.set(f"relampago/failed/{self.rank}", "1")
            deadline = time.monotonic() + min(2.0, self.timeout / 2)
            silent = [r for r in range(self.size) if r != self.rank]
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [r for r in silent if not store.check([f"relampago/failed/{r}"])]
        except (RuntimeError, AttributeError):
            return "; the store is gone too"
        return f"; dead, hung or still waiting: {self._names(silent)}" if silent else ""

    def _names(self, ranks: Sequence[int]) -> str:
        return "rank " + ", ".join(str(dist.get_global_rank(self.group, r)) for r in ranks)


class Flight:
    """Works of a process group. Their tensors stay alive until they have been waited for."""

    def __init__(
        self,
        owner: GroupTransport,
        works: list[Any],
        found: list[Tensor],
        kept: list[Tensor],
        step: str,
        peers: list[int],
    ) -> None:
        self.owner, self.works, self.found, self.kept = owner, works, found, kept
        self.step, self.peers = step, peers

    def wait(self) -> list[Tensor]:
        """One after another. On NCCL this makes the stream wait, not the host, and the group's time-out holds."""
        blocking = all(t.device.type == "cpu" for t in (*self.found, *self.kept))
        for i, work in enumerate(self.works):
            peers = [self.peers[i]] if len(self.works) == len(self.peers) else self.peers
            try:
                if blocking:
                    work.wait(datetime.timedelta(seconds=self.owner.timeout))
                else:
                    work.wait()
            except RuntimeError as error:
                raise self.owner.failure(self.step, peers, error) from error
        self.kept = []
        return self.found


def check_group(group: Any) -> dist.ProcessGroup:
    """A process group this rank belongs to."""
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidInput(
            f"mesh is a {type(group).__name__}; expected a DeviceMesh, a ProcessGroup or an int"
        )
    if dist.get_rank(group) < 0:
        raise InvalidInput(
            "mesh is a group that this rank does not belong to; expected one of its own"
        )
    return group
