"""The error budget: one function, no hand-made tolerance anywhere.

In the root mean square, the error against the fp64 oracle may be at most twice that of standard attention in
the same dtype, plus one rounding of the largest entry; the largest error, which chance moves more, may be twice
that again, and no more is asked of a single number. The gradients of a call are one family: they are sums over
the same dS, and chance favours now one of them, now another, so the family's worst relative error counts for
each. In fp64, which the oracle itself has, the error of fp32 scaled by the ratio of roundings stands for both
results' errors: it counts twice for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

Named = dict[str, Tensor]


def check(label: str, got: Named, standard: Named, oracle: Named, dtype: torch.dtype) -> None:
    """Assert that every result in `got` is as near to the fp64 oracle as the budget asks."""
    gradients = [name for name in oracle if name not in ("out", "lse")]
    for family in (
        *([n] for n in ("out", "lse") if n in oracle),
        *([gradients] if gradients else []),
    ):
        rounding = torch.finfo(dtype).eps * max(
            (_largest(oracle[n].detach()) for n in family), default=0.0
        )
        for name in family:
            _same_specials(f"{label} {name}", got[name], oracle[name])
        for norm, factor in ((_rms, 2.0), (_largest, 4.0)):
            sizes = {name: norm(oracle[name].detach().double()) for name in family}
            errors = {name: norm(_difference(standard[name], oracle[name])) for name in family}
            worst = max((errors[n] / sizes[n] for n in family if sizes[n]), default=0.0)
            if dtype == torch.float64:
                worst *= 4 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            for name in family:
                if norm is _rms and oracle[name].numel() == 1:
                    continue
                error = norm(_difference(got[name], oracle[name]))
                allowed = factor * worst * sizes[name] + rounding
                assert error <= allowed, (
                    f"{label} {name}: {norm.__name__} error {error:.3e}, allowed {allowed:.3e}"
                )


def _rms(t: Tensor) -> float:
    t = t[t.isfinite()]
    return t.square().mean().sqrt().item() if t.numel() else 0.0


def _largest(t: Tensor) -> float:
    t = t[t.isfinite()]
    return t.abs().max().item() if t.numel() else 0.0


def _difference(got: Tensor, oracle: Tensor) -> Tensor:
    return got.detach().double().cpu() - oracle.detach().double().cpu()


def _same_specials(label: str, got: Tensor, oracle: Tensor) -> None:
    """Infinities and NaN stand where the oracle has them."""
    assert got.shape == oracle.shape, (
        f"{label}: shape {tuple(got.shape)}, expected {tuple(oracle.shape)}"
    )
    got, oracle = got.detach().double().cpu(), oracle.detach().double().cpu()
    special = ~oracle.isfinite()
    assert got[~special].isfinite().all(), f"{label}: not finite where the oracle is"
    assert torch.equal(got[special].nan_to_num(7.0), oracle[special].nan_to_num(7.0)), (
        f"{label}: inf or nan differ"
    )
