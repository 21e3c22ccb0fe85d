"""The backends, in order of preference. This tuple is the one place to touch to add one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from relampago.backends.cpu import Cpu
from relampago.backends.gluon import GluonSm90
from relampago.backends.reference import Reference
from relampago.backends.triton import Triton
from relampago.plan import Plan
from relampago.problem import (
    Arrays,
    Grads,
    Held,
    HeldOut,
    Moving,
    Problem,
    RowStatistics,
    Saved,
    Tangents,
    Wanted,
)


class Backend(Protocol):
    """What a backend must offer. The instances hold no state."""

    name: str

    def why_not(self, p: Problem) -> str | None:
        """Why it cannot run this problem, in the words a user reads; None if it can. Pure, and needs no GPU."""
        ...

    def plan(self, p: Problem) -> Plan:
        """The tiles it would use."""
        ...

    def forward(self, p: Problem, plan: Plan, x: Arrays) -> tuple[Tensor, Tensor]:
        """Out, in x.out_dtype or a wider one, and LSE (B, H, Lq) or (H, total).

        A backend that can may instead fold both into x.into, where given, and return that; or write them there if
        x.anew.
        """
        ...

    def backward(
        self,
        p: Problem,
        plan: Plan,
        x: Arrays,
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The gradients of whatever forward gave that out and LSE.

        A backend that can may instead add to those of x.sums, where given, and return them.
        """
        ...


@runtime_checkable
class Holding(Protocol):
    """What a backend may offer besides: to hold rows over several shards of the keys, in an order of its own."""

    def hold_out(self, p: Problem, plan: Plan, x: Arrays) -> HeldOut | None:
        """Room for out and LSE, to be given as x.into, the first time with x.anew; None if it folds otherwise.

        Keys and mask of x are those of no shard in particular.
        """
        ...

    def release_out(
        self, p: Problem, plan: Plan, x: Arrays, held: HeldOut, dtype: torch.dtype
    ) -> Tensor:
        """Out (B, L, H, E) in a dtype."""
        ...

    def hold(
        self, p: Problem, plan: Plan, x: Arrays, saved: Saved, dout: Tensor, dlse: Tensor | None
    ) -> Held | None:
        """Rows with a dQ of 0, for the backward to take as x.sums.q, saved.lse and saved.delta; None as above."""
        ...

    def release(self, p: Problem, plan: Plan, x: Arrays, held: Held) -> Tensor:
        """dQ in x.q's dtype."""
        ...


class TwiceDifferentiable(Backend, Protocol):
    """What a backend offers besides, unless its `why_not` refuses tangents and second derivatives."""

    def tangent(
        self, p: Problem, plan: Plan, x: Arrays, t: Tangents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out and LSE as `forward` gives them, and their tangents along t."""
        ...

    def backward_tangent(
        self,
        p: Problem,
        plan: Plan,
        x: Arrays,
        moving: Moving,
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The tangents of what `backward` gives, where its arguments move by `moving`."""
        ...


class Measuring(Backend, Protocol):
    """What a backend that knows row statistics and column sums also offers."""

    def row_statistics(self, p: Problem, plan: Plan, x: Arrays, last: int) -> RowStatistics:
        """LSE and entropy of the last rows of each sequence, and their heads' largest scores. Reads no values."""
        ...

    def column_sums(self, p: Problem, plan: Plan, x: Arrays, lse: Tensor, last: int) -> Tensor:
        """The weights that each key receives from the last rows of its sequence, (B, H, Lk) or (H, Tk)."""
        ...


BACKENDS: tuple[Backend, ...] = (GluonSm90(), Triton(), Cpu(), Reference())
