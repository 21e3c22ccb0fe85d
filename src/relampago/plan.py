"""Plans: tile sizes and the like, apart from the algorithms. Tables in `tuning/tables`, first matching row wins."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import Any

from relampago.errors import InvalidInput
from relampago.problem import Problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one launch is cut. What a backend does not use stays at its default.

    Args:
        block_q: rows of a query tile.
        block_k: keys of a key tile; 160 and 192 run as two tiles, of 128 and what is left (gluon's forward; not with
            head dims that are cut in two themselves, nor with chain, which they take precedence over).
        warps: warps of a block (GPU).
        stages: depth of the software pipeline (GPU).
        tma: 1 to load tiles by TMA where they lie dense (sm90 and newer), 2 to add up dQ by it too.
        fused: 1 if the backward's kernel over keys may also add up dQ, atomically (GPU).
        ordered: 1 if it adds up dQ in the order of the keys where sums are to be deterministic, and no kernel of its
            own does (gluon; see sm90_order.py).
        split: 1 if dK and dV take a launch each, with twice the registers (GPU, large head dims).
        schedule: who hands out tiles: 0 the hardware, 1 a fixed rule, 2 a counter (gluon; see its schedule.py).
        pingpong: whether warpgroups take turns at issuing their products: 1 the next may when these are issued, 2 when
            S is there (gluon).
        ahead: which products of the backward run a block ahead or late, in bits (gluon; see its sm90_backward.py).
        pin: how much of the softmax is pinned under the product before it: 1 all of it, 2 half of the weights at
            least, 8 the maxima; 0 what the compiler likes (gluon; costs a few instructions).
        lazy: 1 if sums are rescaled only when a maximum grew by more than 8 in base 2, 2 if always, but later, under
            the next scores (gluon).
        chain: 1 if the next tile's first scores are under way with this one's last product (gluon; see sm90_chain.py).
        reach: MiB of keys and values that heads in flight share under a mask; 0: what fits the L2 cache (gluon).
        promote: in how many parts of the head dim FP8 products are added to sums in fp32, a block of keys at a time: 1,
            2 or 4; 0 leaves sums to the tensor cores' fewer bits (gluon; see its sm90_fp8.py).
        span: keys of a span, a multiple of block_k, whose results are folded in order (triton, batch-invariant); 0: one
            span has all keys.
        halves: 1 if values come in tiles of half a block's keys, of which there is one more than `stages` (gluon; not
            with chain, which it takes precedence over).
        hold: 1 if queries stay in registers while keys go by (gluon).
        rotate: 1 if tiles that see every key begin at different ones, so that they do not ask for the same (gluon).
    """

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2
    tma: int = 0
    fused: int = 0
    ordered: int = 0
    split: int = 0
    schedule: int = 0
    pingpong: int = 0
    ahead: int = 0
    pin: int = 0
    rotate: int = 0
    lazy: int = 0
    chain: int = 0
    reach: int = 0
    promote: int = 0
    span: int = 0
    halves: int = 0
    hold: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in ("block_q", "block_k", "warps", "stages") else 0
            if not isinstance(value, int) or value < least:
                raise InvalidInput(
                    f"plan: {name} is {value!r}; expected an int of at least {least}"
                )
        if self.span % self.block_k:
            raise InvalidInput(
                f"plan: span is {self.span}; expected a multiple of block_k, {self.block_k}"
            )

    def items(self) -> tuple[tuple[str, int], ...]:
        """As pairs, for `Facts.plan`."""
        return tuple(asdict(self).items())


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: when it applies, the plan, and where it was measured."""

    when: tuple[tuple[str, Any], ...]
    plan: Plan
    source: str

    def matches(self, p: Problem) -> bool:
        """Whether every condition holds. `x_max` and `x_min` bound; a list means one of; else equality."""
        return all(_holds(p, name, value) for name, value in self.when)


def _holds(p: Problem, name: str, value: Any) -> bool:
    if name.endswith("_max"):
        return getattr(p, name[:-4]) <= value
    if name.endswith("_min"):
        return getattr(p, name[:-4]) >= value
    got = getattr(p, name)
    return got in value if isinstance(value, tuple) else got == value


@functools.lru_cache(maxsize=64)
def table(arch: str) -> dict[str, tuple[Row, ...]]:
    """The rows of an architecture's table by kernel, such as "cpu.forward"; empty if there is no such table."""
    file = resources.files("relampago") / "tuning" / "tables" / f"{arch}.toml"
    if not file.is_file():
        return {}
    loaded = tomllib.loads(file.read_text(encoding="utf-8"))
    return {
        f"{backend}.{kernel}": tuple(_row(row, f"{arch}.toml {backend}.{kernel}") for row in rows)
        for backend, kernels in loaded.items()
        for kernel, rows in kernels.items()
    }


def _row(row: dict[str, Any], where: str) -> Row:
    known = {field.name for field in fields(Plan)}
    if set(row) - {"when", "plan", "from"} or set(row["plan"]) - known or "from" not in row:
        raise InvalidInput(
            f"{where}: row {row} needs plan (of {sorted(known)}), from, and may have when"
        )
    when = tuple((name, _tuples(value)) for name, value in row.get("when", {}).items())
    return Row(when, Plan(**row["plan"]), row["from"])


def _tuples(value: Any) -> Any:
    """Lists as tuples: `mods = [[]]` is one of no mods."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def first_match(
    archs: tuple[str, ...], kernel: str, p: Problem, allows: Callable[[Plan], bool] | None = None
) -> Plan:
    """The plan of the first row that matches, in the first of these tables that has the kernel.

    allows: whether a plan may be taken; all may if it is not given.
    """
    for arch in archs:
        for row in table(arch).get(kernel, ()):
            if row.matches(p) and (allows is None or allows(row.plan)):
                return row.plan
    raise InvalidInput(f"no row of {archs} matches {kernel} for {p}")
