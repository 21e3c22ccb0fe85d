"""The forward and its tangent in one pass (docs/derivatives.md), one program per tile of queries.

The loop of `forward.py` with two more sums per row: lt = Σ p·ṡ and acct = Σ p·(ṡ·v + v̇), where ṡ is the tangent of the
scores, in natural units. Head dims are padded to one power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from relampago.backends.triton import arguments as A
from relampago.backends.triton.forward import (
    cut_keys,
    cut_queries,
    fill_tail,
    launch,
    precision,
    query_tile,
)
from relampago.backends.triton.tile import (
    LN2,
    LOG2E,
    assignment,
    bounds,
    edge,
    finite,
    kept,
    key_origin,
    keys_of,
    list_of,
    load_keys,
    load_tile,
    loop_bounds,
    offset_of,
    origin,
    part_of,
    pattern_of,
    power,
    rows_of,
    scores,
    slope,
    stepped,
    store_tile,
    turn_of,
    turned,
)
from relampago.plan import Plan
from relampago.problem import Arrays, Tangents


@triton.jit
def rate(x, tx, y, ty, PRECISION: tl.constexpr):
    """The tangent of x · yᵀ: ẋ · yᵀ + x · ẏᵀ; None stands still."""
    r = tl.zeros([x.shape[0], y.shape[0]], tl.float32)
    if tx is not None:
        r = tl.dot(tx, tl.trans(y), r, input_precision=PRECISION)
    if ty is not None:
        r = tl.dot(x, tl.trans(ty), r, input_precision=PRECISION)
    return r


@triton.jit
def add_bias_rate(r, tbias, stride, b, head, rows, keys, q_end, k_limit):
    """The rate of scores, and that of their bias."""
    if tbias is not None:
        inside = (rows < q_end) & (keys < k_limit)
        at = tbias + part_of(stride, b, head, rows, keys)
        r += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return r


@triton.jit
def tangent_step(
    acc, acct, l, lt, m, q1, tq1, k, tk, v, tv, tbias, tbias_stride, b, head, k0, rows, q_end, k_limit, offset, factor,
    scale, size, lay, sk, sv, stk, stv, band, extra, sparse, q_base, k_base, which,
    D: tl.constexpr, DW: tl.constexpr, E: tl.constexpr, EW: tl.constexpr, BK: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, lines 8 to 10, and the tangents, for one tile of keys."""
    keys = k0 + tl.arange(0, BK)[None, :]
    g = head // size.group
    k1 = load_keys(k, None, lay, b, g, k0, k_limit, sk, D, 0, DW, BK, MASKED)  # [BK, DW]
    s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    tk1 = tk
    if tk is not None:
        tk1 = load_keys(tk, None, lay, b, g, k0, k_limit, stk, D, 0, DW, BK, MASKED)
    r = rate(q1, tq1, k1, tk1, PRECISION) * scale  # ṡ = f'(z)·ż + ḃ, z the scaled products
    if NATURAL and extra.modified is not None:
        r *= slope(s * scale, extra.mods, extra.modified, b, head, rows, keys, offset)
    r = add_bias_rate(r, tbias, tbias_stride, b, head, rows, keys, q_end, k_limit)
    s = scores(
        s, factor, band, extra, offset, b, head, rows, keys, q_end, k_limit, NATURAL, MASKED
    )  # line 8
    if sparse is not None:
        seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
        s = tl.where(seen, s, float("-inf"))
    if NATURAL:
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = finite(m_new)
        p = tl.exp2((s - shift[:, None]) * LOG2E)
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        shift = finite(m_new)
        p = tl.exp2(s * factor - shift[:, None])
    alpha = power(m - shift, NATURAL)
    w = p * r
    l = l * alpha + tl.sum(p, 1)  # line 9
    lt = lt * alpha + tl.sum(w, 1)
    if extra.seed is not None:
        keep = kept(extra, size, b, head, rows, keys)
        p = tl.where(keep, p, 0.0)
        w = tl.where(keep, w, 0.0)
    v1 = load_keys(v, None, lay, b, g, k0, k_limit, sv, E, 0, EW, BK, MASKED)  # [BK, EW]
    p = p.to(v1.dtype)
    acc = tl.dot(p, v1, acc * alpha[:, None], input_precision=PRECISION)  # line 10
    acct = tl.dot(w.to(v1.dtype), v1, acct * alpha[:, None], input_precision=PRECISION)
    if tv is not None:
        tv1 = load_keys(tv, None, lay, b, g, k0, k_limit, stv, E, 0, EW, BK, MASKED)
        acct = tl.dot(p, tv1, acct, input_precision=PRECISION)
    return acc, acct, l, lt, m_new


