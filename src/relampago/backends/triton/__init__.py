"""The backend `triton`: portable kernels for NVIDIA GPUs from sm80 on and AMD's gfx942 and gfx950.

Nothing here imports triton before a launch: `why_not` answers on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from dataclasses import replace

import torch
from torch import Tensor

from relampago.mods import rule_of
from relampago.plan import Plan, first_match
from relampago.problem import (
    FEATURES,
    FP8_CACHE,
    Arrays,
    Grads,
    Layout,
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

AMD = ("gfx942", "gfx950")
FALLBACK = {"sm86": "sm89", "sm87": "sm80", "sm120": "sm89", "sm121": "sm89", "gfx950": "gfx942"}


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class Triton:
    """Every feature, head dims up to 512 (keys' 576), one kernel per direction and tile of the result."""

    name = "triton"

    def why_not(self, p: Problem) -> str | None:
        kind = p.device.kind
        if kind not in ("cuda", "hip") and not (kind == "cpu" and interpreted()):
            return f"runs on cuda and hip tensors, got {kind}"
        return (
            self._refuse_machine(p)
            or self._refuse_shape(p)
            or refuse_unknown(p, FEATURES | {FP8_CACHE})
            or refuse_variance(p)
            or self._refuse_fp8(p)
            or refuse_backward(p)
            or self._refuse_mods(p)
        )

    def plan(self, p: Problem) -> Plan:
        from relampago.backends.triton.decode import applies

        kernel = "forward" if p.direction == "forward" else "backward_dkdv"
        kernel = "decode" if applies(p) else kernel
        if p.batch_invariant and p.direction == "forward":
            kernel = "invariant"
        if p.moving:
            kernel = "tangent" if p.direction == "forward" else "tangent_dkdv"
        kernel = "backward_dkdv" if p.statistic == "column sums" else kernel  # the same loop
        p = canonical(p) if p.batch_invariant else p
        return first_match(tables(p.device.arch), f"triton.{kernel}", p)

    def forward(self, p: Problem, plan: Plan, x: Arrays) -> tuple[Tensor, Tensor]:
        from relampago.backends.triton.decode import applies, decode
        from relampago.backends.triton.forward import forward
        from relampago.backends.triton.invariant import invariant

        with _on(x.q.device):
            if p.batch_invariant:
                return invariant(x, plan)
            return decode(x, plan) if applies(p) else forward(x, plan)

    def tangent(
        self, p: Problem, plan: Plan, x: Arrays, t: Tangents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from relampago.backends.triton.tangent import tangent

        with _on(x.q.device):
            return tangent(x, plan, t)

    def row_statistics(self, p: Problem, plan: Plan, x: Arrays, last: int) -> RowStatistics:
        from relampago.backends.triton.statistics import row_statistics

        with _on(x.q.device):
            return row_statistics(x, plan, last)

    def column_sums(self, p: Problem, plan: Plan, x: Arrays, lse: Tensor, last: int) -> Tensor:
        from relampago.backends.triton.statistics import column_sums

        with _on(x.q.device):
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
        from relampago.backends.triton.backward import backward

        fixed = p.batch_invariant
        like = canonical(p) if fixed else p
        by_query = first_match(tables(p.device.arch), "triton.backward_dq", like)
        with _on(x.q.device):
            return backward(x, plan, by_query, saved, dout, dlse, wanted, p.deterministic, fixed)

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
        from relampago.backends.triton.backward_tangent import backward_tangent

        by_query = first_match(tables(p.device.arch), "triton.tangent_dq", p)
        along = (moving, saved, dout, dlse, wanted)
        with _on(x.q.device):
            return backward_tangent(x, plan, by_query, *along, p.deterministic)

    def _refuse_machine(self, p: Problem) -> str | None:
        arch = p.device.arch
        if p.device.kind == "hip" and arch not in AMD:
            return f"needs {' or '.join(AMD)}, got {arch}"
        sm = re.fullmatch(r"sm(\d+)", arch)
        if p.device.kind == "cuda" and (sm is None or int(sm[1]) < 80):
            return f"needs sm80 or newer, got {arch}"
        return None if _installed() else "triton is not installed"

    def _refuse_shape(self, p: Problem) -> str | None:
        if p.dtype not in ("bf16", "fp16", "fp32"):
            return f"knows bf16, fp16 and fp32, got {p.dtype}"
        if p.dim > 576 or (p.dim > 512 and p.dim_v > 512) or p.dim_v > 512:
            return f"head dim {max(p.dim, p.dim_v)} > 512"
        if p.moving and max(p.dim, p.dim_v) > 256:
            return f"tangents of head dim {max(p.dim, p.dim_v)} > 256"
        wide = p.dtype == "fp32" and p.dim > 512 and p.direction == "backward"
        if wide and p.device.kind == "cuda" and p.device.shared_memory < 104 * 1024:
            return f"fp32 gradients of head dim {p.dim} need 104 KiB of shared memory"
        wide = p.dtype == "fp32" and max(p.dim, p.dim_v) > 128 and p.direction == "backward"
        if p.moving and wide and p.device.kind == "cuda" and p.device.shared_memory < 136 * 1024:
            return f"fp32 second derivatives of head dim {max(p.dim, p.dim_v)} need 136 KiB of shared memory"
        return None

    def _refuse_fp8(self, p: Problem) -> str | None:
        """Keys in e4m3: where the machine has the format, and nothing but attention is asked."""
        if p.fp8 != "cache":
            return None
        if not p.device.has_e4m3:
            return f"FP8 keys in a cache need sm89, gfx950 or newer, got {p.device.arch}"
        return f"does not know {p.statistic} of FP8 keys" if p.statistic else None

    def _refuse_mods(self, p: Problem) -> str | None:
        if not p.mods:
            return None
        if p.mod_grads and p.deterministic:
            return "adds up gradients of score mod arguments atomically: not in deterministic mode"
        if p.mod_grads and p.blocks:
            return "does not know gradients of score mod arguments with BlockSparse masks"
        from relampago.backends.triton.arguments import refuse_function

        for rule in map(rule_of, p.mods):
            plain = p.direction == "forward" and not p.moving
            functions = (rule.fn,) if plain else (rule.fn, rule.dfn)
            if p.moving and p.direction == "backward":
                functions = (*functions, rule.ddfn)
            for fn in (*functions, *filter(None, rule.dargs if p.mod_grads else ())):
                if (reason := refuse_function(fn)) is not None:
                    return reason
        return None


def canonical(p: Problem) -> Problem:
    """The problem whose tiles all batches, lengths and layouts share."""
    return replace(p, batch=1, len_q=4096, len_k=4096, layout_q=Layout.DENSE, layout_k=Layout.DENSE)


@functools.lru_cache(maxsize=64)
def tables(arch: str) -> tuple[str, ...]:
    """The tuning tables to look in: the machine's own, then that of the most similar one."""
    sm = re.fullmatch(r"sm(\d+)", arch)
    nearest = "sm89"  # the least shared memory: fits everywhere
    if sm is not None and 100 <= int(sm[1]) < 120:
        nearest = "sm100"
    return arch, FALLBACK.get(arch, nearest), "sm89"


def _on(device: torch.device):
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
