"""Statistics of the weights: `describe` is the forward's loop without values, `receive` dK's without gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from relampago.backends.triton import arguments as A
from relampago.backends.triton.forward import (
    cut_keys,
    cut_queries,
    launch,
    precision,
    products,
    query_tile,
    raise_to,
)
from relampago.backends.triton.gradients import key_tile
from relampago.backends.triton.preprocess import renormalise
from relampago.backends.triton.tile import (
    LN2,
    LOG2E,
    assignment,
    bounds,
    edge,
    finite,
    key_origin,
    keys_of,
    list_of,
    load_rows,
    load_tile,
    loop_bounds,
    offset_of,
    origin,
    pattern_of,
    query_bounds,
    rows_of,
    scores,
    stepped,
    turn_of,
    turned,
    weights,
)
from relampago.plan import Plan
from relampago.problem import Arrays, RowStatistics, empty_lse

LEAST = tl.constexpr(-1.0e4)  # whose power is 0, and whose product with 0 is 0: stands for -inf


@triton.jit
def joined(l, t, d, weight, weighted):
    """l and t = Σ exp2(u) u at a new maximum, d above the old one, with more weights; see cpu/statistics.py."""
    d = tl.maximum(d, LEAST)
    alpha = tl.exp2(d)
    return l * alpha + weight, alpha * (t + d * l) + weighted


@triton.jit
def describe_step(
    l, t, m, q1, q2, k, b, head, k0, rows, q_end, k_limit, offset, factor, size, lay, sk, band, extra, sparse,
    q_base, k_base, which,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BK: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: Σ exp2(u) and Σ exp2(u) u, u the scores in base 2 below the maximum."""
    keys = k0 + tl.arange(0, BK)[None, :]
    s = products(
        q1, q2, k, None, None, lay, sk, b, head // size.group, k0, k_limit, D, D1, D2, BK, MASKED, PRECISION
    )  # fmt: skip
    s = scores(s, factor, band, extra, offset, b, head, rows, keys, q_end, k_limit, NATURAL, MASKED)
    if sparse is not None:
        seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
        s = tl.where(seen, s, float("-inf"))
    if NATURAL:
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = finite(m_new)
        u, d = (s - shift[:, None]) * LOG2E, (m - shift) * LOG2E
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        shift = finite(m_new)
        u, d = s * factor - shift[:, None], m - shift
    u = tl.maximum(u, LEAST)
    p = tl.exp2(u)
    l, t = joined(l, t, d, tl.sum(p, 1), tl.sum(p * u, 1))
    return l, t, m_new


