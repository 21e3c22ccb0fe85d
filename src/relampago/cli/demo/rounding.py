"""Equal within rounding, as a rule: the distance from exact results against that of standard attention.

Exact is the same model in fp64. Two fp32 computations of the same thing in another order never agree to the last bit;
what they may differ by is measured here and not guessed: standard attention's own distance from exact is the yardstick.
The rule is that of the test suite (tests/budget.py): twice standard's in the root mean square, four times in the
largest entry, which chance moves more, plus one rounding of the largest entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor


class Distance(NamedTuple):
    """How far two tensors are apart."""

    largest: float
    rms: float


class Agreement(NamedTuple):
    """Three computations of the same thing: ours, standard attention's, and in fp64."""

    ours_standard: Distance
    ours_exact: Distance
    standard_exact: Distance
    allowed: Distance  # of ours from exact

    @property
    def holds(self) -> bool:
        """Whether ours is as near to exact as the rule asks."""
        return (
            self.ours_exact.largest <= self.allowed.largest
            and self.ours_exact.rms <= self.allowed.rms
        )

    def table(self, title: str) -> Table:
        """To print."""
        table = Table("", "largest", "root mean square", title=title, title_justify="left")
        for label, distance in (
            ("relampago to standard, fp32", self.ours_standard),
            ("standard fp32 to fp64", self.standard_exact),
            ("relampago fp32 to fp64", self.ours_exact),
            ("allowed", self.allowed),
        ):
            table.add_row(label, f"{distance.largest:.2e}", f"{distance.rms:.2e}")
        return table


def compare(ours: Tensor, standard: Tensor, exact: Tensor) -> Agreement:
    """How far three computations of the same thing are apart; `exact` may hold only the first rows."""
    n = exact.shape[0]
    rounding = torch.finfo(ours.dtype).eps * exact.abs().max().item()
    of_standard = _distance(standard[:n], exact)
    return Agreement(
        ours_standard=_distance(ours, standard),
        ours_exact=_distance(ours[:n], exact),
        standard_exact=of_standard,
        allowed=Distance(4 * of_standard.largest + rounding, 2 * of_standard.rms + rounding),
    )


def _distance(a: Tensor, b: Tensor) -> Distance:
    difference = a.double() - b.double()
    return Distance(difference.abs().max().item(), difference.square().mean().sqrt().item())
