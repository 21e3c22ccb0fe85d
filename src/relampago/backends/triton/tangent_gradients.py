"""The kernels of the backward's tangent (docs/derivatives.md): double backward, and forward over reverse.

The walks of `gradients.py`, with every quantity of Algorithm 2 beside its own tangent: `keys_along` owns a tile of
keys, and if FUSED adds up the rows' sums atomically; `queries_along` owns a tile of rows. Scores lie with the owner's
tokens first; `pair` serves both ways. Head dims are padded to one power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relampago.backends.triton.forward import fill_tail, query_tile
from relampago.backends.triton.gradients import (
    add_bias_gradient,
    add_rows,
    fill_key_tail,
    key_tile,
    row_facts,
    store_keys,
)
from relampago.backends.triton.tangent import add_bias_rate, rate
from relampago.backends.triton.tile import (
    assignment,
    bend,
    bounds,
    edge,
    kept,
    keys_of,
    list_of,
    load_tile,
    loop_bounds,
    offset_of,
    origin,
    pattern_of,
    query_bounds,
    rows_of,
    scores,
    stepped,
    store_tile,
    turn_of,
    turned,
    weights,
)


@triton.jit
def tile_at(
    base, stride, b, start, head, first, limit, DIM: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens first.. of a sequence's head, [N, WIDTH]."""
    stride = stepped(stride, base, DIM)
    at = base + origin(stride, b, start, head)
    return load_tile(at, first, limit, stride.l, DIM, 0, WIDTH, N, MASKED)


@triton.jit
def facts_along(row, at, q0, q_end, BQ: tl.constexpr, MASKED: tl.constexpr):
    """Of rows q0..: what they subtract, delta, and the tangents of LSE and delta."""
    top, di = row_facts(row.shift + at, row.delta + at, q0, q_end, BQ, MASKED)
    rows = q0 + tl.arange(0, BQ)
    inside = rows < q_end if MASKED else None
    other = 0.0 if MASKED else None
    tlse = tl.load(row.tlse + at + rows, mask=inside, other=other)
    tdi = tl.load(row.tdelta + at + rows, mask=inside, other=other)
    return top, di, tlse, tdi