@triton.jit(do_not_specialize=["size", "band"])
def describe(
    q, k, lse, entropy, top, last, factor, size, lay, sq, sk, sl, band, extra, sparse,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LSE and entropy of one tile of queries; a tile without any of the last rows stops at once."""
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    tile, head, b = assignment(size, band.right is not None)
    first, len_q = rows_of(lay, size, b)
    q0, q_end, q_base = query_tile(size, sparse, tile, len_q, BQ)
    if q0 >= q_end or q_end <= len_q - last:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    rows = q0 + tl.arange(0, BQ)[:, None]
    q += origin(sq, b, first, head)
    k += key_origin(lay, sk, b, first_k, head // size.group)
    q1 = load_tile(q, q0, q_end, sq.l, D, 0, D1, BQ, True)  # [BQ, D1]
    q2 = q1
    if D2 > 0:
        q2 = load_tile(q, q0, q_end, sq.l, D, D1, D2, BQ, True)
    m = tl.full([BQ], float("-inf"), tl.float32)
    l = tl.zeros([BQ], tl.float32)
    t = tl.zeros([BQ], tl.float32)
    if sparse is None:
        start, end, full_start, full_end = bounds(band, offset, b, q0, q_end, len_k, BQ)
        start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BK)
        turn, steps = turn_of(tile, full, full_end, BK)
        for i in tl.range(0, steps):
            k0 = turned(i, turn, steps, full, BK)
            l, t, m = describe_step(
                l, t, m, q1, q2, k, b, head, k0, rows, q_end, len_k, offset, factor, size, lay, sk, band, extra,
                None, 0, 0, 0, D, D1, D2, BK, NATURAL, PRECISION, False,
            )  # fmt: skip
        for i in tl.range(0, n):
            k0 = edge(i, start, full_end, before, BK)
            l, t, m = describe_step(
                l, t, m, q1, q2, k, b, head, k0, rows, q_end, len_k, offset, factor, size, lay, sk, band, extra,
                None, 0, 0, 0, D, D1, D2, BK, NATURAL, PRECISION, True,
            )  # fmt: skip
    else:
        entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + q_base // sparse.block_q
        parts = tl.cdiv(sparse.block_k, BK)
        for i in tl.range(0, tl.load(sparse.count + entry) * parts):
            at = entry * sparse.most + i // parts
            k_base = tl.load(sparse.index + at) * sparse.block_k
            which = tl.load(sparse.pattern + at)
            k0 = k_base + i % parts * BK
            l, t, m = describe_step(
                l, t, m, q1, q2, k, b, head, k0, rows, q_end, len_k, offset, factor, size, lay, sk, band, extra,
                sparse, q_base, k_base, which, D, D1, D2, BK, NATURAL, PRECISION, True,
            )  # fmt: skip
    raise_to(top, tl.where(rows.reshape([BQ]) < q_end, m, float("-inf")), size, b, head, NATURAL)
    if extra.sinks is not None:  # one more score
        unit = LOG2E if NATURAL else 1.0
        sink = tl.load(extra.sinks + head).to(tl.float32) * (1.0 if NATURAL else LOG2E)
        m_new = tl.maximum(m, sink)
        shift = finite(m_new)
        u = tl.maximum((sink - shift) * unit, LEAST)
        l, t = joined(l, t, (m - shift) * unit, tl.exp2(u), tl.exp2(u) * u)
        m = m_new
    some = m > float("-inf")
    l = tl.where(some, l, 1.0)
    total = m * (1.0 if NATURAL else LN2) + tl.log2(l) * LN2
    at = origin(sl, b, first, head) + q0 + tl.arange(0, BQ)
    inside = q0 + tl.arange(0, BQ) < q_end
    tl.store(lse + at, total, mask=inside)
    tl.store(entropy + at, tl.where(some, (tl.log2(l) - t / l) * LN2, 0.0), mask=inside)


@triton.jit
def receive_step(
    sums, k1, k2, q, shift, norm, b, head, q0, first_row, keys, q_end, k_limit, offset, factor, sq, band, extra,
    sparse, q_base, k_base, which,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BQ: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the weights of rows q0.. against the program's keys; rows before first_row have none."""
    rows = q0 + tl.arange(0, BQ)[None, :]
    q1 = load_rows(q, None, b, head, q0, q_end, sq.l, D, 0, D1, BQ, MASKED)  # [BQ, D1]
    s = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)  # [BK, BQ]
    if D2 > 0:
        q2 = load_rows(q, None, b, head, q0, q_end, sq.l, D, D1, D2, BQ, MASKED)
        s = tl.dot(k2, tl.trans(q2), s, input_precision=PRECISION)
    inside = (rows < q_end) & (rows >= first_row)
    top = tl.load(shift + rows, mask=inside, other=float("inf"))
    row_norm = norm
    if norm is not None:
        row_norm = tl.load(norm + rows, mask=inside, other=1.0)
    s = scores(s, factor, band, extra, offset, b, head, rows, keys, q_end, k_limit, NATURAL, MASKED)
    if sparse is not None:
        seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
        s = tl.where(seen, s, float("-inf"))
    return sums + tl.sum(weights(s, top, row_norm, factor, NATURAL), 1)


