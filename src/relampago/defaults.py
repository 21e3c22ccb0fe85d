"""What calls take that do not say otherwise: `using` on this thread, `set_batch_invariant` for the process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from relampago import validate
from relampago.plan import Plan
from relampago.select import by_name


class Forced(threading.local):
    """What `using` asks for, per thread; a ContextVar would break a torch.compile graph."""

    backend: str | None = None
    plan: tuple[tuple[str, int], ...] = ()
    batch_invariant: bool | None = None
    precision: str | None = None

    def now(self) -> tuple[Any, ...]:
        """Backend, plan and precision."""
        return self.backend, self.plan, self.precision


forced = Forced()
_everywhere = os.environ.get("RELAMPAGO_BATCH_INVARIANT", "0") == "1"


@contextlib.contextmanager
def using(
    *, backend: str | None = None, plan: Plan | None = None, batch_invariant: bool | None = None,
    precision: str | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside, on this thread, calls that do not say otherwise use this backend, plan, batch invariance and precision.

    Nothing falls back. Shards, caches and statistics have the precision of their tensors whatever stands here.

    Raises:
        InvalidInput: there is no backend or precision of that name.
    """
    if backend is not None:
        by_name(backend)
    validate.precision(precision)
    outer = (forced.backend, forced.plan, forced.batch_invariant, forced.precision)
    forced.backend = backend or outer[0]
    forced.plan = plan.items() if plan else outer[1]
    forced.batch_invariant = outer[2] if batch_invariant is None else bool(batch_invariant)
    forced.precision = precision or outer[3]
    try:
        yield
    finally:
        forced.backend, forced.plan, forced.batch_invariant, forced.precision = outer


def set_batch_invariant(on: bool) -> bool:
    """Whether calls of the whole process are batch-invariant where neither they nor `using` say; returns what was.

    RELAMPAGO_BATCH_INVARIANT=1 in the environment starts a process with it on.
    """
    global _everywhere
    before, _everywhere = _everywhere, bool(on)
    return before


def deterministic(asked: bool | None) -> bool:
    """Whether a call is, that says so or None."""
    return torch.are_deterministic_algorithms_enabled() if asked is None else bool(asked)


def invariant(asked: bool | None) -> bool:
    """Whether a call is batch-invariant, that says so or None."""
    asked = forced.batch_invariant if asked is None else asked
    return _everywhere if asked is None else bool(asked)
