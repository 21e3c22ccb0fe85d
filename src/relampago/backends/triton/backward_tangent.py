"""The launches of the backward's tangent: delta and its tangent, then those of dK, dV and dQ, as in `backward.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from relampago.backends.triton import arguments as A
from relampago.backends.triton.backward import (
    bias_buffer,
    lone_sinks,
    normaliser,
    rows_before,
    shrunk,
    sink_gradient,
    whole_bias,
)
from relampago.backends.triton.forward import cut_keys, cut_queries, launch, precision
from relampago.backends.triton.tangent_gradients import keys_along, queries_along
from relampago.backends.triton.tile import LOG2E
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Moving, Saved, Wanted


class Sources(NamedTuple):
    """What products are made of: tensors, or their strides; None stands still."""

    q: Any
    k: Any
    v: Any
    dout: Any


class Row(NamedTuple):
    """Of each row, laid out like LSE: what it subtracts, delta, 1 / Σ weights, and the tangents of LSE and delta."""

    shift: Tensor
    delta: Tensor
    norm: Tensor | None
    tlse: Tensor
    tdelta: Tensor


def backward_tangent(
    x: Arrays,
    plan: Plan,
    by_query: Plan,
    moving: Moving,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    deterministic: bool,
) -> Grads:
    """The tangents of the gradients by `wanted`; plan is of the kernel over keys, by_query of the one over queries."""
    given = sources(x, x.q, x.k, x.v, dout)
    q, k, v, dout = given
    along = sources(x, *moving.inputs[:3], moving.dout)
    dq, dk, dv = (torch.empty(t.shape, dtype=x.out_dtype, device=q.device) for t in (q, k, v))
    dbias = bias_buffer(x, deterministic) if wanted.bias else None
    if q.numel() == 0 or k.numel() == 0:
        grads = Grads(dq.zero_(), dk.zero_(), dv.zero_(), shrunk(dbias, x))
        return grads if x.sinks is None else grads._replace(sinks=lone_sinks(x, saved, moving.dlse))
    natural, dims = A.natural(x), padded(q.shape[-1], v.shape[-1])
    row = rows_along(x, by_query, given, moving, saved, along.dout, dlse, natural)
    fused = not deterministic and bool(plan.fused)
    target = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if fused else dq
    atomic = dbias is not None and tuple(dbias.shape) != whole_bias(x)
    tbias = moving.inputs.bias
    shared = (
        given, along, strides(given), strides(along), row, tbias,
        None if tbias is None else A.part_of(tbias),
    )  # fmt: skip
    scales = (x.scale if natural else x.scale * LOG2E.value, x.scale)
    how = (natural, precision(x))

    def run(
        kernel: Any, by_key: bool, plan: Plan, own: tuple[Tensor, ...], *switches: bool
    ) -> None:
        tiles, block_q = cut_queries(x, plan)
        key_tiles, block_k = cut_keys(x, plan)
        bytes_of_key = 2 * (dims[0] + dims[2]) * q.element_size()
        size = A.size_of(x, key_tiles if by_key else tiles, bytes_of_key)
        if by_key:
            section = max(1, size.section // size.group)
            size = size._replace(heads=k.shape[-2], section=section)
        launch(
            kernel, size.tiles * size.batch * size.heads, plan, *shared, *own, dbias,
            *map(A.strides, own), A.lse_strides(x), None if dbias is None else A.part_of(dbias),
            *scales, size, A.lay_of(x), A.band_of(x.band), A.extra_of(x), A.sparse_of(x, by_key),
            *dims, block_q, block_k, *how, *switches,
        )  # fmt: skip

    if (wanted.q or dbias is not None) and not fused:
        run(queries_along, False, by_query, (dq,), atomic)
    if wanted.k or wanted.v or fused:
        run(keys_along, True, plan, (dk, dv, target), fused, atomic, wanted.k, wanted.v)
    if fused:
        torch.mul(target, x.scale, out=dq)
    dsinks = None
    if x.sinks is not None:
        own = 0.0 if moving.inputs.sinks is None else moving.inputs.sinks.float()[:, None]
        change = (own - row.tlse) * row.delta + row.tdelta
        dsinks = sink_gradient(x, row.shift, change, row.norm, natural)
    return Grads(dq, dk, dv, shrunk(dbias, x), dsinks)


def sources(x: Arrays, *tensors: Tensor | None) -> Sources:
    """Tensors as kernels take them: rows contiguous, in one dtype."""
    return Sources(*(None if t is None else A.rows_contiguous(t.to(x.q.dtype)) for t in tensors))


def strides(given: Sources) -> Sources:
    """Their strides."""
    return Sources(*(None if t is None else A.strides(t) for t in given))


def padded(dim: int, dim_v: int) -> tuple[int, int, int, int]:
    """D, DW, E, EW: head dims, and the powers of two that hold them."""
    return (
        dim, max(16, triton.next_power_of_2(dim)), dim_v, max(16, triton.next_power_of_2(dim_v))
    )  # fmt: skip


def rows_along(
    x: Arrays,
    plan: Plan,
    given: Sources,
    moving: Moving,
    saved: Saved,
    tdout: Tensor | None,
    dlse: Tensor | None,
    natural: bool,
) -> Row:
    """Facts of each row; delta's tangent is rowsum(dO · Ȯ + dȮ · O) - dL̇, by the kernel that makes delta."""
    q, k, v, dout = given
    dim, wide, dim_v, wide_v = padded(q.shape[-1], v.shape[-1])
    dims = (dim, wide, 0, dim_v, wide_v, 0)  # as `dimensions` has them
    out, tout = A.rows_contiguous(saved.out), A.rows_contiguous(moving.out)
    shift, delta = rows_before(x, saved, out, dout, dlse, natural, dims)
    _, tdelta = rows_before(x, saved, tout, dout, moving.dlse, natural, dims)
    if tdout is not None:
        tdelta += rows_before(x, saved, out, tdout, None, natural, dims)[1]
    norm = normaliser(x, plan, q, k, shift, natural, dims)
    return Row(shift, delta, norm, moving.lse.float().contiguous(), tdelta)
