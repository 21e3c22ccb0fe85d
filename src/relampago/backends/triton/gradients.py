"""The backward's kernels: FlashAttention-2, Algorithm 2 (arXiv 2307.08691), recomputing the weights tile by tile.

`by_keys` owns a tile of keys and loops over the rows that see it: dK and dV, and if FUSED dQ by atomic additions.
`by_queries` owns a tile of rows and loops over its keys: dQ, when sums must not depend on the order of programs.
Scores lie as [BK, BQ] in the first, so that weights are the left operand of dV and dK as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relampago.backends.triton.forward import fill_tail, products, query_tile
from relampago.backends.triton.tile import (
    assignment,
    bounds,
    edge,
    kept,
    key_origin,
    keys_of,
    list_of,
    load_keys,
    load_rows,
    load_tile,
    loop_bounds,
    offset_of,
    origin,
    part_of,
    pattern_of,
    places,
    query_bounds,
    rows_of,
    scores,
    slope,
    stepped,
    store_tile,
    turn_of,
    turned,
    weights,
)


@triton.jit
def add_bias_gradient(
    dbias, stride, ds, b, head, rows, keys, q_limit, k_limit, ROW_AXIS: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """Add a tile of dS to dbias, summed over the dimensions that the bias does not have."""
    if stride.q is None:
        ds = tl.sum(ds, ROW_AXIS, keep_dims=True)
        rows = tl.min(rows, ROW_AXIS, keep_dims=True)
    if stride.k is None:
        ds = tl.sum(ds, 1 - ROW_AXIS, keep_dims=True)
        keys = tl.min(keys, 1 - ROW_AXIS, keep_dims=True)
    at = dbias + part_of(stride, b, head, rows, keys)
    inside = (rows < q_limit) & (keys < k_limit)
    if ATOMIC:
        tl.atomic_add(at, ds, mask=inside, sem="relaxed")
    else:
        tl.store(at, ds, mask=inside)


@triton.jit
def row_facts(shift, delta, q0, q_end, BQ: tl.constexpr, MASKED: tl.constexpr):
    """What rows q0.. subtract, and their delta; rows beyond q_end have no weight."""
    row = q0 + tl.arange(0, BQ)
    if MASKED:
        inside = row < q_end
        top = tl.load(shift + row, mask=inside, other=float("inf"))
        di = tl.load(delta + row, mask=inside, other=0.0)
    else:
        top = tl.load(shift + row)
        di = tl.load(delta + row)
    return top, di


@triton.jit
def add_rows(
    base, box, b, head, first, limit, stride, x, DIM: tl.constexpr, COL: tl.constexpr,
    WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add [N, WIDTH] to rows that other programs add to as well."""
    if box is not None:
        box.atomic_add([b, first, head, COL], x.reshape([1, N, 1, WIDTH]))
    else:
        row = tl.arange(0, N)
        col = COL + tl.arange(0, WIDTH)
        at = places(base, first, stride, COL, WIDTH, N)
        inside = (row[:, None] < limit - first) & (col[None, :] < DIM)
        tl.atomic_add(at, x, mask=inside, sem="relaxed")


