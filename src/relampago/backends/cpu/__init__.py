"""The backend `cpu`: tiled FlashAttention-2 in torch, on threads. Read `forward.py` beside the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from relampago.backends.cpu.backward import backward
from relampago.backends.cpu.backward_tangent import backward_tangent
from relampago.backends.cpu.forward import FREE, forward
from relampago.backends.cpu.invariant import way
from relampago.backends.cpu.statistics import column_sums, row_statistics
from relampago.backends.cpu.tangent import tangent
from relampago.plan import Plan, first_match
from relampago.problem import (
    FEATURES,
    FP8_CACHE,
    FP8_PRODUCTS,
    Arrays,
    Grads,
    Moving,
    Problem,
    RowStatistics,
    Saved,
    Tangents,
    Wanted,
    refuse_backward,
    refuse_unknown,
    refuse_variance,
)
from relampago.quant import emulation


class Cpu:
    """O(N) memory, every feature, any head dim."""

    name = "cpu"

    def why_not(self, p: Problem) -> str | None:
        if p.device.kind != "cpu":
            return f"runs on cpu tensors only, got {p.device.kind}"
        known = FEATURES | {FP8_PRODUCTS, FP8_CACHE}
        return refuse_unknown(p, known) or refuse_variance(p) or refuse_backward(p)

    def plan(self, p: Problem) -> Plan:
        kernel = "invariant" if p.batch_invariant else p.direction
        return first_match(("cpu",), f"cpu.{kernel}", p)

    def forward(self, p: Problem, plan: Plan, x: Arrays) -> tuple[Tensor, Tensor]:
        x.check_cache()
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # threads and their buffers know no inference mode
            chosen = way(plan) if p.batch_invariant else FREE
            return emulation.run(x, lambda lowered: forward(lowered, plan, chosen))

    def row_statistics(self, p: Problem, plan: Plan, x: Arrays, last: int) -> RowStatistics:
        with torch.inference_mode(False), torch.no_grad():
            return row_statistics(x, plan, last)

    def column_sums(self, p: Problem, plan: Plan, x: Arrays, lse: Tensor, last: int) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return column_sums(x, plan, lse, last)

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
        with torch.inference_mode(False), torch.no_grad():
            how = way(plan) if p.batch_invariant else FREE
            return backward(x, plan, saved, dout, dlse, wanted, how)

    def tangent(
        self, p: Problem, plan: Plan, x: Arrays, t: Tangents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            return tangent(x, plan, t)

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
        with torch.inference_mode(False), torch.no_grad():
            return backward_tangent(x, plan, moving, saved, dout, dlse, wanted)
