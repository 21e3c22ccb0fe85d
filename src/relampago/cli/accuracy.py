"""How far results are from exact ones: the reference in fp64, on blocks of rows where the whole would not fit.

Rows at the start, in the middle and at the end are computed against all keys; gradients only where the N×N matrix fits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import relampago as rl
from relampago.cases import Case
from relampago.cli.contestants import Contestant, Results, contestant

BLOCK = 16  # rows
WHOLE = 2**25  # scores in fp64 that may be held, several times over
PART = 2**28  # elements of fp64 keys and values, repeated for query heads
_SLICED = {"causal", "window", "scale", "softcap"}


class Oracle:
    """Exact results of a case; what cannot be afforded is None."""

    def __init__(self, case: Case, tensors: Results, options: dict[str, Any], dout: Tensor | None):
        self.out: list[tuple[slice, Tensor]] = []
        self.gradients: Results | None = None
        double = tuple(t.double() for t in tensors)
        if _scores(case) <= WHOLE:
            exact = contestant(
                "reference", case, double, options, None if dout is None else dout.double()
            )
            assert exact is not None
            out, *gradients = exact.call()
            self.out = [(slice(None), out)]
            self.gradients = tuple(gradients) or None
        elif not case.packed and not set(options) - _SLICED:
            q, k, v = double
            held = q.shape[0] * q.shape[2] * k.shape[1] * (k.shape[3] + v.shape[3])
            if held <= PART:
                self.out = [(rows, _rows(rows, q, k, v, options)) for rows in _blocks(q.shape[1])]

    def errors(self, entrant: Contestant, results: Results) -> dict[str, dict[str, float]]:
        """Largest and root-mean-square error of output and gradients, by name; empty if nothing is known."""
        if not entrant.exact:
            return {}
        out, *gradients = (entrant.unpad(t) for t in results)
        found = {}
        if self.out:
            pairs = [(out[:, rows] if out.ndim == 4 else out[rows], t) for rows, t in self.out]
            found["out"] = _error(pairs)
        if self.gradients is not None:
            names = ("dq", "dk", "dv")
            for name, got, exact in zip(names, gradients, self.gradients, strict=True):
                found[name] = _error([(got, exact)])
        return found


def _scores(case: Case) -> int:
    if isinstance(case.len_q, tuple) and isinstance(case.len_k, tuple):
        return case.heads * sum(a * b for a, b in zip(case.len_q, case.len_k, strict=True))
    assert isinstance(case.len_q, int)
    assert isinstance(case.len_k, int)
    return case.batch * case.heads * case.len_q * case.len_k


def _blocks(length: int) -> list[slice]:
    starts = {0, max(0, length // 2 - BLOCK // 2), max(0, length - BLOCK)}
    return [slice(start, min(start + BLOCK, length)) for start in sorted(starts)]


def _rows(rows: slice, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    offset = rows.start + k.shape[1] - q.shape[1]
    return rl.partial(q[:, rows], k, v, offset=offset, backend="reference", **options)[0]


def _error(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    difference = torch.cat([(got.double() - exact).flatten() for got, exact in pairs])
    return {
        "max": difference.abs().max().item(),
        "rms": difference.square().mean().sqrt().item(),
    }
