"""What a call did, to be done again for a like call: the launches and the ops, with the tensors as places to fill.

A call's kernels, grids and numbers follow from what its key says: shapes, strides, dtypes, alignment and options. So
the second call of a key is written down, every ATen op and every Triton launch of it, and from the third on the
same is done with other tensors, without deciding anything anew. What cannot be written down (data read on the host, an
unknown tensor, a launch that `note` was not told of) makes a call one that always goes the whole way. A tape holds no
tensor. On GPUs only: elsewhere a call's steps are not launches.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from relampago.problem import Device

MOST = 4096  # keys that are kept
TRIES = 2  # to write a call down
ALIGNED = 16  # bytes; Triton compiles for an address that is a multiple apart, and TMA needs one
Results = Any  # a tuple of tensors and None


class _Here(threading.local):
    """The tape that this thread writes."""

    tape: Tape | None = None


_here = _Here()


class Like:
    """What is known of calls that are alike."""

    __slots__ = ("played", "times", "tries", "why_not")

    def __init__(self) -> None:
        self.times = self.tries = 0
        self.played: Played | None = None
        self.why_not = ""  # the last reason that they could not be written down

    def __call__(
        self, given: Sequence[Tensor], anew: Callable[[Sequence[Tensor]], Results]
    ) -> Results:
        """The results for these tensors: as before, else by `anew`."""
        if self.played is not None:
            found = self.played(given)
            return anew(given) if found is None else found
        self.times += 1
        first = self.times == 1  # it compiles, and fills caches
        return anew(given) if first or self.tries == TRIES else self._written(given, anew)

    def _written(
        self, given: Sequence[Tensor], anew: Callable[[Sequence[Tensor]], Results]
    ) -> Results:
        try:
            from relampago.start import NotAgain, counting, watched
        except ImportError as why:  # an older Triton, or one without a driver for NVIDIA's
            self.why_not, self.tries = str(why), TRIES
            return anew(given)
        if watched():
            return anew(given)
        self.tries = min(self.tries + 1, TRIES)
        own = [t.detach() for t in given]  # what is one tensor now may be two the next time
        tape = Tape(own)
        _here.tape = tape
        try:
            with counting() as count, tape:
                results = anew(own)
        finally:
            _here.tape = None
        try:
            if count is None or count.launches != tape.launches:
                raise NotAgain(f"not all launches are known: {tape.launches} are")
            self.played = Played(tape, results)
        except NotAgain as why:
            self.why_not = str(why)
        return results


class Tape(TorchDispatchMode):
    """Writes down what is done while it is active."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = len(given)
        self.tensors = list(given)  # by place
        self.kept: list[Tensor] = []  # others: an id must not be taken again
        self.places = {id(t): at for at, t in enumerate(given)}
        self.steps: list[Any] = []
        self.launches = 0
        self.device = -1
        self.fault = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if _here.tape is self and not self.fault:
            self._op(func, args, kwargs or {}, found)
        return found

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        made = found if isinstance(found, tuple) else (found,)
        if func is torch.ops.aten.detach.default and self.places.get(id(args[0]), -1) >= self.given:
            self.places[id(found)] = self.places[id(args[0])]  # an alias of what was made here
            self.kept += made
            return
        if func.namespace != "aten" or not all(isinstance(t, Tensor) for t in made):
            self.fault = f"{func} gives more than tensors"
        elif not _UNSURE.isdisjoint(func.tags):
            self.fault = f"{func} depends on data or chance"
        elif any(t.device != self.tensors[0].device for t in made):
            self.fault = f"{func} gives a tensor on another device"
        elif any(isinstance(v, Tensor) for a in args if isinstance(a, (tuple, list)) for v in a):
            self.fault = f"{func} takes a list of tensors"
        elif any(
            isinstance(v, Tensor) and id(v) not in self.places for v in (*args, *kwargs.values())
        ):
            self.fault = f"{func} takes a tensor of unknown origin"
        elif func is torch.ops.aten.empty.memory_format and len(args) == 1:  # what every call has
            self.steps.append(Supply(empty(args[0], kwargs), self._place(made[0])))
        else:
            self.steps.append(Op(func, args, kwargs, self.places, [self._place(t) for t in made]))

    def _place(self, t: Tensor) -> int:
        """Where a tensor stands, from now on if it is new."""
        if id(t) not in self.places:
            self.places[id(t)] = len(self.tensors)
            self.tensors.append(t)
        return self.places[id(t)]

    def launched(self, compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """A launch was made."""
        from relampago.start import Start, here

        self.launches += 1
        try:
            self.steps.append(Start(compiled, grid, args, self.places))
            device, _ = here()
        except Exception as why:  # whatever is otherwise in another Triton
            self.fault = f"{type(why).__name__}: {why}"
            return
        if self.device not in (-1, device):
            self.fault = "launches on two devices"
        self.device = device

    def supplied(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that each call asks for anew."""
        _here.tape = None
        try:
            found = make()
        finally:
            _here.tape = self
        self.steps.append(Supply(make, self._place(found)))
        return found


_UNSURE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}


def note(compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
    """Tell who writes that a kernel was launched: what Triton compiled, its grid, all its arguments."""
    if _here.tape is not None:
        _here.tape.launched(compiled, grid, args)


def supplied(make: Callable[[], Tensor]) -> Tensor:
    """What `make` gives, which like calls are to ask for again: a tensor that outlives its call."""
    return make() if _here.tape is None else _here.tape.supplied(make)


class Supply:
    """A tensor that is asked for."""

    __slots__ = ("make", "place")

    def __init__(self, make: Callable[[], Tensor], place: int) -> None:
        self.make, self.place = make, place

    def __call__(self, places: list[Any], stream: int) -> None:
        """Ask, and put it in its place."""
        places[self.place] = self.make()


class Op:
    """An ATen op, but for its tensors."""

    __slots__ = ("args", "call", "holes", "kwargs", "made", "named")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: dict[int, int],
        made: list[int],
    ) -> None:
        self.call = func
        self.holes = [(at, places[id(a)]) for at, a in enumerate(args) if isinstance(a, Tensor)]
        self.named = [(name, places[id(a)]) for name, a in kwargs.items() if isinstance(a, Tensor)]
        self.args = [None if isinstance(a, Tensor) else a for a in args]
        self.kwargs = {name: a for name, a in kwargs.items() if not isinstance(a, Tensor)}
        self.made = made

    def __call__(self, places: list[Any], stream: int) -> None:
        """Do it with what stands in its tensors' places."""
        args, kwargs = self.args, self.kwargs
        if self.holes:
            args = args.copy()
            for at, place in self.holes:
                args[at] = places[place]
        if self.named:
            kwargs = {**kwargs, **{name: places[place] for name, place in self.named}}
        found = self.call(*args, **kwargs)
        for place, t in zip(
            self.made, found if isinstance(found, tuple) else (found,), strict=True
        ):
            places[place] = t


def empty(size: Sequence[int], kwargs: dict[str, Any]) -> Callable[[], Tensor]:
    """What makes an empty tensor: by Inductor's short way on the current device, where torch has it."""
    given = {name: value for name, value in kwargs.items() if value}
    short = None
    if set(given) == {"dtype", "device"}:
        guards = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
        short = getattr(guards, f"_empty_strided_{given['device'].type}", None)
    if short is None:
        return functools.partial(torch.empty, size, **given)
    steps = [math.prod(size[at + 1 :]) for at in range(len(size))]
    return functools.partial(short, tuple(size), tuple(steps), given["dtype"])


class Played:
    """A tape that can be played."""

    __slots__ = ("blank", "device", "hooks", "results", "steps", "watched", "where")

    def __init__(self, tape: Tape, results: Results) -> None:
        from relampago.start import NotAgain, Start, here, watched

        if tape.fault:
            raise NotAgain(tape.fault)
        if not tape.launches:
            raise NotAgain("nothing is launched")
        if any(t is not None and id(t) not in tape.places for t in results):
            raise NotAgain("a result is of unknown origin")
        self.results = [None if t is None else tape.places[id(t)] for t in results]
        self.steps, self.device = tuple(tape.steps), tape.device
        self.hooks = [s.hooks for s in self.steps if isinstance(s, Start)]
        self.blank = [None] * (len(tape.tensors) - tape.given)
        self.watched, self.where = watched, here

    def __call__(self, given: Sequence[Tensor]) -> Results | None:
        """The results for these tensors; None if the call must go the whole way this time."""
        device, stream = self.where()
        if device != self.device or self.watched() or any(self.hooks):
            return None
        places = [*given, *self.blank]
        for step in self.steps:
            step(places, stream)
        return tuple([None if at is None else places[at] for at in self.results])


_known: dict[Any, Like] = {}


def again(name: str, args: tuple[Any, ...], anew: Callable[..., Results]) -> Results:
    """An op's results for these arguments: as for a like call before, else by `anew(*args)`.

    Args:
        name: of the op.
        args: tensors, None, lists of tensors or numbers, and hashable values; the first is a tensor.
        anew: what takes them.
    """
    first = args[0]
    if torch.compiler.is_compiling() or Device.of(first.device).kind != "cuda":
        return anew(*args)  # Dynamo looks into the Python of an op that runs after a graph break
    key: list[Any] = [name, settings(first)]
    tensors: list[Tensor] = []
    for value in args:
        if isinstance(value, Tensor):
            tensors.append(value)
            key.append(kind_of(value))
        elif type(value) is not list:
            key.append(value)
        elif value and isinstance(value[0], Tensor):
            tensors += value
            key.append(tuple(map(kind_of, value)))
        else:
            key.append(tuple(value))

    def whole(given: Sequence[Tensor]) -> Results:
        rest = iter(given)
        return anew(*[
            next(rest) if isinstance(value, Tensor)
            else [next(rest) if isinstance(v, Tensor) else v for v in value] if type(value) is list
            else value
            for value in args
        ])  # fmt: skip

    return like(tuple(key))(tensors, whole)


def like(key: Any) -> Like:
    """What is known of the calls of a key."""
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST:
            _known.clear()
        found = _known[key] = Like()
    return found


def kind_of(t: Tensor) -> tuple[Any, ...]:
    """All of a tensor that kernels and their numbers depend on."""
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNED == 0


def settings(t: Tensor) -> bool:
    """Of torch's settings, those that a launch on such tensors depends on."""
    return t.dtype == torch.float32 and t.is_cuda and bool(torch.backends.cuda.matmul.allow_tf32)
