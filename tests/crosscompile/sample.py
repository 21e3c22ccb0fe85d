"""What the newest Triton compiles too: every kernel, architecture and feature once; the pinned one compiles all.

A test is in the sample unless it or its parameters are `pinned`. Of parameters that take the compiler along the same
way those stay which use most of it. Of rows those stay which are the first with some number of a plan's or some head
dims: the others put together what these show one by one. Architectures but Hopper have one row each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest

from relampago.plan import Row


def pinned(*values: Any) -> Any:
    """Parameters that the newest Triton is spared."""
    return pytest.param(*values, marks=pytest.mark.pinned)


def spared(params: Iterable[Any], kept: Iterable[str]) -> list[Any]:
    """Parameters of which only those named by their ids are in the sample."""
    kept = set(kept)
    return [p if p.id in kept else _spared(p) for p in params]


def _spared(param: Any) -> Any:
    return pytest.param(*param.values, id=param.id, marks=pytest.mark.pinned)


def first_of_each(params: Iterable[Any], *fields: str) -> list[str]:
    """Ids of the parameters whose row is the first with some number of its plan, some head dims or some name beside it.

    Of the plan only these fields count, and no head dims, where fields are named.
    """
    seen: set[Any] = set()
    found = []
    for param in params:
        row = next(value for value in param.values if isinstance(value, Row))
        when, plan = dict(row.when), asdict(row.plan)
        del plan["reach"]  # compiles nothing
        shown = {(name, plan[name]) for name in fields or plan}
        if not fields:
            shown |= {("dims", when.get("dim_max"), when.get("dim_v_max"))}
        shown |= {value for value in param.values if isinstance(value, str)}
        if not shown <= seen:
            found.append(param.id)
        seen |= shown
    return found
