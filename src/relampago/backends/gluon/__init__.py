"""The backend `gluon_sm90`: FlashAttention for Hopper, forward and backward, written in Gluon.

Nothing here imports triton before a launch: `why_not` answers on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from dataclasses import replace

import torch
from torch import Tensor

from relampago.mods import rule_of, softcap
from relampago.plan import Plan, first_match
from relampago.problem import (
    FP8_PRODUCTS,
    Arrays,
    Grads,
    Held,
    HeldOut,
    Layout,
    Problem,
    Saved,
    Wanted,
    refuse_backward,
    refuse_unknown,
)

KNOWS = frozenset(
    {
        "packed sequences",
        "window",
        "prefix",
        "document tables",
        "score mods",
        "sinks",
        "deterministic mode",
        "max logits",
        FP8_PRODUCTS,
    }
)
OLDEST = (3, 6)
PTXAS_13 = (3, 9)  # the Triton that came with it
SOFTCAP = softcap(1.0).fn
FEW = 8  # rows of all heads of a group
HELD = 64  # rows of a block whose dQ is held over several shards


@functools.lru_cache(maxsize=1)
def _triton() -> str | None:
    """The version that is installed."""
    for name in ("triton", "pytorch-triton"):  # as nightly builds of torch call it
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _is_older(found: str, than: tuple[int, int]) -> bool:
    return tuple(int(part) for part in found.split(".")[:2]) < than


def _refuse_triton() -> str | None:
    found = _triton()
    if found is None:
        return "triton is not installed"
    return f"needs triton 3.6 or newer, got {found}" if _is_older(found, OLDEST) else None


def compiles_well(plan: Plan) -> bool:
    """Whether this Triton compiles the plan as it was measured: ptxas 13 serialises products by halves of a block."""
    found = _triton()
    return not plan.halves or found is None or _is_older(found, PTXAS_13)


class GluonSm90:
    """Dense and packed sequences in bf16 and fp16, head dims up to 256."""

    name = "gluon_sm90"

    def why_not(self, p: Problem) -> str | None:
        if p.device.kind != "cuda":
            return f"runs on cuda tensors, got {p.device.kind}"
        if p.device.arch != "sm90":
            return f"needs sm90, got {p.device.arch}"
        if p.dtype not in ("bf16", "fp16", "e4m3"):
            return f"knows bf16, fp16 and e4m3, got {p.dtype}"
        if max(p.dim, p.dim_v) > 256:
            return f"head dim {max(p.dim, p.dim_v)} > 256"
        return (
            refuse_unknown(p, KNOWS)
            or refuse_backward(p)
            or self._refuse_parts(p)
            or self._refuse_few(p)
            or _refuse_triton()
        )

    def plan(self, p: Problem) -> Plan:
        kernel = "forward_fp8" if p.fp8 else p.direction
        return first_match((p.device.arch, "sm90"), f"gluon_sm90.{kernel}", p, compiles_well)

    def forward(self, p: Problem, plan: Plan, x: Arrays) -> tuple[Tensor, Tensor]:
        if p.fp8:
            from relampago.backends.gluon.fp8_launch import forward
        else:
            from relampago.backends.gluon.launch import forward
        with _on(x.q.device):
            return forward(plan, x, p.device.multiprocessors)

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
        from relampago.backends.gluon.backward_launch import backward

        by_query = first_match((p.device.arch, "sm90"), "gluon_sm90.backward_dq", p)
        if x.sums is not None and x.sums.q.dim() != x.q.dim():  # held for blocks of 64 rows
            plan = self._holding(p, plan) or plan
        with _on(x.q.device):
            return backward(plan, by_query, x, saved, dout, dlse, wanted, p.deterministic)

    def hold_out(self, p: Problem, plan: Plan, x: Arrays) -> HeldOut | None:
        if p.fp8 or 0 in (*x.q.shape, x.k.shape[1]):
            return None
        from relampago.backends.gluon.held_launch import hold_out

        return hold_out(x, p.device.multiprocessors)

    def release_out(
        self, p: Problem, plan: Plan, x: Arrays, held: HeldOut, dtype: torch.dtype
    ) -> Tensor:
        from relampago.backends.gluon.held_launch import release_out

        with _on(x.q.device):
            return release_out(x, held, dtype)

    def hold(
        self, p: Problem, plan: Plan, x: Arrays, saved: Saved, dout: Tensor, dlse: Tensor | None
    ) -> Held | None:
        from relampago.backends.gluon.backward_launch import hold

        chosen = self._holding(p, plan)
        if chosen is None or 0 in (*x.q.shape, x.k.shape[1]):
            return None
        with _on(x.q.device):
            return hold(chosen, x, saved, dout, dlse)

    def release(self, p: Problem, plan: Plan, x: Arrays, held: Held) -> Tensor:
        from relampago.backends.gluon.backward_launch import release

        with _on(x.q.device):
            return release(self._holding(p, plan) or plan, x, held)

    def _holding(self, p: Problem, plan: Plan) -> Plan | None:
        """The plan of shards whose rows are held, in blocks of 64; None where dQ has a kernel of its own."""
        if p.deterministic or not plan.fused:
            return None
        return plan if plan.block_q == HELD else self.plan(replace(p, right=False))

    def _refuse_parts(self, p: Problem) -> str | None:
        """What it knows in part only."""
        if p.layout_q is not p.layout_k:
            return "knows packed sequences only where queries and keys are both packed"
        if any(rule_of(token).fn is not SOFTCAP for token in p.mods) or len(p.mods) > 1:
            return "does not know score mods other than one softcap"
        return None

    def _refuse_few(self, p: Problem) -> str | None:
        """Where memory is all that limits, Triton's decode is faster: 9.0 µs to 14.3 for 8k keys on an H200."""
        rows = p.len_q * p.heads_q // max(1, p.heads_kv)
        short = p.layout_q is Layout.DENSE and rows <= FEW and not p.fp8
        if p.direction == "forward" and short:
            return f"leaves {rows} rows of a kv head to decoding kernels"
        return None


def _on(device: torch.device):
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
