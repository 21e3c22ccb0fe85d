"""A launch made once more with other addresses, without Triton's way to it.

Triton binds a launch's arguments, looks at each, makes TMA's maps and hands all to one function in C. What it handed
over is kept here, with holes where addresses stood; filling them is all that a like launch needs. What is relied on
(Triton 3.6 to 3.9): `CompiledKernel.run` is a `CudaLauncher` whose `launch` is that function, or a closure over it in
which it is called `launcher`. Where something is otherwise, `Start.of` raises `NotAgain`, and launches go Triton's way.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

MOST_MAPS = 256  # of one argument; a map is 128 bytes
STREAM = object()  # stands for a launch's stream
Places = Sequence[Any]  # the tensors of a call: its own, then those it makes


class NotAgain(Exception):
    """Why a launch cannot be made this way."""


class Address(NamedTuple):
    """Stands for a tensor where only its address counts."""

    at: int

    def data_ptr(self) -> int:
        """The address."""
        return self.at


class Map:
    """TMA's map of a tensor: nothing but numbers, made once for each address."""

    __slots__ = ("facts", "known", "place", "view")

    def __init__(self, view: Any, facts: Any, place: int) -> None:
        self.view, self.facts, self.place = copy.copy(view), facts, place
        self.view.base = None
        address = view.base.data_ptr()
        self.known: dict[int, Any] = {address: self._made(address)}

    def __call__(self, places: Places) -> Any:
        """The map of what stands in its place."""
        address = places[self.place].data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MOST_MAPS:
                self.known.clear()
            found = self.known[address] = self._made(address)
        return found

    def _made(self, address: int) -> Any:
        view = copy.copy(self.view)
        view.base = Address(address)
        make = nvidia.make_tensordesc_arg
        rest = ((),) * (make.__code__.co_argcount - 2)  # 3.9 hands it what comes before, unused
        return make(view, self.facts, *rest)[0]


class Form:
    """Arguments with holes: addresses, maps, and tuples that have holes themselves."""

    __slots__ = ("addresses", "args", "others")

    def __init__(self, args: Sequence[Any], places: dict[int, int], maps: Iterator[Map]) -> None:
        self.args = list(args)
        self.addresses: list[tuple[int, int]] = []
        self.others: list[tuple[int, Callable[[Places], Any]]] = []
        for at, value in enumerate(args):
            if isinstance(value, Tensor):
                if id(value) not in places:
                    raise NotAgain("an argument is a tensor of unknown origin")
                self.addresses.append((at, places[id(value)]))
            elif type(value).__name__ == "PyCUtensorMap":
                self.others.append((at, next(maps)))
            elif isinstance(value, (tuple, list)):
                inner = Form(value, places, maps)
                if inner.addresses or inner.others:
                    self.others.append((at, inner.tuple))
        for at, _ in (*self.addresses, *self.others):
            self.args[at] = None

    def filled(self, places: Places) -> list[Any]:
        """The arguments with what stands in these places."""
        args = self.args.copy()
        for at, place in self.addresses:
            args[at] = places[place].data_ptr()
        for at, fill in self.others:
            args[at] = fill(places)
        return args

    def tuple(self, places: Places) -> tuple[Any, ...]:
        """The same where Triton has a tuple."""
        return tuple(self.filled(places))


class Start:
    """One launch, but for the addresses and the stream."""

    __slots__ = ("compiled", "form", "function", "stream_at")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        places: dict[int, int],
    ) -> None:
        """Of a launch that was just made; places says where each tensor stands, by its id."""
        self.function, given = handed_over(compiled, grid, args)
        views = [arg for arg in args if hasattr(arg, "block_shape")]
        facts = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * len(views)
        if any(id(view.base) not in places for view in views):
            raise NotAgain("a descriptor is of a tensor of unknown origin")
        maps = (Map(v, f, places[id(v.base)]) for v, f in zip(views, facts, strict=True))
        self.form = Form(given, places, maps)
        self.stream_at = given.index(STREAM)
        self.compiled = compiled  # Triton 3.9 unloads what nobody holds

    @property
    def hooks(self) -> list[Any]:
        """What the kernel's user wants to run before each launch; empty, as a rule."""
        return self.compiled.src.fn.pre_run_hooks

    def __call__(self, places: Places, stream: int) -> None:
        """Launch."""
        args = self.form.filled(places)
        args[self.stream_at] = stream
        self.function(*args)


def handed_over(
    compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...]
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function in C that launches, and what Triton's launcher hands to it; nothing is launched."""
    launcher = compiled.run
    if type(launcher) is not nvidia.CudaLauncher or not hasattr(launcher, "launch"):
        raise NotAgain(f"the launcher is a {type(launcher).__name__}")
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise NotAgain("the kernel needs memory of its own")
    if getattr(launcher, "gsan_enabled", False):
        raise NotAgain("each launch is numbered")
    found: list[tuple[Any, ...]] = []

    def catch(*given: Any) -> None:
        found.append(given)

    function, shadow = launcher.launch, copy.copy(launcher)
    shadow.launch = catch
    if isinstance(function, FunctionType):
        code, cells = function.__code__, function.__closure__ or ()
        if "launcher" not in code.co_freevars:
            raise NotAgain("no closure over a launcher")
        at = code.co_freevars.index("launcher")
        function, changed = (
            cells[at].cell_contents,
            (*cells[:at], CellType(catch), *cells[at + 1 :]),
        )
        shadow.launch = FunctionType(code, launcher.launch.__globals__, closure=changed)
    shadow(*grid, STREAM, compiled.function, compiled.packed_metadata, None, None, None, *args)
    return function, found[0]


def watched() -> bool:
    """Whether someone has set what Triton heeds at each launch: hooks, debugging, instrumentation, other passes."""
    runtime = knobs.runtime
    return bool(
        _hooked(runtime.launch_enter_hook)
        or _hooked(runtime.launch_exit_hook)
        or runtime.debug
        or runtime.add_stages_inspection_hook is not None
        or knobs.compilation.instrumentation_mode
    )


def _hooked(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


@contextlib.contextmanager
def counting() -> Iterator[list[Any] | None]:
    """Inside, every launch of this process adds to the list; None where Triton has no chain of hooks."""
    seen: list[Any] = []
    hooks: Any = knobs.runtime.launch_enter_hook
    if not hasattr(hooks, "add"):
        yield None
        return
    hooks.add(seen.append)
    try:
        yield seen
    finally:
        hooks.remove(seen.append)


def here() -> tuple[int, int]:
    """The current device and its current stream."""
    active: Any = driver.active
    device = active.get_current_device()
    return device, active.get_current_stream(device)