@triton.jit(do_not_specialize=["size", "band"])
def receive(
    q, k, columns, shift, norm, last, factor, size, lay, sq, sk, sc, sl, band, extra, sparse,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights that one tile of keys receives from a query head's last rows."""
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    tile, head, b = assignment(size, False)
    first_k, len_k = keys_of(lay, size, b)
    k0, k_end, k_base = key_tile(size, sparse, tile, len_k, BK)
    if k0 >= k_end:
        return
    first, len_q = rows_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    first_row = max(len_q - last, 0)
    keys = k0 + tl.arange(0, BK)[:, None]
    k += origin(sk, b, first_k, head // size.group)
    q += origin(sq, b, first, head)
    k1 = load_tile(k, k0, k_end, sk.l, D, 0, D1, BK, True)  # [BK, D1]
    k2 = k1
    if D2 > 0:
        k2 = load_tile(k, k0, k_end, sk.l, D, D1, D2, BK, True)
    at = origin(sl, b, first, head)
    shift += at
    norm_head = norm
    if norm is not None:
        norm_head = norm + at
    sums = tl.zeros([BK], tl.float32)
    if sparse is None:
        start, end, full_start, full_end = query_bounds(band, offset, b, k0, k_end, len_q)
        if k_end - k0 < BK:
            full_end = full_start  # keys beyond the last need a mask with every row
        start, full_start = max(start, first_row), max(full_start, first_row)
        start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BQ)
        turn, steps = turn_of(tile, full, full_end, BQ)
        for i in tl.range(0, steps):
            q0 = turned(i, turn, steps, full, BQ)
            sums = receive_step(
                sums, k1, k2, q, shift, norm_head, b, head, q0, first_row, keys, len_q, k_end, offset, factor, sq,
                band, extra, None, 0, 0, 0, D, D1, D2, BQ, NATURAL, PRECISION, False,
            )  # fmt: skip
        for i in tl.range(0, n):
            q0 = edge(i, start, full_end, before, BQ)
            sums = receive_step(
                sums, k1, k2, q, shift, norm_head, b, head, q0, first_row, keys, len_q, k_end, offset, factor, sq,
                band, extra, None, 0, 0, 0, D, D1, D2, BQ, NATURAL, PRECISION, True,
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
            sums = receive_step(
                sums, k1, k2, q, shift, norm_head, b, head, q0, first_row, keys, limit, k_end, offset, factor, sq,
                band, extra, sparse, q_base, k_base, which, D, D1, D2, BQ, NATURAL, PRECISION, True,
            )  # fmt: skip
    key = k0 + tl.arange(0, BK)
    tl.store(columns + origin(sc, b, first_k, head) + key, sums, mask=key < k_end)


def row_statistics(x: Arrays, plan: Plan, last: int) -> RowStatistics:
    """LSE and entropy of the last rows of each sequence, and each head's largest score, as softmax reads it."""
    q, k = A.rows_contiguous(x.q), A.rows_contiguous(x.k)
    lse = empty_lse(x)
    top = lse.new_full((x.batch, q.shape[-2]), float("-inf"))
    found = RowStatistics(lse, torch.zeros_like(lse), top)
    tiles, block_q = cut_queries(x, plan)
    _, block_k = cut_keys(x, plan)
    size = A.size_of(x, tiles, q.shape[-1] * q.element_size())
    grid, natural = tiles * size.batch * size.heads, A.natural(x)
    if grid:
        launch(
            describe, grid, plan, q, k, *found, last, x.scale if natural else x.scale * LOG2E.value, size,
            A.lay_of(x), A.strides(q), A.strides(k), A.lse_strides(x), A.band_of(x.band), A.extra_of(x),
            A.sparse_of(x, False), q.shape[-1], *A.parts(x)[:2], block_q, block_k, natural, precision(x),
        )  # fmt: skip
    return found


def column_sums(x: Arrays, plan: Plan, lse: Tensor, last: int) -> Tensor:
    """The weights that each key receives from the last rows of its sequence, (B, H, Lk) or (H, Tk)."""
    q, k = A.rows_contiguous(x.q), A.rows_contiguous(x.k)
    length, heads = k.shape[-3], q.shape[-2]
    shape = (x.batch, heads, length) if x.cu_k is None else (heads, length)
    columns = torch.zeros(shape, dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return columns
    natural, dims, how = A.natural(x), (q.shape[-1], *A.parts(x)[:2]), precision(x)
    factor = x.scale if natural else x.scale * LOG2E.value
    lay, sl, band, extra = A.lay_of(x), A.lse_strides(x), A.band_of(x.band), A.extra_of(x)
    sq, sk = A.strides(q), A.strides(k)
    shift = (
        torch.where(lse == -torch.inf, torch.inf, lse)
        .mul_(1.0 if natural else LOG2E.value)
        .contiguous()
    )
    tiles, block_q = cut_queries(x, plan)
    key_tiles, block_k = cut_keys(x, plan)
    size, norm = A.size_of(x, tiles, q.shape[-1] * q.element_size()), None
    if (natural or q.dtype == torch.float32) and not x.shard:
        norm = torch.empty_like(shift)
        launch(
            renormalise, tiles * size.batch * size.heads, plan, q, k, shift, norm, factor, size, lay, sq, sk, sl,
            band, extra, A.sparse_of(x, False), *dims, block_q, block_k, natural, how,
        )  # fmt: skip
    size = size._replace(tiles=key_tiles)
    sc = A.Strides(heads * length if x.cu_k is None else 0, 1, length)
    launch(
        receive, key_tiles * size.batch * size.heads, plan, q, k, columns, shift, norm, last, factor, size, lay,
        sq, sk, sc, sl, band, extra, A.sparse_of(x, True), *dims, block_q, block_k, natural, how,
    )  # fmt: skip
    return columns