@triton.jit
def pair(
    x, tx, y, ty, u, tu, w, tw, top, di, tlse, tdi, norm, tbias, tbias_stride, dbias, bias_stride, b, head, rows, keys,
    q_end, k_limit, offset, factor, scale, size, band, extra, sparse, q_base, k_base, which,
    ROW_AXIS: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr, ATOMIC: tl.constexpr,
    WITH_BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights, dZ and the tangents of both where rows meet keys; x·yᵀ are products, u·wᵀ is dP."""
    z = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    r = rate(x, tx, y, ty, PRECISION) * scale
    if NATURAL and extra.modified is not None:
        r, slope, turn = bend(z * scale, r, extra.mods, extra.modified, b, head, rows, keys, offset)
    r = add_bias_rate(r, tbias, tbias_stride, b, head, rows, keys, q_end, k_limit) - tlse
    s = scores(z, factor, band, extra, offset, b, head, rows, keys, q_end, k_limit, NATURAL, MASKED)
    if sparse is not None:
        seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
        s = tl.where(seen, s, float("-inf"))
    p = weights(s, top, norm, factor, NATURAL)  # line 12, and ṗ = p · r
    gap = tl.dot(u, tl.trans(w), input_precision=PRECISION)  # line 14
    tgap = rate(u, tu, w, tw, PRECISION)
    dropped = p
    if extra.seed is not None:
        keep = kept(extra, size, b, head, rows, keys)
        gap = tl.where(keep, gap * extra.upscale, 0.0)
        tgap = tl.where(keep, tgap * extra.upscale, 0.0)
        dropped = tl.where(keep, p * extra.upscale, 0.0)
    ds = p * (gap - di)  # line 15
    tds = ds * r + p * (tgap - tdi)
    if dbias is not None and WITH_BIAS:
        add_bias_gradient(
            dbias, bias_stride, tds, b, head, rows, keys, q_end, k_limit, ROW_AXIS, ATOMIC
        )
    if NATURAL and extra.modified is not None:
        tds = tds * slope + ds * turn
        ds *= slope
    return dropped, dropped * r, ds, tds


@triton.jit
def products_along(acc, ds, y, tds, ty, PRECISION: tl.constexpr):
    """acc + dṠ · y + dS · ẏ: lines 13, 16 and 17, and their tangents."""
    acc = tl.dot(tds.to(y.dtype), y, acc, input_precision=PRECISION)
    if ty is not None:
        acc = tl.dot(ds.to(y.dtype), ty, acc, input_precision=PRECISION)
    return acc


@triton.jit
def listed(sparse, entry, i, parts, block, limit, BLOCK: tl.constexpr):
    """The i-th tile of a BlockSparse's list: where it begins and ends, its tile's first token, and its pattern."""
    at = entry * sparse.most + i // parts
    base = tl.load(sparse.index + at) * block
    return base + i % parts * BLOCK, min(limit, base + block), base, tl.load(sparse.pattern + at)


@triton.jit
def keys_step_along(
    acc_k, acc_v, k, tk, v, tv, x, t, sx, st, row, tbias, tbias_stride, dq, dbias, sdq, bias_stride, b, first, head, at,
    q0, q_end, keys, k_end, offset, factor, scale, size, band, extra, sparse, q_base, k_base, which,
    D: tl.constexpr, DW: tl.constexpr, E: tl.constexpr, EW: tl.constexpr, BQ: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr, ATOMIC: tl.constexpr,
    WITH_K: tl.constexpr, WITH_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of rows adds to a tile of keys, and if FUSED to its own dQ."""
    rows = q0 + tl.arange(0, BQ)[None, :]
    q = tile_at(x.q, sx.q, b, first, head, q0, q_end, D, DW, BQ, MASKED)  # [BQ, DW]
    do = tile_at(x.dout, sx.dout, b, first, head, q0, q_end, E, EW, BQ, MASKED)  # [BQ, EW]
    tq = t.q
    if t.q is not None:
        tq = tile_at(t.q, st.q, b, first, head, q0, q_end, D, DW, BQ, MASKED)
    tdo = t.dout
    if t.dout is not None:
        tdo = tile_at(t.dout, st.dout, b, first, head, q0, q_end, E, EW, BQ, MASKED)
    top, di, tlse, tdi = facts_along(row, at, q0, q_end, BQ, MASKED)
    norm = row.norm
    if row.norm is not None:
        norm = tl.load(row.norm + at + rows, mask=rows < q_end, other=1.0)
    p, tp, ds, tds = pair(
        k, tk, q, tq, v, tv, do, tdo, top[None, :], di[None, :], tlse[None, :], tdi[None, :], norm, tbias,
        tbias_stride, dbias, bias_stride, b, head, rows, keys, q_end, k_end, offset, factor, scale, size,
        band, extra, sparse, q_base, k_base, which, 1, NATURAL, PRECISION, ATOMIC, FUSED, MASKED,
    )  # fmt: skip
    if WITH_V:
        acc_v = products_along(acc_v, p, do, tp, tdo, PRECISION)
    if WITH_K:
        acc_k = products_along(acc_k, ds, q, tds, tq, PRECISION)
    if FUSED:
        part = tl.zeros([BQ, DW], tl.float32)
        part = products_along(part, tl.trans(ds), k, tl.trans(tds), tk, PRECISION)
        there = dq + origin(sdq, b, first, head)
        add_rows(there, None, b, head, q0, q_end, sdq.l, part, D, 0, DW, BQ)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["size", "band"])