@triton.jit
def keys_step(
    dk1, dk2, dv1, dv2, k1, k2, v1, v2, q, dout, dq, qb1, qb2, ob1, ob2, dq1, dq2, dbias, shift, delta, norm, b,
    head, q0, keys, q_end, k_limit, offset, factor, scale, size, sq, sdo, sdq, band, extra, bias_stride, sparse,
    q_base, k_base, which,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    FUSED: tl.constexpr, ATOMIC: tl.constexpr, WITH_K: tl.constexpr, WITH_V: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 11 to 17, for rows q0.. against the program's keys."""
    rows = q0 + tl.arange(0, BQ)[None, :]
    q1 = load_rows(q, qb1, b, head, q0, q_end, sq.l, D, 0, D1, BQ, MASKED)  # [BQ, D1]
    s = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)  # [BK, BQ]
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q, qb2, b, head, q0, q_end, sq.l, D, D1, D2, BQ, MASKED)
        s = tl.dot(k2, tl.trans(q2), s, input_precision=PRECISION)
    top, di = row_facts(shift, delta, q0, q_end, BQ, MASKED)
    row_norm = norm
    if norm is not None:
        row_norm = tl.load(norm + rows, mask=rows < q_end, other=1.0)
    masked = scores(
        s, factor, band, extra, offset, b, head, rows, keys, q_end, k_limit, NATURAL, MASKED
    )  # line 11
    if sparse is not None:
        seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
        masked = tl.where(seen, masked, float("-inf"))
    p = weights(masked, top[None, :], row_norm, factor, NATURAL)  # line 12
    do1 = load_rows(dout, ob1, b, head, q0, q_end, sdo.l, E, 0, E1, BQ, MASKED)  # [BQ, E1]
    do2 = do1
    if E2 > 0:
        do2 = load_rows(dout, ob2, b, head, q0, q_end, sdo.l, E, E1, E2, BQ, MASKED)
    dp = p
    if WITH_K:
        dp = tl.dot(v1, tl.trans(do1), input_precision=PRECISION)  # line 14
        if E2 > 0:
            dp = tl.dot(v2, tl.trans(do2), dp, input_precision=PRECISION)
    if extra.seed is not None:
        keep = kept(extra, size, b, head, rows, keys)
    if WITH_V:
        pd = p
        if extra.seed is not None:
            pd = tl.where(keep, p * extra.upscale, 0.0)
        pd = pd.to(k1.dtype)
        dv1 = tl.dot(pd, do1, dv1, input_precision=PRECISION)  # line 13
        if E2 > 0:
            dv2 = tl.dot(pd, do2, dv2, input_precision=PRECISION)
    if not WITH_K:
        return dk1, dk2, dv1, dv2
    if extra.seed is not None:
        dp = tl.where(keep, dp * extra.upscale, 0.0)
    ds = p * (dp - di[None, :])  # line 15
    if dbias is not None and FUSED:
        add_bias_gradient(dbias, bias_stride, ds, b, head, rows, keys, q_end, k_limit, 1, ATOMIC)
    if NATURAL and extra.modified is not None:
        ds *= slope(s * scale, extra.mods, extra.modified, b, head, rows, keys, offset)
    ds = ds.to(k1.dtype)
    dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)  # line 17
    if D2 > 0:
        dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
    if FUSED:  # line 16
        part = tl.dot(tl.trans(ds), k1, input_precision=PRECISION)  # [BQ, D1]
        add_rows(dq, dq1, b, head, q0, q_end, sdq.l, part, D, 0, D1, BQ)
        if D2 > 0:
            part = tl.dot(tl.trans(ds), k2, input_precision=PRECISION)
            add_rows(dq, dq2, b, head, q0, q_end, sdq.l, part, D, D1, D2, BQ)
    return dk1, dk2, dv1, dv2


