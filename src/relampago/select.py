"""The choice of a backend: the first whose `why_not` gives no reason; one asked for by name never falls back."""

from __future__ import annotations

import functools

from relampago.backends import BACKENDS, Backend
from relampago.errors import InvalidInput, Unsupported
from relampago.problem import Problem


def names() -> tuple[str, ...]:
    """The backends' names, in order of preference."""
    return tuple(backend.name for backend in BACKENDS)


def by_name(name: str) -> Backend:
    """A backend by name."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise InvalidInput(f"backend is {name!r}; expected one of {', '.join(names())}")


def refusals(p: Problem) -> dict[str, str | None]:
    """Each backend's reason not to run a problem; None where it can."""
    return {backend.name: backend.why_not(p) for backend in BACKENDS}


@functools.lru_cache(maxsize=4096)
def choose(p: Problem, name: str | None = None) -> Backend:
    """The backend that runs a problem, or `Unsupported` with every reason."""
    for backend in BACKENDS if name is None else (by_name(name),):
        if backend.why_not(p) is None:
            return backend
    if name is not None:
        raise Unsupported(f"backend {name!r} cannot run  {p}\n  {name}  {by_name(name).why_not(p)}")
    width = max(map(len, names()))
    reasons = "\n".join(f"  {who:{width}}  {why}" for who, why in refusals(p).items())
    raise Unsupported(f"no backend can run  {p}\n{reasons}")