def keys_along(
    x, t, sx, st, row, tbias, tbias_stride, dk, dv, dq, dbias, sdk, sdv, sdq, sl, bias_stride, factor, scale, size, lay,
    band, extra, sparse,
    D: tl.constexpr, DW: tl.constexpr, E: tl.constexpr, EW: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr,
    ATOMIC: tl.constexpr, WITH_K: tl.constexpr, WITH_V: tl.constexpr,
):  # fmt: skip
    """The tangents of dK, dV or both of one tile of keys: all heads of the group. size.heads counts kv heads."""
    sdk = stepped(sdk, dk, D)
    sdv = stepped(sdv, dv, E)
    sdq = stepped(sdq, dq, D)
    tile, g, b = assignment(size, False)
    if lay.cu_k is not None:
        fill_key_tail(dk, dv, lay, size, sdk, sdv, tile, g, b, D, DW, 0, E, EW, 0, BK)
    first_k, len_k = keys_of(lay, size, b)
    k0, k_end, k_base = key_tile(size, sparse, tile, len_k, BK)
    if k0 >= k_end:
        return
    first, len_q = rows_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    keys = k0 + tl.arange(0, BK)[:, None]
    k = tile_at(x.k, sx.k, b, first_k, g, k0, k_end, D, DW, BK, True)  # [BK, DW]
    v = tile_at(x.v, sx.v, b, first_k, g, k0, k_end, E, EW, BK, True)  # [BK, EW]
    tk = t.k
    if t.k is not None:
        tk = tile_at(t.k, st.k, b, first_k, g, k0, k_end, D, DW, BK, True)
    tv = t.v
    if t.v is not None:
        tv = tile_at(t.v, st.v, b, first_k, g, k0, k_end, E, EW, BK, True)
    acc_k, acc_v = tl.zeros([BK, DW], tl.float32), tl.zeros([BK, EW], tl.float32)
    start, end, full_start, full_end = query_bounds(band, offset, b, k0, k_end, len_q)
    if k_end - k0 < BK:
        full_end = full_start  # keys beyond the last need a mask with every row
    start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BQ)
    for member in range(size.group):
        head = g * size.group + member
        at = origin(sl, b, first, head)
        if sparse is None:
            turn, steps = turn_of(tile, full, full_end, BQ)
            for i in tl.range(0, steps):  # without masks
                q0 = turned(i, turn, steps, full, BQ)
                acc_k, acc_v = keys_step_along(
                    acc_k, acc_v, k, tk, v, tv, x, t, sx, st, row, tbias, tbias_stride, dq, dbias, sdq, bias_stride,
                    b, first, head, at, q0, len_q, keys, k_end, offset, factor, scale, size, band, extra, None, 0, 0, 0,
                    D, DW, E, EW, BQ, NATURAL, PRECISION, FUSED, ATOMIC, WITH_K, WITH_V, False,
                )  # fmt: skip
            for i in tl.range(0, n):  # at the edges
                q0 = edge(i, start, full_end, before, BQ)
                acc_k, acc_v = keys_step_along(
                    acc_k, acc_v, k, tk, v, tv, x, t, sx, st, row, tbias, tbias_stride, dq, dbias, sdq, bias_stride,
                    b, first, head, at, q0, len_q, keys, k_end, offset, factor, scale, size, band, extra, None, 0, 0, 0,
                    D, DW, E, EW, BQ, NATURAL, PRECISION, FUSED, ATOMIC, WITH_K, WITH_V, True,
                )  # fmt: skip
        else:
            entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + k_base // sparse.block_k
            parts = tl.cdiv(sparse.block_q, BQ)
            for i in tl.range(0, tl.load(sparse.count + entry) * parts):
                q0, q_end, q_base, which = listed(
                    sparse, entry, i, parts, sparse.block_q, len_q, BQ
                )
                acc_k, acc_v = keys_step_along(
                    acc_k, acc_v, k, tk, v, tv, x, t, sx, st, row, tbias, tbias_stride, dq, dbias, sdq, bias_stride,
                    b, first, head, at, q0, q_end, keys, k_end, offset, factor, scale, size, band, extra, sparse,
                    q_base, k_base, which,
                    D, DW, E, EW, BQ, NATURAL, PRECISION, FUSED, ATOMIC, WITH_K, WITH_V, True,
                )  # fmt: skip
    dk += origin(sdk, b, first_k, g)
    dv += origin(sdv, b, first_k, g)
    store_keys(
        dk, dv, sdk, sdv, k0, k_end, acc_k * scale, 0.0, acc_v, 0.0, D, DW, 0, E, EW, 0, BK, WITH_K,
        WITH_V, False,
    )  # fmt: skip


