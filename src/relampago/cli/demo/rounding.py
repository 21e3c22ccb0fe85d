"""Equal within rounding, as a rule: the distance from exact results may be twice that of standard attention.

Exact is the same model in fp64. Two fp32 computations of the same thing in another order never agree to the last bit;
what they may differ by is measured here and not guessed: standard attention's own distance from exact is the yardstick.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Agreement(NamedTuple):
    """Largest absolute differences."""

    ours_standard: float
    ours_exact: float
    standard_exact: float
    bound: float  # twice standard's distance from exact, and one rounding of the largest entry

    @property
    def holds(self) -> bool:
        """Whether our distance from exact is within the bound."""
        return self.ours_exact <= self.bound

    def rows(self) -> list[tuple[str, str]]:
        """To print."""
        return [
            ("largest |relampago - standard|", f"{self.ours_standard:.2e}"),
            ("largest |standard - fp64|", f"{self.standard_exact:.2e}"),
            ("largest |relampago - fp64|", f"{self.ours_exact:.2e}"),
            ("allowed (2 x standard's + 1 rounding)", f"{self.bound:.2e}"),
        ]


def compare(ours: Tensor, standard: Tensor, exact: Tensor) -> Agreement:
    """How far three computations of the same thing are apart; `exact` may hold only the first rows."""
    n = exact.shape[0]
    rounding = torch.finfo(ours.dtype).eps * exact.abs().max().item()
    of_standard = _largest(standard[:n], exact)
    return Agreement(
        ours_standard=_largest(ours, standard),
        ours_exact=_largest(ours[:n], exact),
        standard_exact=of_standard,
        bound=2 * of_standard + rounding,
    )


def _largest(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()
