"""The backward's launches: delta, then dK and dV by tiles of keys, and dQ with them or by tiles of queries."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from relampago.backends.triton import arguments as A
from relampago.backends.triton.argument_gradients import argument_gradients
from relampago.backends.triton.forward import cut_keys, cut_queries, launch, precision
from relampago.backends.triton.gradients import by_keys, by_queries
from relampago.backends.triton.preprocess import prepare, renormalise
from relampago.backends.triton.tile import LOG2E
from relampago.plan import Plan
from relampago.problem import Arrays, Grads, Saved, Wanted

NARROW, WIDE = (Plan(block_q=n, block_k=1, warps=4, stages=1) for n in (64, 16))  # of `prepare`


def backward(
    x: Arrays,
    plan: Plan,
    by_query: Plan,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    deterministic: bool,
    fixed: bool = False,
) -> Grads:
    """The gradients by `wanted`; plan is of the kernel over keys, by_query of the one over queries.

    fixed: batch-invariant, which takes deterministic.
    """
    q, k, v, dout = (A.rows_contiguous(t) for t in (x.q, x.k, x.v, dout))
    out = dout if saved.delta is not None else A.rows_contiguous(saved.out)
    if dout.dtype != q.dtype:
        dout = dout.to(q.dtype)  # products take one dtype
    natural, dims = A.natural(x), dimensions(q.shape[-1], v.shape[-1])
    dq, dk, dv = results(x)
    adds_q, adds_k = x.sums is not None, x.sums is not None and not x.sums.anew
    dbias = bias_buffer(x, deterministic) if wanted.bias else None
    if q.numel() == 0 or k.numel() == 0:
        dargs = argument_gradients(x, wanted.mod_args, (q, k, v, dout), (), dims)
        if not adds_q:
            dq.zero_()
        if not adds_k:
            dk, dv = dk.zero_(), dv.zero_()
        grads = Grads(dq, dk, dv, shrunk(dbias, x), None, dargs)
        return grads if x.sinks is None else grads._replace(sinks=lone_sinks(x, saved, dlse))
    factor = x.scale if natural else x.scale * LOG2E.value
    lay, sl, band, extra = A.lay_of(x), A.lse_strides(x), A.band_of(x.band), A.extra_of(x)
    fused = not deterministic and plan.fused and dims[0] <= 256
    target = torch.empty(q.shape, dtype=torch.float32, device=q.device) if fused else None
    shift, delta = rows_before(x, saved, out, dout, dlse, natural, dims, target, fixed)
    sq, sk, sv, sdo = A.strides(q), A.strides(k), A.strides(v), A.strides(dout)
    lists = A.sparse_of(x, False)
    tiles, block_q = cut_queries(x, by_query)
    _, block_k = cut_keys(x, by_query)
    size = A.size_of(x, tiles, (q.shape[-1] + v.shape[-1]) * q.element_size())
    grid = tiles * size.batch * size.heads
    how = precision(x)
    norm = normaliser(x, by_query, q, k, shift, natural, dims, fixed)
    atomic = dbias is not None and tuple(dbias.shape) != whole_bias(x)
    stride = None if dbias is None else A.part_of(dbias)
    if (wanted.q and not fused) or (dbias is not None and not fused):
        boxes = A.NO_BOXES
        if by_query.tma and x.cu_k is None and x.blocks is None:
            boxes = A.boxes_of(k, v, block_k, dims[1:3], dims[4:6])
        launch(
            by_queries, grid, by_query, q, k, v, *boxes, dout, dq, dbias, shift, delta, norm, factor,
            x.scale, size, lay, sq, sk, sv, sdo, A.strides(dq), sl, band, extra, stride, lists,
            *dims, block_q, block_k, natural, how, atomic, adds_q, fixed, fusion=not fixed,
        )  # fmt: skip
    if wanted.k or wanted.v or fused:
        tiles, block_k = cut_keys(x, plan)
        _, block_q = cut_queries(x, plan)
        section = max(1, size.section // size.group)
        size = size._replace(heads=k.shape[-2], tiles=tiles, section=section)
        boxes, sums = A.NO_BOXES, (None, None)
        if plan.tma and x.cu_q is None and x.blocks is None:
            boxes = A.boxes_of(q, dout, block_q, dims[1:3], dims[4:6])
            if plan.tma > 1 and target is not None and target.stride(-2) % 4 == 0:
                sums = A.box_of(target, block_q, dims[1:3])
        with_k, with_v = wanted.k or fused, wanted.v or fused
        passes = ((True, False), (False, True)) if plan.split and not fused else ((with_k, with_v),)
        for one_k, one_v in passes:
            if (one_k and not with_k) or (one_v and not with_v):
                continue
            launch(
                by_keys, tiles * size.batch * size.heads, plan, q, k, v, dout, dk, dv, target,
                *boxes, *sums, dbias, shift, delta, norm, factor, x.scale, size, lay, sq, sk, sv,
                sdo, A.strides(dk), A.strides(dv), None if target is None else A.strides(target),
                sl, band, extra, stride, A.sparse_of(x, True), *dims, block_q, block_k, natural,
                how, fused, atomic, one_k, one_v, adds_k, fixed, fusion=not fixed,
            )  # fmt: skip
        if target is not None:
            settle(dq, target, x.scale, adds_q)
    dsinks = None if x.sinks is None else sink_gradient(x, shift, delta, norm, natural)
    dargs: tuple[Tensor | None, ...] = ()
    if any(wanted.mod_args):
        rows = (shift, delta, norm)
        dargs = argument_gradients(x, wanted.mod_args, (q, k, v, dout), rows, dims)
    return Grads(dq, dk, dv, shrunk(dbias, x), dsinks, dargs)


def settle(dq: Tensor, target: Tensor, scale: float, adds: bool) -> None:
    """dQ out of its sums."""
    if adds:
        dq.add_(target, alpha=scale)
    else:
        torch.mul(target, scale, out=dq)


def results(x: Arrays) -> list[Tensor]:
    """dq, dk and dv: those to add to, or new ones."""
    if x.sums is not None:
        return [x.sums.q, x.sums.k, x.sums.v]
    return [torch.empty(t.shape, dtype=x.out_dtype, device=t.device) for t in (x.q, x.k, x.v)]


@functools.lru_cache(maxsize=1024)
def dimensions(dim: int, dim_v: int) -> tuple[int, ...]:
    """D, D1, D2, E, E1, E2. E is padded, not split: with E2 = 16 dV was wrong on an H200, see `A.parts`."""
    return (dim, *A.split(dim), dim_v, max(16, triton.next_power_of_2(dim_v)), 0)


def rows_before(
    x: Arrays, saved: Saved, out: Tensor, dout: Tensor, dlse: Tensor | None, natural: bool,
    dims: tuple[int, ...], sums: Tensor | None = None, fixed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(shift, delta), shaped like LSE; sums of dQ are set to 0. Where delta is saved, out and dout are not read."""
    lse, known = saved.lse.contiguous(), saved.delta
    known = None if known is None else known.contiguous()
    dlse = None if dlse is None or known is not None else dlse.contiguous()
    shift, delta = (torch.empty(lse.shape, dtype=lse.dtype, device=lse.device) for _ in range(2))
    length, heads = out.shape[-3], out.shape[-2]
    plan = NARROW if dims[3] <= 128 else WIDE
    tiles = triton.cdiv(length, plan.block_q)
    batch = out.shape[0] if x.cu_q is None else 1
    launch(
        prepare, tiles * heads * batch, plan, out, dout, lse, dlse, known, delta, shift, sums,
        A.strides(out), A.strides(dout), A.lse_strides(x),
        None if sums is None else A.strides(sums), heads, length, tiles, *dims, plan.block_q,
        natural, fixed, fusion=not fixed,
    )  # fmt: skip
    return shift, delta