@triton.jit
def queries_step_along(
    acc, q, tq, do, tdo, top, di, tlse, tdi, norm, x, t, sx, st, tbias, tbias_stride, dbias, bias_stride, b, first_k, g,
    head, k0, k_end, rows, q_end, offset, factor, scale, size, band, extra, sparse, q_base, k_base, which,
    D: tl.constexpr, DW: tl.constexpr, E: tl.constexpr, EW: tl.constexpr, BK: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, ATOMIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to a tile of rows."""
    keys = k0 + tl.arange(0, BK)[None, :]
    k = tile_at(x.k, sx.k, b, first_k, g, k0, k_end, D, DW, BK, MASKED)  # [BK, DW]
    v = tile_at(x.v, sx.v, b, first_k, g, k0, k_end, E, EW, BK, MASKED)  # [BK, EW]
    tk = t.k
    if t.k is not None:
        tk = tile_at(t.k, st.k, b, first_k, g, k0, k_end, D, DW, BK, MASKED)
    tv = t.v
    if t.v is not None:
        tv = tile_at(t.v, st.v, b, first_k, g, k0, k_end, E, EW, BK, MASKED)
    _p, _tp, ds, tds = pair(
        q, tq, k, tk, do, tdo, v, tv, top, di, tlse, tdi, norm, tbias, tbias_stride, dbias, bias_stride, b, head, rows,
        keys, q_end, k_end, offset, factor, scale, size, band, extra, sparse, q_base, k_base, which, 0, NATURAL,
        PRECISION, ATOMIC, True, MASKED,
    )  # fmt: skip
    return products_along(acc, ds, k, tds, tk, PRECISION)


@triton.jit(do_not_specialize=["size", "band"])
def queries_along(
    x, t, sx, st, row, tbias, tbias_stride, dq, dbias, sdq, sl, bias_stride, factor, scale, size, lay, band, extra,
    sparse,
    D: tl.constexpr, DW: tl.constexpr, E: tl.constexpr, EW: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """The tangents of dQ of one tile of rows, and of dbias."""
    sdq = stepped(sdq, dq, D)
    tile, head, b = assignment(size, band.right is not None)
    if lay.cu_q is not None:
        fill_tail(dq, None, lay, size, sdq, sl, tile, head, b, 0.0, D, DW, 0, BQ)
    first, len_q = rows_of(lay, size, b)
    q0, q_end, q_base = query_tile(size, sparse, tile, len_q, BQ)
    if q0 >= q_end:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    g = head // size.group
    rows = q0 + tl.arange(0, BQ)[:, None]
    q = tile_at(x.q, sx.q, b, first, head, q0, q_end, D, DW, BQ, True)  # [BQ, DW]
    do = tile_at(x.dout, sx.dout, b, first, head, q0, q_end, E, EW, BQ, True)  # [BQ, EW]
    tq = t.q
    if t.q is not None:
        tq = tile_at(t.q, st.q, b, first, head, q0, q_end, D, DW, BQ, True)
    tdo = t.dout
    if t.dout is not None:
        tdo = tile_at(t.dout, st.dout, b, first, head, q0, q_end, E, EW, BQ, True)
    at = origin(sl, b, first, head)
    top, di, tlse, tdi = facts_along(row, at, q0, q_end, BQ, True)
    top, di, tlse, tdi = top[:, None], di[:, None], tlse[:, None], tdi[:, None]
    norm = row.norm
    if row.norm is not None:
        norm = tl.load(row.norm + at + rows, mask=rows < q_end, other=1.0)
    acc = tl.zeros([BQ, DW], tl.float32)
    if sparse is None:
        start, end, full_start, full_end = bounds(band, offset, b, q0, q_end, len_k, BQ)
        start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BK)
        turn, steps = turn_of(tile, full, full_end, BK)
        for i in tl.range(0, steps):  # without masks
            k0 = turned(i, turn, steps, full, BK)
            acc = queries_step_along(
                acc, q, tq, do, tdo, top, di, tlse, tdi, norm, x, t, sx, st, tbias, tbias_stride, dbias, bias_stride,
                b, first_k, g, head, k0, len_k, rows, q_end, offset, factor, scale, size, band, extra, None, 0, 0, 0,
                D, DW, E, EW, BK, NATURAL, PRECISION, ATOMIC, False,
            )  # fmt: skip
        for i in tl.range(0, n):  # at the edges
            k0 = edge(i, start, full_end, before, BK)
            acc = queries_step_along(
                acc, q, tq, do, tdo, top, di, tlse, tdi, norm, x, t, sx, st, tbias, tbias_stride, dbias, bias_stride,
                b, first_k, g, head, k0, len_k, rows, q_end, offset, factor, scale, size, band, extra, None, 0, 0, 0,
                D, DW, E, EW, BK, NATURAL, PRECISION, ATOMIC, True,
            )  # fmt: skip
    else:
        entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + q_base // sparse.block_q
        parts = tl.cdiv(sparse.block_k, BK)
        for i in tl.range(0, tl.load(sparse.count + entry) * parts):
            k0, k_end, k_base, which = listed(sparse, entry, i, parts, sparse.block_k, len_k, BK)
            acc = queries_step_along(
                acc, q, tq, do, tdo, top, di, tlse, tdi, norm, x, t, sx, st, tbias, tbias_stride, dbias, bias_stride,
                b, first_k, g, head, k0, k_end, rows, q_end, offset, factor, scale, size, band, extra, sparse, q_base,
                k_base, which, D, DW, E, EW, BK, NATURAL, PRECISION, ATOMIC, True,
            )  # fmt: skip
    dq += origin(sdq, b, first, head)
    store_tile(dq, q0, q_end, sdq.l, acc * scale, D, 0, DW, BQ)
