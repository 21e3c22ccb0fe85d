"""The performance model: times for the beats of `cost.py`, on machines that are described by a few numbers.

Ranks go in lockstep: a beat takes what its slowest rank takes, computing or sending, whichever is longer. Everything
here is projected, not measured; `docs/distributed.md` says where the machines' numbers come from.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch

from relampago.distributed.cost import Beat, Sizes, beats, local_heads
from relampago.distributed.exchange import Scores
from relampago.distributed.heads import Split
from relampago.distributed.layouts import Layout
from relampago.distributed.program import Context, Course
from relampago.distributed.sight import Sight
from relampago.errors import InvalidInput


class Machine(NamedTuple):
    """A rank and its links.

    Args:
        name: for messages.
        forward: FLOP/s of the forward, as one device reaches it on long sequences.
        backward: FLOP/s of the backward (five products against the forward's two).
        memory_rate: bytes/s of device memory.
        memory: bytes of it.
        node: ranks joined by fast links.
        fast: bytes/s each way inside of a node.
        slow: bytes/s each way between nodes, per rank.
        latency: seconds a call costs besides its bytes.
        launch: seconds a piece costs besides its FLOPs.
    """

    name: str
    forward: float
    backward: float
    memory_rate: float
    memory: float
    node: int
    fast: float
    slow: float
    latency: float = 15e-6
    launch: float = 8e-6


# h200: FLOP/s of one call on 64k tokens, the mean of both rows of benchmarks/results/h200/ring-one-gpu.json (forward
# 692 and 648e12, backward 506 and 522e12); memory as torch reports it (h200/train-step.json); bytes/s as decoding
# reaches them (h200/decode-sweep.json); links 80 % of nominal NVLink 4 and 400 Gb/s (not measured).
# h100: H200's kernels (the chip is the same), less memory. cpu: two threads and gloo on one host, as in research.
MACHINES = {
    "h200": Machine("h200", 670e12, 514e12, 4.4e12, 150.1e9, 8, 360e9, 40e9),
    "h100": Machine("h100", 670e12, 514e12, 3.0e12, 80e9, 8, 360e9, 40e9),
    "cpu": Machine("cpu", 0.1e12, 0.08e12, 10e9, 16e9, 1 << 30, 0.8e9, 0.8e9, 300e-6, 100e-6),
}


class Shape(NamedTuple):
    """Heads and dims of a call."""

    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int
    itemsize: int = 2
    batch: int = 1


class Estimate(NamedTuple):
    """What the model says of one strategy. Bytes and calls are of the rank that sends most."""

    strategy: str
    machine: str
    forward: float  # seconds
    backward: float
    forward_bytes: float
    backward_bytes: float
    forward_calls: int
    backward_calls: int
    memory: float  # bytes a rank holds for one layer's attention, backward included
    efficiency: tuple[float, float]  # of one device's rate, forward and backward
    fits: bool

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def __str__(self) -> str:
        fits = "" if self.fits else ", does not fit in memory"
        return (
            f"  {self.strategy:9} {self.forward * 1e3:9.3f} ms forward ({self.efficiency[0]:4.0%}), "
            f"{self.backward * 1e3:9.3f} ms backward ({self.efficiency[1]:4.0%}){fits}"
        )


def candidates(mesh: tuple[int, ...], shape: Shape, sight: Sight) -> list[tuple[str, int, Context]]:
    """(strategy, ranks that share heads, inside) for all that a mesh can run."""
    inside: Context = "halo" if sight.left is not None else "ring"
    found: list[tuple[str, int, Context]] = []
    if len(mesh) == 1:
        found.append(("ring", 1, "ring"))
        found.append(("allgather", 1, "allgather"))
        if sight.left is not None:
            found.append(("halo", 1, "halo"))
    if shape.heads_q % mesh[-1] == 0:
        found.append(("ulysses" if len(mesh) == 1 else "usp", mesh[-1], inside))
    return found


@functools.lru_cache(maxsize=256)
def rank_strategies(
    layout: Layout, mesh: tuple[int, ...], shape: Shape, sight: Sight, machine: Machine, chunk: int
) -> list[Estimate]:
    """All that the mesh can run, fastest first; what does not fit in memory comes last."""
    found = [
        estimate(name, Course(layout, inside, Split(shape.heads_q, shape.heads_kv, members), chunk, sight, Scores()),
                 shape, machine)
        for name, members, inside in candidates(mesh, shape, sight)
    ]  # fmt: skip
    if not found:
        raise InvalidInput(
            f"q has {shape.heads_q} heads; expected a multiple of the mesh's {mesh[-1]}"
        )
    return sorted(found, key=lambda e: (not e.fits, e.seconds))


def estimate(name: str, course: Course, shape: Shape, machine: Machine) -> Estimate:
    """One strategy's times, bytes and memory."""
    course, scale = _coarser(course)
    sizes = Sizes(shape.batch, shape.dim, shape.dim_v, shape.itemsize)
    size = course.layout.size
    ranks = sorted({*range(0, size, max(1, size // 8)), 1 % size, size - 1})  # ends are extremes
    start, end = course.sight.runs(torch.arange(course.layout.length))
    pairs = float((end - start).sum()) / start.shape[0]
    even = pairs * course.members / size  # for each of a rank's heads, if all ranks had as much
    seconds, sent, calls, rates = [], [], [], []
    for backward in (False, True):
        table = [beats(course, rank, sizes, backward=backward) for rank in ranks]
        steps = itertools.zip_longest(*table, fillvalue=Beat(0, 0, 0))
        time = sum(
            max(_time(course, beat, shape, machine, scale, backward) for beat in step)
            for step in steps
        )
        seconds.append(time)
        ideal = _compute(course, even, shape, machine, scale, backward)
        rates.append(ideal / time if time else 1.0)
        sent.append(max(sum(b.bytes for b in row) for row in table) * scale)
        calls.append(max(sum(b.calls for b in row) for row in table))
    held = memory_of(course, shape) * scale
    return Estimate(
        name, machine.name, seconds[0], seconds[1], sent[0], sent[1], calls[0], calls[1], held,
        (rates[0], rates[1]), held <= machine.memory,
    )  # fmt: skip


def memory_of(course: Course, shape: Shape) -> float:
    """Bytes the fullest rank holds at a time in one layer's backward, inputs and gradients included."""
    tokens = max(course.layout.counts) * shape.batch
    wide = shape.dim + shape.dim_v
    queries, keys = shape.heads_q * wide, shape.heads_kv * wide
    own = tokens * (2 * shape.itemsize * (queries + keys) + 4 * shape.heads_q * (shape.dim + 2))
    if course.context == "allgather":
        whole = course.layout.length * shape.batch * min(course.chunk, shape.heads_kv) * wide
        return own + whole * (2 * shape.itemsize + 2 * 4) + tokens * keys * 4
    blocks = 3 if course.layout.size > course.members else 1
    local = local_heads(course)[1] * wide * tokens * course.members
    joint = 2 * tokens * shape.itemsize * queries if course.members > 1 else 0
    return own + joint + blocks * local * (shape.itemsize + 4)


def _coarser(course: Course) -> tuple[Course, int]:
    """The same plan with fewer tokens: pairs grow by the square of the scale, bytes by the scale itself."""
    layout, sight = course.layout, course.sight
    scale = max(1, layout.length // (layout.size * 128))
    if layout.documents is not None or sight.documents or sight.prefixes or scale == 1:
        return course, 1
    length = layout.length // scale
    sides = [
        None if side is None else math.ceil(side / scale) for side in (sight.left, sight.right)
    ]
    layout = Layout(layout.kind, length, layout.size)
    return course._replace(layout=layout, sight=Sight(length, sides[0], sides[1])), scale


def _compute(
    course: Course, pairs: float, shape: Shape, machine: Machine, scale: int, backward: bool
) -> float:
    dims = 3 * shape.dim + 2 * shape.dim_v if backward else shape.dim + shape.dim_v
    heads = shape.heads_q / course.members * shape.batch
    rate = machine.backward if backward else machine.forward
    return 2 * pairs * scale**2 * dims * heads / rate


def _time(
    course: Course, beat: Beat, shape: Shape, machine: Machine, scale: int, backward: bool
) -> float:
    """The longer of computing and sending."""
    width = shape.heads_q / course.members * shape.dim_v
    if backward:
        width += local_heads(course)[1] * (shape.dim + shape.dim_v)
    fold = (
        12 * beat.rows * scale * width * shape.batch / machine.memory_rate
    )  # read two, write one, fp32
    compute = _compute(course, beat.pairs, shape, machine, scale, backward)
    compute += fold + beat.launches * machine.launch
    near = (course.members if beat.heads else course.layout.size) <= machine.node
    send = beat.calls * machine.latency + beat.bytes * scale / (
        machine.fast if near else machine.slow
    )
    return max(compute, send)


def plans(
    gpus: int, length: int, shape: Shape, sight: Sight, machine: Machine, chunk: int, kind: str
) -> list[Any]:
    """Estimates of every strategy on so many ranks, USP with each way to split them, fastest first."""
    found = list(rank_strategies(Layout(kind, length, gpus), (gpus,), shape, sight, machine, chunk))
    for heads in range(2, gpus):
        if gpus % heads == 0 and shape.heads_q % heads == 0:
            mesh = (gpus // heads, heads)
            (usp,) = rank_strategies(Layout(kind, length, gpus), mesh, shape, sight, machine, chunk)
            found.append(usp._replace(strategy=f"usp {mesh[0]}×{mesh[1]}"))
    return sorted(found, key=lambda e: (not e.fits, e.seconds))
