"""The forward: FlashAttention-2, Algorithm 1 (arXiv 2307.08691), one program per tile of queries.

The same loop as `cpu/forward.py`, with the same names: m running maximum, l running sum, acc unnormalised output,
p weights, s scores. Tiles that every row sees whole run in a loop without masks; those at an edge in a second one.
Head dims are cut in two powers of two (see `arguments.split`): q1, q2 and acc1, acc2 are the two parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from relampago.backends.triton import arguments as A
from relampago.backends.triton.tile import (
    LN2,
    LOG2E,
    assignment,
    bounds,
    edge,
    finite,
    in_fp16,
    kept,
    key_origin,
    keys_of,
    list_of,
    load_keys,
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
    turn_of,
    turned,
)
from relampago.plan import Plan
from relampago.problem import Arrays
from relampago.tape import note


@triton.jit
def products(
    q1, q2, k, box1, box2, lay, sk, b, g, k0, k_limit, D: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q · kᵀ for the keys from k0 on, unscaled: [BQ, BK]."""
    k1 = load_keys(k, box1, lay, b, g, k0, k_limit, sk, D, 0, D1, BK, MASKED)  # [BK, D1]
    s = tl.dot(q1, tl.trans(k1.to(q1.dtype)), input_precision=PRECISION)
    if D2 > 0:
        k2 = load_keys(k, box2, lay, b, g, k0, k_limit, sk, D, D1, D2, BK, MASKED)
        s = tl.dot(q2, tl.trans(k2.to(q1.dtype)), s, input_precision=PRECISION)
    return s