@triton.jit(do_not_specialize=["size", "band"])
def attend_along(
    q, k, v, tq, tk, tv, tbias, tsinks, out, lse, tout, tlse, factor, scale, size, lay, sq, sk, sv, stq, stk, stv,
    tbias_stride, so, sl, band, extra, sparse,
    D: tl.constexpr, DW: tl.constexpr, E: tl.constexpr, EW: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries: out, LSE and their tangents."""
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    if tq is not None:
        stq = stepped(stq, tq, D)
    if tk is not None:
        stk = stepped(stk, tk, D)
    if tv is not None:
        stv = stepped(stv, tv, E)
    so = stepped(so, out, E)
    tile, head, b = assignment(size, band.right is not None)
    if lay.cu_q is not None:
        fill_tail(out, lse, lay, size, so, sl, tile, head, b, float("-inf"), E, EW, 0, BQ)
        fill_tail(tout, tlse, lay, size, so, sl, tile, head, b, 0.0, E, EW, 0, BQ)
    first, len_q = rows_of(lay, size, b)
    q0, q_end, q_base = query_tile(size, sparse, tile, len_q, BQ)
    if q0 >= q_end:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    g = head // size.group
    rows = q0 + tl.arange(0, BQ)[:, None]
    k += key_origin(lay, sk, b, first_k, g)
    v += key_origin(lay, sv, b, first_k, g)
    q1 = load_tile(q + origin(sq, b, first, head), q0, q_end, sq.l, D, 0, DW, BQ, True)
    tq1 = tq
    if tq is not None:
        tq1 = load_tile(tq + origin(stq, b, first, head), q0, q_end, stq.l, D, 0, DW, BQ, True)
    if tk is not None:
        tk += key_origin(lay, stk, b, first_k, g)
    if tv is not None:
        tv += key_origin(lay, stv, b, first_k, g)
    m = tl.full([BQ], float("-inf"), tl.float32)
    l, lt = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
    acc, acct = tl.zeros([BQ, EW], tl.float32), tl.zeros([BQ, EW], tl.float32)
    if sparse is None:
        start, end, full_start, full_end = bounds(band, offset, b, q0, q_end, len_k, BQ)
        start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BK)
        turn, steps = turn_of(tile, full, full_end, BK)
        for i in tl.range(0, steps):  # without masks
            k0 = turned(i, turn, steps, full, BK)
            acc, acct, l, lt, m = tangent_step(
                acc, acct, l, lt, m, q1, tq1, k, tk, v, tv, tbias, tbias_stride, b, head, k0, rows, q_end, len_k,
                offset, factor, scale, size, lay, sk, sv, stk, stv, band, extra, None, 0, 0, 0,
                D, DW, E, EW, BK, NATURAL, PRECISION, False,
            )  # fmt: skip
        for i in tl.range(0, n):  # at the edges
            k0 = edge(i, start, full_end, before, BK)
            acc, acct, l, lt, m = tangent_step(
                acc, acct, l, lt, m, q1, tq1, k, tk, v, tv, tbias, tbias_stride, b, head, k0, rows, q_end, len_k,
                offset, factor, scale, size, lay, sk, sv, stk, stv, band, extra, None, 0, 0, 0,
                D, DW, E, EW, BK, NATURAL, PRECISION, True,
            )  # fmt: skip
    else:
        entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + q_base // sparse.block_q
        parts = tl.cdiv(sparse.block_k, BK)
        for i in tl.range(0, tl.load(sparse.count + entry) * parts):
            at = entry * sparse.most + i // parts
            k_base = tl.load(sparse.index + at) * sparse.block_k
            which = tl.load(sparse.pattern + at)
            k0 = k_base + i % parts * BK
            acc, acct, l, lt, m = tangent_step(
                acc, acct, l, lt, m, q1, tq1, k, tk, v, tv, tbias, tbias_stride, b, head, k0, rows, q_end, len_k,
                offset, factor, scale, size, lay, sk, sv, stk, stv, band, extra, sparse, q_base, k_base, which,
                D, DW, E, EW, BK, NATURAL, PRECISION, True,
            )  # fmt: skip
    if extra.sinks is not None:  # one more score, with no value
        sink = tl.load(extra.sinks + head).to(tl.float32) * (1.0 if NATURAL else LOG2E)
        m_new = tl.maximum(m, sink)
        shift = finite(m_new)
        alpha = power(m - shift, NATURAL)
        weight = power(sink - shift, NATURAL)
        l = l * alpha + weight
        lt = lt * alpha
        if tsinks is not None:
            lt += weight * tl.load(tsinks + head).to(tl.float32)
        m = m_new
        acc = acc * alpha[:, None]
        acct = acct * alpha[:, None]
    inverse = 1.0 / tl.where(l == 0.0, 1.0, l)
    lt = lt * inverse
    if extra.seed is not None:
        acc = acc * extra.upscale
        acct = acct * extra.upscale
    acc = acc * inverse[:, None]
    acct = acct * inverse[:, None] - acc * lt[:, None]
    at = origin(so, b, first, head)
    store_tile(out + at, q0, q_end, so.l, acc, E, 0, EW, BQ)
    store_tile(tout + at, q0, q_end, so.l, acct, E, 0, EW, BQ)
    total = finite(m) + tl.log2(l) * (LN2 if NATURAL else 1.0)
    total = total * (1.0 if NATURAL else LN2)
    row = q0 + tl.arange(0, BQ)
    at = origin(sl, b, first, head) + row
    tl.store(lse + at, total, mask=row < q_end)
    tl.store(tlse + at, lt, mask=row < q_end)


def tangent(x: Arrays, plan: Plan, t: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Out, LSE, and the tangents of both along t."""
    q, k, v = A.rows_contiguous(x.q), A.rows_contiguous(x.k), A.rows_contiguous(x.v)
    tq, tk, tv = (None if s is None else A.rows_contiguous(s) for s in t[:3])
    dim, dim_v = q.shape[-1], v.shape[-1]
    out, tout = (
        torch.empty((*q.shape[:-1], dim_v), dtype=x.out_dtype, device=q.device) for _ in range(2)
    )
    lse, tlse = (
        torch.empty(A.lse_shape(x), dtype=torch.float32, device=q.device) for _ in range(2)
    )
    tiles, block_q = cut_queries(x, plan)
    _, block_k = cut_keys(x, plan)
    size = A.size_of(x, tiles, 2 * (dim + dim_v) * q.element_size())
    grid = tiles * size.batch * size.heads
    if grid == 0:
        return out.zero_(), lse.fill_(float("-inf")), tout.zero_(), tlse.zero_()
    is_natural = A.natural(x)
    widths = (max(16, triton.next_power_of_2(n)) for n in (dim, dim_v))
    launch(
        attend_along, grid, plan, q, k, v, tq, tk, tv, t.bias, t.sinks, out, lse, tout, tlse,
        x.scale if is_natural else x.scale * LOG2E.value, x.scale, size, A.lay_of(x), A.strides(q),
        A.strides(k), A.strides(v), *(None if s is None else A.strides(s) for s in (tq, tk, tv)),
        None if t.bias is None else A.part_of(t.bias), A.strides(out), A.lse_strides(x),
        A.band_of(x.band), A.extra_of(x), A.sparse_of(x, False), dim, next(widths), dim_v,
        next(widths), block_q, block_k, is_natural, precision(x),
    )  # fmt: skip
    return out, lse, tout, tlse