def normaliser(
    x: Arrays, plan: Plan, q: Tensor, k: Tensor, shift: Tensor, natural: bool, dims: tuple[int, ...],
    fixed: bool = False,
) -> Tensor | None:  # fmt: skip
    """1 / Σ weights of rows with a huge LSE, 1 of others; None where LSE is exact enough, or a larger attention's."""
    if x.shard or not (natural or q.dtype == torch.float32):
        return None
    norm = torch.empty(shift.shape, dtype=shift.dtype, device=shift.device)
    tiles, block_q = cut_queries(x, plan)
    _, block_k = cut_keys(x, plan)
    size = A.size_of(x, tiles, (dims[0] + dims[3]) * q.element_size())
    factor = x.scale if natural else x.scale * LOG2E.value
    launch(
        renormalise, tiles * size.batch * size.heads, plan, q, k, shift, norm, factor, size,
        A.lay_of(x), A.strides(q), A.strides(k), A.lse_strides(x), A.band_of(x.band), A.extra_of(x),
        A.sparse_of(x, False), *dims[:3], block_q, block_k, natural, precision(x), fusion=not fixed,
    )  # fmt: skip
    return norm


def whole_bias(x: Arrays) -> tuple[int, ...]:
    """The shape of a bias no element of which serves two scores."""
    rows = x.q.shape[1] if x.cu_q is None else x.len_q
    keys = x.k.shape[1] if x.cu_k is None else x.len_k
    assert x.bias is not None
    return (x.batch, x.q.shape[-2], max(x.bias.shape[2], rows), max(x.bias.shape[3], keys))


def bias_buffer(x: Arrays, deterministic: bool) -> Tensor | None:
    """Where dbias is summed, in fp32: shaped like the bias, or whole if the order of additions must be fixed."""
    assert x.bias is not None
    shape = whole_bias(x) if deterministic else x.bias.shape
    return torch.zeros(shape, dtype=torch.float32, device=x.q.device)


def shrunk(dbias: Tensor | None, x: Arrays) -> Tensor | None:
    """dbias in the bias's own shape."""
    return None if dbias is None else dbias.sum_to_size(x.bias.shape)


def sink_gradient(
    x: Arrays, shift: Tensor, delta: Tensor, norm: Tensor | None, natural: bool
) -> Tensor:
    """-Σ weight of the sink · delta over all rows, (H,)."""
    sink = x.sinks.float()[:, None]
    weight = torch.exp(sink - shift) if natural else torch.exp2(sink * LOG2E.value - shift)
    if norm is not None:
        weight = torch.where(shift == float("inf"), 0.0, weight * norm)
    lost = (weight * delta).sum(-1)
    return -(lost if x.cu_q is not None else lost.sum(0))


def lone_sinks(x: Arrays, saved: Saved, dlse: Tensor | None) -> Tensor:
    """dsinks where there are no keys: the sink has all the weight, and only LSE depends on it."""
    if dlse is None or saved.lse.numel() == 0:
        return torch.zeros(x.sinks.shape, dtype=torch.float32, device=x.q.device)
    total = dlse.float().masked_fill(saved.lse == float("-inf"), 0.0).sum(-1)
    return total if x.cu_q is not None else total.sum(0)
