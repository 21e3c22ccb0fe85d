"""Before the backward: delta, and what each row subtracts from its scores to get back its weights.

Rows whose LSE is too large for fp32 to carry the log of the sum get a factor too, from a sum of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relampago.backends.triton.forward import products, query_tile
from relampago.backends.triton.tile import (
    LOG2E,
    assignment,
    bounds,
    edge,
    key_origin,
    keys_of,
    list_of,
    load_tile,
    loop_bounds,
    offset_of,
    origin,
    pattern_of,
    power,
    rows_of,
    scores,
    stepped,
    store_tile,
    weights,
)

# Above this, an fp32 LSE has lost digits of log Σ that a weight needs; the row's weights are normalised anew.
HUGE_LSE = tl.constexpr(1024.0)


@triton.jit
def row_sums(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, FIXED: tl.constexpr):
    """Sums [ROWS] of [ROWS, WIDTH]. FIXED: by halves, in an order that no layout of threads can change.

    A layout follows from how a tensor is aligned, which one of a batch may be otherwise than alone.
    """
    if FIXED:
        width: tl.constexpr = WIDTH // 2
        x = tl.sum(tl.reshape(x, [ROWS, 2, width]), 1)  # one addition each
        if width == 1:
            x = tl.reshape(x, [ROWS])
        else:
            x = row_sums(x, ROWS, width, FIXED)
        return x
    else:
        return tl.sum(x, 1)


@triton.jit
def prepare(
    out, dout, lse, dlse, known, delta, shift, sums, so, sdo, sl, ss, heads, length, tiles,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, NATURAL: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout · out) - dlse (Algorithm 2, line 4); shift = LSE, in base 2 unless NATURAL.

    A row that sees nothing has shift inf, so that its weights are 0. Packed rows are one long sequence here.
    Sums of dQ, if there are, are set to 0. Where delta is `known`, out and dout are not read.
    """
    pid = tl.program_id(0)
    row, head, b = pid % tiles * BQ, pid // tiles % heads, pid // tiles // heads
    rows = row + tl.arange(0, BQ)
    inside = rows < length
    at = origin(sl, b, 0, head) + rows
    if known is not None:
        dots = tl.load(known + at, mask=inside, other=0.0)
    else:
        so = stepped(so, out, E)
        sdo = stepped(sdo, dout, E)
        out += origin(so, b, 0, head)
        dout += origin(sdo, b, 0, head)
        o = load_tile(out, row, length, so.l, E, 0, E1, BQ, True).to(tl.float32)
        do = load_tile(dout, row, length, sdo.l, E, 0, E1, BQ, True).to(tl.float32)
        dots = row_sums(o * do, BQ, E1, FIXED)
        if E2 > 0:
            o = load_tile(out, row, length, so.l, E, E1, E2, BQ, True).to(tl.float32)
            do = load_tile(dout, row, length, sdo.l, E, E1, E2, BQ, True).to(tl.float32)
            dots += row_sums(o * do, BQ, E2, FIXED)
    total = tl.load(lse + at, mask=inside, other=float("-inf"))
    if dlse is not None:
        dots -= tl.load(dlse + at, mask=inside, other=0.0).to(tl.float32)
    empty = total == float("-inf")
    tl.store(delta + at, tl.where(empty, 0.0, dots), mask=inside)
    total = tl.where(empty, float("inf"), total) * (1.0 if NATURAL else LOG2E)
    tl.store(shift + at, total, mask=inside)
    if sums is not None:
        ss = stepped(ss, sums, D)
        sums += origin(ss, b, 0, head)
        store_tile(sums, row, length, ss.l, tl.zeros([BQ, D1], tl.float32), D, 0, D1, BQ)
        if D2 > 0:
            store_tile(sums, row, length, ss.l, tl.zeros([BQ, D2], tl.float32), D, D1, D2, BQ)


@triton.jit(do_not_specialize=["size", "band"])
def renormalise(
    q, k, shift, norm, factor, size, lay, sq, sk, sl, band, extra, sparse,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """norm = 1 / Σ weights for rows with a huge LSE, 1 for all others; a tile without any stops at once.

    A row whose every key has a bias of finfo.min, say, has that as its LSE too: log Σ is lost in rounding.
    """
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    tile, head, b = assignment(size, False)
    first, len_q = rows_of(lay, size, b)
    q0, q_end, q_base = query_tile(size, sparse, tile, len_q, BQ)
    if q0 >= q_end:
        return
    row = q0 + tl.arange(0, BQ)
    inside = row < q_end
    at = origin(sl, b, first, head) + row
    top = tl.load(shift + at, mask=inside, other=0.0)
    huge = (tl.abs(top) > HUGE_LSE) & (tl.abs(top) < float("inf"))
    tl.store(norm + at, tl.full([BQ], 1.0, tl.float32), mask=inside)
    if tl.max(huge.to(tl.int32), 0) == 0:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    rows = row[:, None]
    q += origin(sq, b, first, head)
    k += key_origin(lay, sk, b, first_k, head // size.group)
    q1 = load_tile(q, q0, q_end, sq.l, D, 0, D1, BQ, True)
    q2 = q1
    if D2 > 0:
        q2 = load_tile(q, q0, q_end, sq.l, D, D1, D2, BQ, True)
    sums = tl.zeros([BQ], tl.float32)
    if sparse is None:
        start, end, _, _ = bounds(band, offset, b, q0, q_end, len_k, BQ)
        start, _, full_end, before, n = loop_bounds(start, end, 0, 0, BK)
    else:
        entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + q_base // sparse.block_q
        parts = tl.cdiv(sparse.block_k, BK)
        n = tl.load(sparse.count + entry) * parts
    for i in tl.range(0, n):
        if sparse is None:
            k0 = edge(i, start, full_end, before, BK)
        else:
            tile_at = entry * sparse.most + i // parts
            k_base = tl.load(sparse.index + tile_at) * sparse.block_k
            k0 = k_base + i % parts * BK
        keys = k0 + tl.arange(0, BK)[None, :]
        g = head // size.group
        s = products(
            q1, q2, k, None, None, lay, sk, b, g, k0, len_k, D, D1, D2, BK, True, PRECISION
        )
        s = scores(s, factor, band, extra, offset, b, head, rows, keys, q_end, len_k, NATURAL, True)
        if sparse is not None:
            which = tl.load(sparse.pattern + tile_at)
            seen = pattern_of(sparse, which, rows - q_base, keys - k_base)
            s = tl.where(seen, s, float("-inf"))
        sums += tl.sum(weights(s, top[:, None], None, factor, NATURAL), 1)
    if extra.sinks is not None:
        sink = tl.load(extra.sinks + head).to(tl.float32) * (1.0 if NATURAL else LOG2E)
        sums += power(sink - top, NATURAL)
    tl.store(norm + at, tl.where(huge & (sums > 0.0), 1.0 / sums, 1.0), mask=inside)
