"""A change to all of the table's plans, so that checks and endurance run with what no row has yet."""

from __future__ import annotations

import os
from dataclasses import replace

from relampago.plan import Plan
from relampago.problem import Problem
from relampago.select import by_name

NAME = "HOPPER_CHANGE"  # of the environment, which jobs inherit
TALL = {"block_q": 128, "block_k": 192, "stages": 2, "chain": 0}
CHANGES = {
    "named": {"named": 1},
    "hold": {"hold": 1},
    "tall": TALL | {"pingpong": 2, "pin": 8, "lazy": 1},
}
TALL_DIMS = {64, 128}  # other head dims are cut in two themselves, or have no room


def ask_for(name: str) -> None:
    """Let the jobs to come run with a change."""
    if name not in CHANGES:
        raise SystemExit(f"change: got {name!r}; expected one of {sorted(CHANGES)}")
    os.environ[NAME] = name


def apply() -> None:
    """Make the change that was asked for, if one was."""
    if (name := os.environ.get(NAME)) is None:
        return
    backend = type(by_name("gluon_sm90"))
    table = backend.plan

    def plan(self: object, p: Problem) -> Plan:
        change = CHANGES[name] if name != "tall" or {p.dim, p.dim_v} <= TALL_DIMS else {}
        return replace(table(self, p), **change)

    backend.plan = plan
