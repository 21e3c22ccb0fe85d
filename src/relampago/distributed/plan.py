"""ContextParallelPlan: which rank holds which tokens, and how attention over them is computed. A value, made once."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from relampago import validate
from relampago.distributed.exchange import Scores
from relampago.distributed.heads import Split
from relampago.distributed.layouts import KINDS, Layout
from relampago.distributed.program import Course
from relampago.distributed.sight import Sight
from relampago.distributed.transport import Alone, GroupTransport, Links, check_group
from relampago.errors import InvalidInput, Unsupported

WORDS = 2048  # bytes of an agreement
_numbers = itertools.count()
_plans: weakref.WeakValueDictionary[str, ContextParallelPlan] = weakref.WeakValueDictionary()
STRATEGIES = ("auto", "allgather", "ring", "ulysses", "usp", "halo")


@dataclass(frozen=True)
class ContextParallelPlan:
    """Attention over a sequence that is spread over ranks.

    Args:
        mesh: a ProcessGroup, a DeviceMesh of one dimension, or of two (context, heads) for usp; an int, or a pair of
            ints, for virtual ranks.
        length: tokens of the whole sequence.
        strategy: one of STRATEGIES; auto chooses by the performance model when it sees the shapes.
        layout: one of `layouts.KINDS`; auto is zigzag, per document where there are documents.
        documents: where each packed document begins, ascending from 0. Rows see their own document only.
        chunk: kv heads that all-gather fetches at a time.
        timeout: seconds a rank waits for another (on NCCL the group's own holds).
        machine: a name in `model.MACHINES` for auto; None goes by the group's backend and size.

    Raises:
        InvalidInput: a value is wrong or the mesh does not fit; on every rank, before any communication.
    """

    mesh: Any
    length: int
    strategy: str = "auto"
    layout: str = "auto"
    documents: tuple[int, ...] | None = None
    chunk: int = 1
    timeout: float = 600.0
    machine: str | None = None
    agreed: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    token: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            raise Unsupported(
                "a ContextParallelPlan made inside a graph of torch.compile; make it outside"
            )
        if self.documents is not None:
            object.__setattr__(self, "documents", tuple(int(n) for n in self.documents))
        validate.require(
            [
                ("strategy", ("is {!r}", self.strategy), ("one of {}", ", ".join(STRATEGIES)),
                 self.strategy in STRATEGIES),
                ("layout", ("is {!r}", self.layout), ("auto or one of {}", ", ".join(KINDS)),
                 self.layout in ("auto", *KINDS)),
                ("chunk", ("is {!r}", self.chunk), "an int >= 1", isinstance(self.chunk, int) and self.chunk >= 1),
                ("timeout", ("is {!r}", self.timeout), "seconds > 0",
                 isinstance(self.timeout, int | float) and self.timeout > 0),
            ]
        )  # fmt: skip
        shape = self.shape
        if self.strategy == "usp" and len(shape) != 2:
            raise InvalidInput(
                f"mesh has shape {shape}; expected two dimensions (context, heads) for usp"
            )
        if len(shape) == 2 and self.strategy not in ("usp", "auto"):
            raise InvalidInput(
                f"mesh has shape {shape}; expected one dimension for {self.strategy}"
            )
        _ = self.tokens  # checks length and documents
        object.__setattr__(self, "token", f"plan {next(_numbers)}")
        _plans[self.token] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew where it is unpickled: another process has other tokens."""
        given = tuple(getattr(self, entry.name) for entry in fields(self) if entry.init)
        return ContextParallelPlan, given

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelPlan:
        """Itself: a value, whose mesh has no copies."""
        return self

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The mesh's sizes: (ranks,) or (context, heads)."""
        mesh = self.mesh
        if isinstance(mesh, int) and not isinstance(mesh, bool):
            shape: tuple[Any, ...] = (mesh,)
        elif isinstance(mesh, tuple):
            shape = mesh
        elif isinstance(mesh, DeviceMesh):
            shape = tuple(mesh.shape)
            if mesh.get_coordinate() is None:
                raise InvalidInput("mesh does not contain this rank; expected one that does")
        else:
            shape = (dist.get_world_size(check_group(mesh)),)
        if len(shape) not in (1, 2) or not all(isinstance(n, int) and n >= 1 for n in shape):
            raise InvalidInput(f"mesh has shape {shape}; expected one or two sizes of at least 1")
        return shape

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.shape)

    @property
    def virtual(self) -> bool:
        """Whether the ranks are virtual ones."""
        return isinstance(self.mesh, int | tuple)

    @functools.cached_property
    def rank(self) -> int:
        """This process's place among the ranks: row by row in a two-dimensional mesh."""
        if self.virtual:
            if self.size == 1:
                return 0
            raise InvalidInput("rank is missing; expected one, since the plan's ranks are virtual")
        if isinstance(self.mesh, DeviceMesh):
            place = 0
            for n, at in zip(self.shape, self.mesh.get_coordinate() or (), strict=True):
                place = place * n + at
            return place
        return dist.get_rank(self.mesh)

    @functools.cached_property
    def tokens(self) -> Layout:
        """Which rank holds which tokens."""
        kind = self.layout
        if kind == "auto":
            kind = "zigzag" if self.documents is None else "documents_zigzag"
        return Layout(kind, self.length, self.size, self.documents)

    def local_length(self, rank: int | None = None) -> int:
        """Tokens a rank holds; this one if None."""
        return self.tokens.count(self._rank(rank))

    def shard(self, whole: Tensor, dim: int = 1, rank: int | None = None) -> Tensor:
        """A rank's tokens of a whole tensor, in the plan's order. Differentiable.

        Raises:
            InvalidInput: the tensor has another length there.
        """
        if whole.shape[dim] != self.length:
            raise InvalidInput(
                f"whole has {whole.shape[dim]} tokens in dimension {dim}; expected the plan's {self.length}"
            )
        return whole.index_select(dim, self.positions(rank, whole.device))

    def positions(self, rank: int | None = None, device: Any = None) -> Tensor:
        """Global positions of a rank's tokens, ascending (n,)."""
        return self.tokens.positions(self._rank(rank)).to(device or "cpu")

    def position_ids(self, rank: int | None = None, device: Any = None) -> Tensor:
        """What rotary embeddings take (n,): positions, counted from each document's start."""
        at = self.tokens.positions(self._rank(rank))
        if self.documents is not None:
            starts = torch.tensor(self.documents)
            at = at - starts[torch.searchsorted(starts, at, right=True) - 1]
        return at.to(device or "cpu")

    def shard_labels(
        self, tokens: Tensor, dim: int = 1, rank: int | None = None, ignore_index: int = -100
    ) -> Tensor:
        """Next-token labels of a rank: shifted in the whole sequence first, so no boundary loses its token.

        The last token of each document gets ignore_index.
        """
        labels = tokens.roll(-1, dim)
        starts = self.documents or (0,)
        ends = torch.tensor([*starts[1:], self.length], device=tokens.device) - 1
        return self.shard(labels.index_fill(dim, ends, ignore_index), dim, rank)

    def unshard(self, local: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor on every rank, in the order of positions. Differentiable.

        Its gradient is taken to be the same on all ranks, as for any replicated tensor: each keeps its own part.
        """
        mine = self.local_length()
        if local.shape[dim] != mine:
            raise InvalidInput(
                f"local has {local.shape[dim]} tokens in dimension {dim}; expected {mine}"
            )
        return _Unshard.apply(local, self, dim)  # type: ignore[return-value]

    @functools.cached_property
    def groups(self) -> tuple[GroupTransport, ...]:
        """The mesh's groups, one per dimension."""
        if self.virtual:
            return ()
        if isinstance(self.mesh, DeviceMesh):
            every = [self.mesh.get_group(i) for i in range(len(self.shape))]
        else:
            every = [self.mesh]
        return tuple(GroupTransport(check_group(group), self.timeout) for group in every)

    def links(self, course: Course) -> Links:
        """The transports a course runs over."""
        if len(self.shape) == 2:
            return Links(*self.groups)
        if course.members > 1:
            return Links(Alone(), self.groups[0])
        return Links(self.groups[0] if self.groups else Alone())

    def course(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Sight,
        scores: Scores,
        *,
        sinks: Tensor | None = None,
        whole: bool = False,
        checked: bool = True,
    ) -> Course:
        """Check a call and settle what all ranks will do, from shapes alone.

        Args:
            q: (B, L, H, D), this rank's tokens, or all if `whole`.
            k: likewise.
            v: likewise.
            sight: what rows see.
            scores: how scores are made.
            sinks: (H,) or None.
            whole: whether tensors hold all tokens.
            checked: False under a tracer, where lengths are symbols.

        Raises:
            InvalidInput: shapes that are not the plan's, heads that do not divide.
        """
        if checked:
            self._check(q, k, v, sight, scores, sinks, whole)
        strategy = self.choose(q.shape[2], k.shape[2], q.shape[3], q.element_size(), sight)
        members = (
            self.shape[1] if len(self.shape) == 2 else self.size if strategy == "ulysses" else 1
        )
        if q.shape[2] % members:
            raise InvalidInput(
                f"q has {q.shape[2]} heads; expected a multiple of the {members} ranks that share them"
            )
        context: Any = strategy
        if strategy in ("ulysses", "usp"):
            context = "halo" if sight.left is not None else "ring"
        split = Split(q.shape[2], k.shape[2], members)
        return Course(self.tokens, context, split, self.chunk, sight, scores)

    def _check(self, q, k, v, sight: Sight, scores: Scores, sinks, whole: bool) -> None:
        validate.tensors(q, k, v, packed=False)
        validate.numbers(scores.scale, scores.softcap, 0.0, None)
        validate.extras(q, None, sinks, None, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        expected = self.length if whole else self.local_length()
        where = "" if whole else f", rank {self.rank}'s share of {self.length} (see plan.shard)"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.shape[1] != expected:
                raise InvalidInput(
                    f"{name} has {tensor.shape[1]} tokens; expected {expected}{where}"
                )
        if sight.batch not in (1, q.shape[0]):
            raise InvalidInput(
                f"mask is for {sight.batch} sequences; expected 1 or {q.shape[0]}, as q"
            )

    def agree(self, signature: str = "", *, refusal: str | None = None, kept: bool = True) -> None:
        """Compare a call with those of the other ranks, once per signature; one small all-gather.

        A rank that refuses its first call says so to the others, so that all raise. A signature that is not `kept` is
        compared each time.

        Raises:
            InvalidInput: another rank refuses, or is about something else.
        """
        if self.size == 1 or (refusal is None and signature in self.agreed):
            return
        if refusal is not None and self.agreed:
            return  # the others went ahead; they will name this rank when it does not come
        text = ("!" + refusal if refusal is not None else signature).encode()[:WORDS]
        words = torch.zeros(WORDS, dtype=torch.uint8)
        words[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = words.to(self.groups[0].device)
        for group in reversed(self.groups):
            (every,) = group.all_gather(every, "agreement on the call").wait()
        said = [
            bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            for row in every.cpu().view(-1, WORDS)
        ]
        if refusal is not None:
            return
        for rank, theirs in enumerate(said):
            if theirs.startswith("!"):
                raise InvalidInput(f"rank {rank} refuses the call: {theirs[1:]}")
            if theirs.encode() != text:
                raise InvalidInput(
                    f"rank {rank} calls with {theirs}; expected {text.decode()}, as rank {self.rank}"
                )
        if kept:
            self.agreed.add(signature)

    def choose(self, heads_q: int, heads_kv: int, dim: int, itemsize: int, sight: Sight) -> str:
        """The strategy: the plan's own, or what the performance model finds fastest."""
        if self.strategy != "auto":
            return self.strategy
        return self.ranking(heads_q, heads_kv, dim, itemsize, sight)[0].strategy

    def ranking(
        self,
        heads_q: int,
        heads_kv: int,
        dim: int,
        itemsize: int,
        sight: Sight,
        dim_v: int | None = None,
    ) -> list[Any]:
        """What the performance model says of each strategy that this mesh can run, best first."""
        from relampago.distributed.model import MACHINES, Shape, rank_strategies

        name = self.machine or (
            "cpu" if not self.virtual and self.groups[0].device.type == "cpu" else "h200"
        )
        if name not in MACHINES:
            raise InvalidInput(f"machine is {name!r}; expected one of {', '.join(MACHINES)}")
        shape = Shape(heads_q, heads_kv, dim, dim_v or dim, itemsize)
        return rank_strategies(self.tokens, self.shape, shape, sight, MACHINES[name], self.chunk)

    def explain(
        self,
        heads_q: int,
        heads_kv: int,
        dim: int,
        *,
        itemsize: int = 2,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
    ) -> str:
        """Which strategy runs for such shapes, and why: modelled times of all, best first."""
        sight = Sight.of(self.length, causal=causal, window=window, documents=self.documents)
        ranking = self.ranking(heads_q, heads_kv, dim, itemsize, sight)
        chosen = self.choose(heads_q, heads_kv, dim, itemsize, sight)
        why = (
            "asked for"
            if self.strategy != "auto"
            else f"fastest in the model of {ranking[0].machine}"
        )
        lines = [f"{chosen}: {why}", *(str(estimate) for estimate in ranking)]
        return "\n".join(lines)

    def _rank(self, rank: int | None) -> int:
        if rank is None:
            return self.rank
        if not 0 <= rank < self.size:
            raise InvalidInput(f"rank is {rank}; expected 0 to {self.size - 1}")
        return rank


def plan_of(token: str) -> ContextParallelPlan:
    """The plan that crossed an op's border as its token."""
    plan = _plans.get(token)
    if plan is None:
        raise InvalidInput(
            f"plan {token!r} is gone; expected it to be kept as long as what was compiled with it"
        )
    return plan


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: ContextParallelPlan, dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        layout = plan.tokens
        longest = max(layout.counts)
        moved = local.movedim(dim, 0)
        room = moved.new_zeros((longest - moved.shape[0], *moved.shape[1:]))
        every = torch.cat([moved, room])
        for group in reversed(plan.groups):
            (every,) = group.all_gather(every, "unshard").wait()
        every = every.reshape(plan.size * longest, *moved.shape[1:])
        order = torch.empty(plan.length, dtype=torch.int64)
        for rank in range(plan.size):
            at = layout.positions(rank)
            order[at] = rank * longest + torch.arange(at.numel())
        return every.index_select(0, order.to(local.device)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.plan.shard(gradient, ctx.dim), None, None