@triton.jit
def step(
    acc1, acc2, l, m, q1, q2, k, v, kb1, kb2, vb1, vb2, b, head, k0, rows, q_end, k_limit, offset, factor, size,
    lay, sk, sv, band, extra, sparse, q_base, k_base, which,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BK: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, lines 8 to 10: one tile of keys."""
    keys = k0 + tl.arange(0, BK)[None, :]
    g = head // size.group
    s = products(q1, q2, k, kb1, kb2, lay, sk, b, g, k0, k_limit, D, D1, D2, BK, MASKED, PRECISION)
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
        alpha = tl.exp2((m - shift) * LOG2E)
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        shift = finite(m_new)
        p = tl.exp2(s * factor - shift[:, None])
        alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)  # line 9
    if extra.seed is not None:
        p = tl.where(kept(extra, size, b, head, rows, keys), p, 0.0)
    acc1 = acc1 * alpha[:, None]
    p = p.to(q1.dtype)
    v1 = load_keys(v, vb1, lay, b, g, k0, k_limit, sv, E, 0, E1, BK, MASKED)  # [BK, E1]
    acc1 = tl.dot(p, v1.to(q1.dtype), acc1, input_precision=PRECISION)  # line 10
    if E2 > 0:
        acc2 = acc2 * alpha[:, None]
        v2 = load_keys(v, vb2, lay, b, g, k0, k_limit, sv, E, E1, E2, BK, MASKED)
        acc2 = tl.dot(p, v2.to(q1.dtype), acc2, input_precision=PRECISION)
    return acc1, acc2, l, m_new


@triton.jit
def raise_to(top, m, size, b, head, NATURAL: tl.constexpr):
    """Raise a head's largest score (B, H) to that of a tile: one atomic maximum, whose order does not matter."""
    highest = tl.max(m, 0) * (1.0 if NATURAL else LN2)
    tl.atomic_max(top + b * size.heads_q + head, highest, sem="relaxed")


@triton.jit
def fill_tail(
    out, lse, lay, size, so, sl, tile, head, b, value, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Rows of a packed tensor that belong to no sequence: 0, and `value` in the LSE. The last sequence's task."""
    if b == size.batch - 1:
        end = min(max(tl.load(lay.cu_q + size.batch), 0), size.total_q)
        base = out + origin(so, 0, 0, head)
        zeros1 = tl.zeros([BQ, E1], tl.float32)
        for row in range(end + tile * BQ, size.total_q, size.tiles * BQ):
            store_tile(base, row, size.total_q, so.l, zeros1, E, 0, E1, BQ)
            if E2 > 0:
                zeros2 = tl.zeros([BQ, E2], tl.float32)
                store_tile(base, row, size.total_q, so.l, zeros2, E, E1, E2, BQ)
            if lse is not None:
                rows = row + tl.arange(0, BQ)
                empty = tl.full([BQ], value, tl.float32)
                at = lse + origin(sl, 0, 0, head) + rows
                tl.store(at, empty, mask=rows < size.total_q)


@triton.jit
def query_tile(size, sparse, tile, len_q, BQ: tl.constexpr):
    """Rows [q0, q_end) of a tile, and the first row of its tile of the BlockSparse."""
    if sparse is None:
        q0 = tile * BQ
        return q0, min(q0 + BQ, len_q), q0
    else:
        parts = tl.cdiv(sparse.block_q, BQ)
        base = tile // parts * sparse.block_q
        q0 = base + tile % parts * BQ
        return q0, min(min(q0 + BQ, base + sparse.block_q), len_q), base


@triton.jit(do_not_specialize=["size", "band"])
def attend(
    q, k, v, kb1, kb2, vb1, vb2, out, lse, top, k_scale, v_scale, factor, size, lay, sq, sk, sv, so, sl, band,
    extra, sparse, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr, RESUME: tl.constexpr,
):  # fmt: skip
    """One tile of queries: Algorithm 1, lines 4 to 15. RESUME: go on from the out and LSE of other keys.

    Keys and values in e4m3 have scales (B, G): what is loaded is exact in fp16 and bf16, and scales are linear.
    """
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    if not RESUME:  # else it is the caller's
        so = stepped(so, out, E)
    tile, head, b = assignment(size, band.right is not None)
    if lay.cu_q is not None:
        fill_tail(out, lse, lay, size, so, sl, tile, head, b, float("-inf"), E, E1, E2, BQ)
    first, len_q = rows_of(lay, size, b)
    q0, q_end, q_base = query_tile(size, sparse, tile, len_q, BQ)
    if q0 >= q_end:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    rows = q0 + tl.arange(0, BQ)[:, None]
    scale_v = 1.0
    if k_scale is not None:
        of_head = b * (size.heads // size.group) + head // size.group
        factor *= tl.load(k_scale + of_head)
        scale_v = tl.load(v_scale + of_head)
    q += origin(sq, b, first, head)
    k += key_origin(lay, sk, b, first_k, head // size.group)
    v += key_origin(lay, sv, b, first_k, head // size.group)
    q1 = load_tile(q, q0, q_end, sq.l, D, 0, D1, BQ, True)  # [BQ, D1]
    q2 = q1
    if D2 > 0:
        q2 = load_tile(q, q0, q_end, sq.l, D, D1, D2, BQ, True)
    if k_scale is not None:  # noqa: SIM102 (both are decided when compiled)
        if q.dtype.element_ty == tl.bfloat16:
            q1, q2, factor = in_fp16(q1, q2, factor)
    m = tl.full([BQ], float("-inf"), tl.float32)
    l = tl.zeros([BQ], tl.float32)
    acc1 = tl.zeros([BQ, E1], tl.float32)
    acc2 = l
    if E2 > 0:
        acc2 = tl.zeros([BQ, E2], tl.float32)
    if (
        RESUME
    ):  # after the keys of other shards: a result is a state whose m is LSE and whose l is 1
        at = q0 + tl.arange(0, BQ)
        m = tl.load(lse + origin(sl, b, first, head) + at, mask=at < q_end, other=float("-inf"))
        m = m * (1.0 if NATURAL else LOG2E)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
        undrop = 1.0 if extra.seed is None else 1.0 / extra.upscale
        there = out + origin(so, b, first, head)
        acc1 = load_tile(there, q0, q_end, so.l, E, 0, E1, BQ, True) * undrop
        if E2 > 0:
            acc2 = load_tile(there, q0, q_end, so.l, E, E1, E2, BQ, True) * undrop
    if sparse is None:
        start, end, full_start, full_end = bounds(band, offset, b, q0, q_end, len_k, BQ)
        start, full, full_end, before, n = loop_bounds(start, end, full_start, full_end, BK)
        turn, steps = turn_of(tile, full, full_end, BK)
        for i in tl.range(0, steps):  # line 6, without masks
            k0 = turned(i, turn, steps, full, BK)
            acc1, acc2, l, m = step(
                acc1, acc2, l, m, q1, q2, k, v, kb1, kb2, vb1, vb2, b, head, k0, rows, q_end, len_k, offset,
                factor, size, lay, sk, sv, band, extra, None, 0, 0, 0,
                D, D1, D2, E, E1, E2, BK, NATURAL, PRECISION, False,
            )  # fmt: skip
        for i in tl.range(0, n):  # line 6, at the edges
            k0 = edge(i, start, full_end, before, BK)
            acc1, acc2, l, m = step(
                acc1, acc2, l, m, q1, q2, k, v, kb1, kb2, vb1, vb2, b, head, k0, rows, q_end, len_k, offset,
                factor, size, lay, sk, sv, band, extra, None, 0, 0, 0,
                D, D1, D2, E, E1, E2, BK, NATURAL, PRECISION, True,
            )  # fmt: skip
    else:
        entry = list_of(sparse.stride_b, sparse.stride_h, b, head) + q_base // sparse.block_q
        parts = tl.cdiv(sparse.block_k, BK)
        for i in tl.range(0, tl.load(sparse.count + entry) * parts):
            at = entry * sparse.most + i // parts
            k_base = tl.load(sparse.index + at) * sparse.block_k
            which = tl.load(sparse.pattern + at)
            k0 = k_base + i % parts * BK
            acc1, acc2, l, m = step(
                acc1, acc2, l, m, q1, q2, k, v, kb1, kb2, vb1, vb2, b, head, k0, rows, q_end, len_k, offset,
                factor, size, lay, sk, sv, band, extra, sparse, q_base, k_base, which,
                D, D1, D2, E, E1, E2, BK, NATURAL, PRECISION, True,
            )  # fmt: skip
    if top is not None:  # rows beyond the last have q = 0 and scores of 0
        own = q0 + tl.arange(0, BQ) < q_end
        raise_to(top, tl.where(own, m, float("-inf")), size, b, head, NATURAL)
    if extra.sinks is not None:  # one more score, with no value
        sink = tl.load(extra.sinks + head).to(tl.float32) * (1.0 if NATURAL else LOG2E)
        m_new = tl.maximum(m, sink)
        shift = finite(m_new)
        alpha = power(m - shift, NATURAL)
        l = l * alpha + power(sink - shift, NATURAL)
        m = m_new
        acc1 = acc1 * alpha[:, None]
        if E2 > 0:
            acc2 = acc2 * alpha[:, None]
    inverse = scale_v / tl.where(l == 0.0, 1.0, l)
    if extra.seed is not None:
        inverse = inverse * extra.upscale
    out += origin(so, b, first, head)
    store_tile(out, q0, q_end, so.l, acc1 * inverse[:, None], E, 0, E1, BQ)  # line 12
    if E2 > 0:
        store_tile(out, q0, q_end, so.l, acc2 * inverse[:, None], E, E1, E2, BQ)
    total = finite(m) + tl.log2(l) * (LN2 if NATURAL else 1.0)  # line 13
    total = total * (1.0 if NATURAL else LN2)
    rows = q0 + tl.arange(0, BQ)
    tl.store(lse + origin(sl, b, first, head) + rows, total, mask=rows < q_end)


def precision(x: Arrays) -> str:
    """How products of fp32 are computed."""
    if x.q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee"


def cut(length: int, block: int, listed: int | None) -> tuple[int, int]:
    """Tiles of a length and their size: at most `block`, and within a tile of the BlockSparse if there is one."""
    if listed is None:
        return triton.cdiv(length, block), block
    block = min(block, max(16, triton.next_power_of_2(listed)))
    return triton.cdiv(length, listed) * triton.cdiv(listed, block), block


def cut_queries(x: Arrays, plan: Plan) -> tuple[int, int]:
    """Tiles of queries and their size."""
    return cut(x.len_q, plan.block_q, None if x.block is None else x.block[0])


def cut_keys(x: Arrays, plan: Plan) -> tuple[int, int]:
    """Tiles of keys and their size."""
    return cut(x.len_k, plan.block_k, None if x.block is None else x.block[1])


def launch(kernel: Any, grid: int, plan: Plan, *args: Any, fusion: bool = True) -> None:
    """Start a kernel on the current device. Scaling and subtracting a score must be one instruction, as by default.

    Without fusion a compiler has no choice of which products and sums to round together.
    """
    compiled = kernel.run(
        *args, grid=(grid, 1, 1), warmup=False, num_warps=plan.warps, num_stages=plan.stages,
        enable_fp_fusion=fusion,
    )  # fmt: skip
    note(compiled, (grid, 1, 1), args)


def forward(x: Arrays, plan: Plan) -> tuple[Tensor, Tensor]:
    """Out, shaped like q with the head dim of v, and LSE."""
    q, k, v = A.rows_contiguous(x.q), A.rows_contiguous(x.k), A.rows_contiguous(x.v)
    dim, dim_v = q.shape[-1], v.shape[-1]
    out, lse = x.into or (
        torch.empty((*q.shape[:-1], dim_v), dtype=x.out_dtype, device=q.device),
        torch.empty(A.lse_shape(x), dtype=torch.float32, device=q.device),
    )
    tiles, block_q = cut_queries(x, plan)
    _, block_k = cut_keys(x, plan)
    size = A.size_of(x, tiles, (dim + dim_v) * q.element_size())
    grid = tiles * size.batch * size.heads
    if grid == 0:
        return x.into or (out.zero_(), lse.fill_(float("-inf")))
    is_natural = A.natural(x)
    boxes = A.NO_BOXES
    if plan.tma and x.cu_k is None and x.lens_k is None and x.blocks is None:
        boxes = A.boxes_of(k, v, block_k, A.split(dim), A.split(dim_v))
    d1, d2, e1, e2 = A.parts(x, boxes is not A.NO_BOXES)
    launch(
        attend, grid, plan, q, k, v, *boxes, out, lse, x.max_logits, *A.cache_scales(x),
        x.scale if is_natural else x.scale * LOG2E.value, size, A.lay_of(x), A.strides(q),
        A.strides(k), A.strides(v), A.strides(out), A.lse_strides(x, lse), A.band_of(x.band),
        A.extra_of(x), A.sparse_of(x, False), dim, d1, d2, dim_v, e1, e2, block_q,
        block_k, is_natural, precision(x), x.into is not None,
    )  # fmt: skip
    return out, lse