@triton.jit
def fill_key_tail(
    dk, dv, lay, size, sdk, sdv, tile, g, b, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Keys of a packed tensor that belong to no sequence have no gradient."""
    if b == size.batch - 1:
        end = min(max(tl.load(lay.cu_k + size.batch), 0), size.total_k)
        for key in range(end + tile * BK, size.total_k, size.tiles * BK):
            store_keys(
                dk + origin(sdk, 0, 0, g), dv + origin(sdv, 0, 0, g), sdk, sdv, key, size.total_k,
                tl.zeros([BK, D1], tl.float32), tl.zeros([BK, D2 if D2 > 0 else 16], tl.float32),
                tl.zeros([BK, E1], tl.float32), tl.zeros([BK, E2 if E2 > 0 else 16], tl.float32),
                D, D1, D2, E, E1, E2, BK, True, True, False,
            )  # fmt: skip


@triton.jit
def put_tile(
    base, first, limit, stride, x, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Write a tile that no other program writes; if ADDS, what stands there added."""
    if ADDS:
        x += load_tile(base, first, limit, stride, DIM, COL, WIDTH, N, True)
    store_tile(base, first, limit, stride, x, DIM, COL, WIDTH, N)


@triton.jit
def store_keys(
    dk, dv, sdk, sdv, k0, k_end, dk1, dk2, dv1, dv2, D: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BK: tl.constexpr,
    WITH_K: tl.constexpr, WITH_V: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Write both parts of dK and dV."""
    if WITH_K:
        put_tile(dk, k0, k_end, sdk.l, dk1, D, 0, D1, BK, ADDS)
        if D2 > 0:
            put_tile(dk, k0, k_end, sdk.l, dk2, D, D1, D2, BK, ADDS)
    if WITH_V:
        put_tile(dv, k0, k_end, sdv.l, dv1, E, 0, E1, BK, ADDS)
        if E2 > 0:
            put_tile(dv, k0, k_end, sdv.l, dv2, E, E1, E2, BK, ADDS)


@triton.jit
def key_tile(size, sparse, tile, len_k, BK: tl.constexpr):
    """Keys [k0, k_end) of a tile, and the first key of its tile of the BlockSparse."""
    if sparse is None:
        k0 = tile * BK
        return k0, min(k0 + BK, len_k), k0
    else:
        parts = tl.cdiv(sparse.block_k, BK)
        base = tile // parts * sparse.block_k
        k0 = base + tile % parts * BK
        return k0, min(min(k0 + BK, base + sparse.block_k), len_k), base


@triton.jit(do_not_specialize=["size", "band"])
def by_keys(
    q, k, v, dout, dk, dv, dq, qb1, qb2, ob1, ob2, dq1, dq2, dbias, shift, delta, norm, factor, scale, size, lay,
    sq, sk, sv, sdo, sdk, sdv, sdq, sl, band, extra, bias_stride, sparse,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr, FUSED: tl.constexpr, ATOMIC: tl.constexpr, WITH_K: tl.constexpr,
    WITH_V: tl.constexpr, ADDS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """dK, dV or both of one tile of keys: all heads of the group, so that nothing is shared. ADDS: to what is there.

    size.heads counts kv heads. One of the two alone leaves its accumulator twice the registers. FIXED: rows come in
    order, whatever they see, so that neither other sequences nor rows of zeros behind the last change a bit.
    """
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    sdo = stepped(sdo, dout, E)
    if not ADDS:  # else they are the caller's
        sdk = stepped(sdk, dk, D)
        sdv = stepped(sdv, dv, E)
    if FUSED:
        sdq = stepped(sdq, dq, D)
    tile, g, b = assignment(size, False)
    if lay.cu_k is not None:
        fill_key_tail(dk, dv, lay, size, sdk, sdv, tile, g, b, D, D1, D2, E, E1, E2, BK)
    first_k, len_k = keys_of(lay, size, b)
    k0, k_end, k_base = key_tile(size, sparse, tile, len_k, BK)
    if k0 >= k_end:
        return
    first, len_q = rows_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    keys = k0 + tl.arange(0, BK)[:, None]
    k += origin(sk, b, first_k, g)
    v += origin(sv, b, first_k, g)
    k1 = load_tile(k, k0, k_end, sk.l, D, 0, D1, BK, True)  # [BK, D1]
    v1 = load_tile(v, k0, k_end, sv.l, E, 0, E1, BK, True)  # [BK, E1]
    dk1, dv1 = tl.zeros([BK, D1], tl.float32), tl.zeros([BK, E1], tl.float32)
    k2, v2, dk2, dv2 = k1, v1, 0.0, 0.0
    if D2 > 0:
        k2 = load_tile(k, k0, k_end, sk.l, D, D1, D2, BK, True)
        dk2 = tl.zeros([BK, D2], tl.float32)
    if E2 > 0:
        v2 = load_tile(v, k0, k_end, sv.l, E, E1, E2, BK, True)
        dv2 = tl.zeros([BK, E2], tl.float32)
    start, end, full_start, full_end = query_bounds(band, offset, b, k0, k_end, len_q)
    if k_end - k0 < BK:
        full_end = full_start  # keys beyond the last need a mask with every row
    if FIXED:
        full_start, full_end = 0, 0
    start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BQ)
    for r in range(size.group):
        head = g * size.group + r
        q_head = q + origin(sq, b, first, head)
        do_head = dout + origin(sdo, b, first, head)
        at = origin(sl, b, first, head)
        norm_head = norm
        if norm is not None:
            norm_head = norm + at
        dq_head = dq
        if FUSED:
            dq_head = dq + origin(sdq, b, first, head)
        if sparse is None:
            turn, steps = turn_of(tile, full, full_end, BQ)
            if FIXED:  # and no first loop
                steps = 0
            for i in tl.range(0, steps):
                q0 = turned(i, turn, steps, full, BQ)
                dk1, dk2, dv1, dv2 = keys_step(
                    dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_head, do_head, dq_head, qb1, qb2, ob1, ob2, dq1, dq2,
                    dbias, shift + at, delta + at, norm_head, b, head, q0, keys, len_q, k_end, offset,
                    factor, scale, size, sq, sdo, sdq, band, extra, bias_stride, None, 0, 0, 0,
                    D, D1, D2, E, E1, E2, BQ, NATURAL, PRECISION, FUSED, ATOMIC, WITH_K, WITH_V, False,
                )  # fmt: skip
            for i in tl.range(0, n):
                q0 = edge(i, start, full_end, before, BQ)
                dk1, dk2, dv1, dv2 = keys_step(
                    dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_head, do_head, dq_head, qb1, qb2, ob1, ob2, dq1, dq2,
                    dbias, shift + at, delta + at, norm_head, b, head, q0, keys, len_q, k_end, offset,
                    factor, scale, size, sq, sdo, sdq, band, extra, bias_stride, None, 0, 0, 0,
                    D, D1, D2, E, E1, E2, BQ, NATURAL, PRECISION, FUSED, ATOMIC, WITH_K, WITH_V, True,
                )  # fmt: skip
        else:
            entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + k_base // sparse.block_k
            parts = tl.cdiv(sparse.block_q, BQ)
            for i in tl.range(0, tl.load(sparse.count + entry) * parts):
                tile_at = entry * sparse.most + i // parts
                q_base = tl.load(sparse.index + tile_at) * sparse.block_q
                which = tl.load(sparse.pattern + tile_at)
                q0 = q_base + i % parts * BQ
                limit = min(len_q, q_base + sparse.block_q)
                dk1, dk2, dv1, dv2 = keys_step(
                    dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_head, do_head, dq_head, qb1, qb2, ob1, ob2, dq1, dq2,
                    dbias, shift + at, delta + at, norm_head, b, head, q0, keys, limit, k_end, offset,
                    factor, scale, size, sq, sdo, sdq, band, extra, bias_stride, sparse, q_base,
                    k_base, which,
                    D, D1, D2, E, E1, E2, BQ, NATURAL, PRECISION, FUSED, ATOMIC, WITH_K, WITH_V, True,
                )  # fmt: skip
    dk += origin(sdk, b, first_k, g)
    dv += origin(sdv, b, first_k, g)
    dk1 *= scale
    if D2 > 0:
        dk2 *= scale
    store_keys(
        dk, dv, sdk, sdv, k0, k_end, dk1, dk2, dv1, dv2, D, D1, D2, E, E1, E2, BK, WITH_K, WITH_V, ADDS
    )  # fmt: skip


@triton.jit
def queries_step(
    dq1, dq2, q1, q2, do1, do2, k, v, kb1, kb2, vb1, vb2, dbias, top, di, row_norm, b, head, k0,
    rows, q_end, k_limit, offset, factor, scale, size, lay, sk, sv, band, extra, bias_stride, sparse, q_base, k_base,
    which,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BK: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    ATOMIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 11, 12 and 14 to 16, for keys k0.. against the program's rows."""
    keys = k0 + tl.arange(0, BK)[None, :]
    g = head // size.group
    s = products(q1, q2, k, kb1, kb2, lay, sk, b, g, k0, k_limit, D, D1, D2, BK, MASKED, PRECISION)
    masked = scores(
        s, factor, band, extra, offset, b, head, rows, keys, q_end, k_limit, NATURAL, MASKED
    )  # line 11
    if sparse is not None:
        seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
        masked = tl.where(seen, masked, float("-inf"))
    p = weights(masked, top[:, None], row_norm, factor, NATURAL)  # line 12
    dp = products(
        do1, do2, v, vb1, vb2, lay, sv, b, g, k0, k_limit, E, E1, E2, BK, MASKED, PRECISION
    )  # line 14
    if extra.seed is not None:
        keep = kept(extra, size, b, head, rows, keys)
        dp = tl.where(keep, dp * extra.upscale, 0.0)
    ds = p * (dp - di[:, None])  # line 15
    if dbias is not None:
        add_bias_gradient(dbias, bias_stride, ds, b, head, rows, keys, q_end, k_limit, 0, ATOMIC)
    if NATURAL and extra.modified is not None:
        ds *= slope(s * scale, extra.mods, extra.modified, b, head, rows, keys, offset)
    ds = ds.to(q1.dtype)
    k1 = load_keys(k, kb1, lay, b, g, k0, k_limit, sk, D, 0, D1, BK, MASKED)  # [BK, D1]
    dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)  # line 16
    if D2 > 0:
        k2 = load_keys(k, kb2, lay, b, g, k0, k_limit, sk, D, D1, D2, BK, MASKED)
        dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
    return dq1, dq2


@triton.jit(do_not_specialize=["size", "band"])
def by_queries(
    q, k, v, kb1, kb2, vb1, vb2, dout, dq, dbias, shift, delta, norm, factor, scale, size, lay, sq,
    sk, sv, sdo, sdq, sl, band, extra, bias_stride, sparse,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr, ATOMIC: tl.constexpr, ADDS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of rows, added to what is there if ADDS, and dbias. FIXED: keys come in order, as in `by_keys`."""
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    sdo = stepped(sdo, dout, E)
    if not ADDS:  # else it is the caller's
        sdq = stepped(sdq, dq, D)
    tile, head, b = assignment(size, band.right is not None)
    if lay.cu_q is not None:
        fill_tail(dq, None, lay, size, sdq, sl, tile, head, b, 0.0, D, D1, D2, BQ)
    first, len_q = rows_of(lay, size, b)
    q0, q_end, q_base = query_tile(size, sparse, tile, len_q, BQ)
    if q0 >= q_end:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    rows = q0 + tl.arange(0, BQ)[:, None]
    q += origin(sq, b, first, head)
    dout += origin(sdo, b, first, head)
    k += key_origin(lay, sk, b, first_k, head // size.group)
    v += key_origin(lay, sv, b, first_k, head // size.group)
    at = origin(sl, b, first, head)
    top, di = row_facts(shift + at, delta + at, q0, q_end, BQ, True)
    row_norm = norm
    if norm is not None:
        row_norm = tl.load(norm + at + rows, mask=rows < q_end, other=1.0)
    q1 = load_tile(q, q0, q_end, sq.l, D, 0, D1, BQ, True)  # [BQ, D1]
    do1 = load_tile(dout, q0, q_end, sdo.l, E, 0, E1, BQ, True)  # [BQ, E1]
    q2, do2, dq2 = q1, do1, 0.0
    dq1 = tl.zeros([BQ, D1], tl.float32)
    if D2 > 0:
        q2 = load_tile(q, q0, q_end, sq.l, D, D1, D2, BQ, True)
        dq2 = tl.zeros([BQ, D2], tl.float32)
    if E2 > 0:
        do2 = load_tile(dout, q0, q_end, sdo.l, E, E1, E2, BQ, True)
    if sparse is None:
        start, end, full_start, full_end = bounds(band, offset, b, q0, q_end, len_k, BQ)
        if FIXED:
            full_start, full_end = 0, 0
        start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BK)
        turn, steps = turn_of(tile, full, full_end, BK)
        if FIXED:  # and no first loop
            steps = 0
        for i in tl.range(0, steps):
            k0 = turned(i, turn, steps, full, BK)
            dq1, dq2 = queries_step(
                dq1, dq2, q1, q2, do1, do2, k, v, kb1, kb2, vb1, vb2, dbias, top, di, row_norm, b, head, k0, rows,
                q_end, len_k, offset, factor, scale, size, lay, sk, sv, band, extra, bias_stride,
                None, 0, 0, 0,
                D, D1, D2, E, E1, E2, BK, NATURAL, PRECISION, ATOMIC, False,
            )  # fmt: skip
        for i in tl.range(0, n):
            k0 = edge(i, start, full_end, before, BK)
            dq1, dq2 = queries_step(
                dq1, dq2, q1, q2, do1, do2, k, v, kb1, kb2, vb1, vb2, dbias, top, di, row_norm, b, head, k0, rows,
                q_end, len_k, offset, factor, scale, size, lay, sk, sv, band, extra, bias_stride,
                None, 0, 0, 0,
                D, D1, D2, E, E1, E2, BK, NATURAL, PRECISION, ATOMIC, True,
            )  # fmt: skip
    else:
        entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + q_base // sparse.block_q
        parts = tl.cdiv(sparse.block_k, BK)
        for i in tl.range(0, tl.load(sparse.count + entry) * parts):
            tile_at = entry * sparse.most + i // parts
            k_base = tl.load(sparse.index + tile_at) * sparse.block_k
            which = tl.load(sparse.pattern + tile_at)
            k0 = k_base + i % parts * BK
            limit = min(len_k, k_base + sparse.block_k)
            dq1, dq2 = queries_step(
                dq1, dq2, q1, q2, do1, do2, k, v, kb1, kb2, vb1, vb2, dbias, top, di, row_norm, b, head, k0, rows,
                q_end, limit, offset, factor, scale, size, lay, sk, sv, band, extra, bias_stride,
                sparse, q_base, k_base, which,
                D, D1, D2, E, E1, E2, BK, NATURAL, PRECISION, ATOMIC, True,
            )  # fmt: skip
    dq += origin(sdq, b, first, head)
    put_tile(dq, q0, q_end, sdq.l, dq1 * scale, D, 0, D1, BQ, ADDS)
    if D2 > 0:
        put_tile(dq, q0, q_end, sdq.l, dq2 * scale, D, D1, D2, BQ, ADDS)
