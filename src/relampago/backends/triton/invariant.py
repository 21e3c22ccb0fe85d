"""The batch-invariant forward: a row's bits depend on its own sequence alone, and few rows still fill a GPU.

Keys are cut into spans at multiples of SPAN, counted from a sequence's key 0. Each span has a softmax of its own
(Algorithm 1 of arXiv 2307.08691, over tiles of BK in order), and the spans' (m, l, acc) are folded into the row's, from
the first to the last, by `fold`. Where rows are many, one program goes over all spans of its rows and folds as it goes.
Where they are few, spans are shared among programs, which write each span's (m, l, acc) down in fp32, and `gather`
folds those. Both run the same lines: how spans are shared follows from the batch, what a span gives does not.

- A tile that is hidden from a row adds exact zeros and leaves its maximum alone, as an empty span does in `fold`, so it
  does not matter which tiles a row's neighbours make it visit.
- Rows of all query heads of a kv head share a tile, as in decoding. A row of a product does not depend on the others.
- Tiles that every row sees whole go without masks, which would change nothing. What is rounded together is written out
  (`tl.fma`) and the compiler adds none; `tests/crosscompile` compares instructions and layouts of the variants.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from relampago.backends.triton import arguments as A
from relampago.backends.triton.decode import (
    chains,
    launch,
    load_keys,
    load_rows,
    pages_of,
    resident,
    share,
    splits_for,
    store_rows,
    total_of,
    with_sink,
)
from relampago.backends.triton.forward import fill_tail, precision
from relampago.backends.triton.tile import (
    LOG2E,
    assignment,
    bounds,
    finite,
    key_origin,
    keys_of,
    loop_bounds,
    offset_of,
    origin,
    power,
    rows_of,
    scores,
    stepped,
)
from relampago.plan import Plan
from relampago.problem import Arrays, Device

HOPPER = "sm90"
LEAST_ROWS = 64  # of a tile on Hopper: with fewer, products would be another instruction's
TOGETHER = tl.constexpr(16)  # spans that `gather` reads at a time
MOST_BYTES = 128 << 20  # that spans may take until they are folded


@triton.jit
def fetch(
    base, box, page, lay, b, g, k0, limit, stride, DIM: tl.constexpr, COL: tl.constexpr,
    WIDTH: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_keys`, or by TMA where box is a descriptor."""
    if box is not None:
        return box.load([b, k0, g, COL]).reshape([BK, WIDTH])
    else:
        return load_keys(base, page, lay, k0, limit, stride, DIM, COL, WIDTH, BK, PAGE, MASKED)


@triton.jit
def products(
    q1, q2, k, kb1, kb2, page, lay, b, g, k0, len_k, sk, D: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, line 8: S before the scale, [BQ, BK]."""
    k1 = fetch(k, kb1, page, lay, b, g, k0, len_k, sk, D, 0, D1, BK, PAGE, MASKED)  # [BK, D1]
    s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        k2 = fetch(k, kb2, page, lay, b, g, k0, len_k, sk, D, D1, D2, BK, PAGE, MASKED)
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    return s


@triton.jit
def add_tile(
    acc1, acc2, l, m, s, v, vb1, vb2, page, lay, b, g, heads, k0, rows, len_q, len_k, offset, factor, sv,
    band, extra, DTYPE: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BK: tl.constexpr, PAGE: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, lines 8 to 10, on a span's own state; one whose m is -inf begins anew, whatever its acc and l.

    acc is added to +0 as it is multiplied, so that a sum dropped by the factor 0 leaves no sign behind.
    """
    keys = k0 + tl.arange(0, BK)[None, :]
    s = scores(
        s, factor, band, extra, offset, b, heads, rows, keys, len_q, len_k, NATURAL, MASKED
    )  # line 8
    m_new = tl.maximum(m, tl.max(s, 1) * (1.0 if NATURAL else factor))
    shift = finite(m_new)
    if NATURAL:
        p = tl.exp2((s - shift[:, None]) * LOG2E)
    else:
        p = tl.exp2(tl.fma(s, factor, -shift[:, None]))
    alpha = power(m - shift, NATURAL)
    l = tl.fma(l, alpha, tl.sum(p, 1))  # line 9
    p = p.to(DTYPE)
    v1 = fetch(v, vb1, page, lay, b, g, k0, len_k, sv, E, 0, E1, BK, PAGE, MASKED)  # [BK, E1]
    acc1 = tl.dot(p, v1, tl.fma(acc1, alpha[:, None], 0.0), input_precision=PRECISION)  # line 10
    if E2 > 0:
        v2 = fetch(v, vb2, page, lay, b, g, k0, len_k, sv, E, E1, E2, BK, PAGE, MASKED)
        acc2 = tl.dot(p, v2, tl.fma(acc2, alpha[:, None], 0.0), input_precision=PRECISION)
    return acc1, acc2, l, m_new


@triton.jit
def nothing(ROWS: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr):
    """The state acc1, acc2, l, m of rows that have seen no key."""
    l = tl.zeros([ROWS], tl.float32)
    acc1 = tl.zeros([ROWS, E1], tl.float32)
    acc2 = l
    if E2 > 0:
        acc2 = tl.zeros([ROWS, E2], tl.float32)
    return acc1, acc2, l, tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def fold(top, total, m, l, NATURAL: tl.constexpr):
    """Maximum and sum of the spans so far and of one more, and what their outputs are multiplied by.

    One that has seen nothing has m = -inf and l = 0; the other is then multiplied by exactly 1.
    """
    top_new = tl.maximum(top, m)
    shift = finite(top_new)
    a = power(top - shift, NATURAL)
    b = power(m - shift, NATURAL)
    return top_new, tl.fma(l, b, total * a), a, b


@triton.jit
def store_halves(
    base, at, inside, x, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`store_rows` in two: half the shared memory to turn x in, which the loop's buffers have."""
    low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, WIDTH // 2]), (0, 2, 1)))
    store_rows(base, at, inside, low, DIM, COL, WIDTH // 2)
    store_rows(base, at, inside, high, DIM, COL + WIDTH // 2, WIDTH // 2)


@triton.jit
def write_span(
    part, place, span, length, spans, inside, acc1, acc2, l, m,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
):  # fmt: skip
    """A span's state: part is [spans, length, E] of acc, then [spans, length] of m and as much of l."""
    place += span * length
    store_halves(part, place * E, inside, acc1, E, 0, E1)
    if E2 > 0:
        store_halves(part, place * E, inside, acc2, E, E1, E2)
    part += spans * length * E
    tl.store(part + place, m, mask=inside)
    tl.store(part + spans * length + place, l, mask=inside)


@triton.jit
def span_range(start, end, SPAN: tl.constexpr):
    """Spans [first, last) that keys start..end have a part in."""
    first = start // SPAN
    return first, tl.where(end > start, tl.cdiv(end, SPAN), first)


@triton.jit(do_not_specialize=["size", "band", "chunks", "spans"])
def attend_spans(
    q, k, v, kb1, kb2, vb1, vb2, out, lse, part, factor, chunks, spans, size, lay, sq, sk, sv, so, sl, band, extra,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, PAGE: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, RESUME: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Up to BQ rows of one kv head: all their spans, or with `part` this program's share of them, of `chunks`.

    size.tiles counts programs of a kv head. RESUME: go on from the out and LSE of other keys.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    if not RESUME:  # else it is the caller's
        so = stepped(so, out, E)
    turn, g, b = assignment(size, band.right is not None)
    first, len_q = rows_of(lay, size, b)
    if lay.cu_q is not None:
        for r in range(size.group):
            head = g * size.group + r
            fill_tail(out, lse, lay, size, so, sl, turn, head, b, float("-inf"), E, E1, E2, BQ)
    chunk, tile = turn % chunks, turn // chunks
    most = len_q * size.group
    if tile * BQ >= most:
        return
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    r = tile * BQ + tl.arange(0, BQ)
    inside = r < most
    r = tl.minimum(r, most - 1)  # rows beyond the last repeat it, and are not stored
    row, head = r // size.group, g * size.group + r % size.group
    rows, heads = row[:, None], head[:, None]
    at = row.to(tl.int64) * sq.l + head.to(tl.int64) * sq.h
    q += origin(sq, b, first, 0)
    q1 = load_rows(q, at, D, 0, D1)  # [BQ, D1]
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q, at, D, D1, D2)
    k += key_origin(lay, sk, b, first_k, g)
    v += key_origin(lay, sv, b, first_k, g)
    q_first = tile * BQ // size.group
    q_last = (tl.minimum(tile * BQ + BQ, most) - 1) // size.group
    start, end, full, full_end = bounds(band, offset, b, q_first, q_last + 1, len_k, BQ)
    if part is not None:
        first_span, last_span = span_range(start, end, SPAN)
        own, own_end = share(last_span - first_span, chunk, chunks)
        start = tl.maximum(start, (first_span + own) * SPAN)
        end = tl.minimum(end, (first_span + own_end) * SPAN)
        full = tl.maximum(full, start)
    start, full, full_end, _, _ = loop_bounds(start, end, full, full_end, BK)
    acc1, acc2, l, m = nothing(BQ, E1, E2)
    whole1, whole2, total, top = acc1, acc2, l, m
    place_out = row.to(tl.int64) * so.l + head.to(tl.int64) * so.h
    out += origin(so, b, first, 0)
    place_lse = row.to(tl.int64) * sl.l + head.to(tl.int64) * sl.h
    lse += origin(sl, b, first, 0)
    if (
        RESUME
    ):  # after the keys of other shards: a result is a state whose m is LSE and whose l is 1
        top = tl.load(lse + place_lse) * (1.0 if NATURAL else LOG2E)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        whole1 = load_rows(out, place_out, E, 0, E1).to(tl.float32)
        if E2 > 0:
            whole2 = load_rows(out, place_out, E, E1, E2).to(tl.float32)
    length = tl.cast(size.batch, tl.int64) * size.heads_q * size.len_q
    place = (tl.cast(b, tl.int64) * size.heads_q + head) * size.len_q + row  # in (B, H, Lq)
    page = pages_of(lay, b, start, PAGE, BK)
    for stretch in tl.static_range(
        3
    ):  # before the tiles that all rows see whole, those, and the rest
        lo, hi = start, full
        if stretch == 1:
            lo, hi = full, full_end
        elif stretch == 2:
            lo, hi = full_end, end
        if stretch > 0 or band.left is not None or band.row_start is not None:
            for i in tl.range(0, tl.cdiv(hi - lo, BK)):  # line 6
                k0 = lo + i * BK
                s = products(
                    q1, q2, k, kb1, kb2, page, lay, b, g, k0, len_k, sk, D, D1, D2, BK, PAGE, PRECISION,
                    stretch != 1,
                )  # fmt: skip
                if SPAN > 0:  # noqa: SIM102 (decided when compiled)
                    # Here, because Triton has waited for the product that acc is from: at an iteration's end it has
                    # not, and ptxas would make every product wait for the one before.
                    if k0 % SPAN == 0 and k0 > start:
                        if part is None:
                            top, total, by, by_new = fold(top, total, m, l, NATURAL)
                            whole1 = tl.fma(acc1, by_new[:, None], whole1 * by[:, None])
                            if E2 > 0:
                                whole2 = tl.fma(acc2, by_new[:, None], whole2 * by[:, None])
                        else:
                            write_span(
                                part, place, k0 // SPAN - 1, length, spans, inside, acc1, acc2, l, m,
                                E, E1, E2,
                            )  # fmt: skip
                        m = tl.full([BQ], float("-inf"), tl.float32)  # the next span begins
                acc1, acc2, l, m = add_tile(
                    acc1, acc2, l, m, s, v, vb1, vb2, page, lay, b, g, heads, k0, rows, len_q, len_k,
                    offset, factor, sv, band, extra, q1.dtype, E, E1, E2, BK, PAGE, NATURAL, PRECISION,
                    stretch != 1,
                )  # fmt: skip
                page = pages_of(lay, b, k0 + BK, PAGE, BK)  # early: the next loads depend on it
    if part is not None:
        if end > start:  # the last one is still open
            write_span(
                part, place, (end - 1) // SPAN, length, spans, inside, acc1, acc2, l, m, E, E1, E2
            )
        return
    top, total, by, by_new = fold(top, total, m, l, NATURAL)
    whole1 = tl.fma(acc1, by_new[:, None], whole1 * by[:, None])
    if E2 > 0:
        whole2 = tl.fma(acc2, by_new[:, None], whole2 * by[:, None])
    finish(
        out, lse, extra.sinks, place_out, place_lse, inside, head, top, total, whole1, whole2,
        E, E1, E2, NATURAL,
    )  # fmt: skip


@triton.jit
def finish(
    out, lse, sinks, place_out, place_lse, inside, head, top, total, whole1, whole2,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Lines 12 and 13, of rows whose spans are folded."""
    alpha = tl.full(top.shape, 1.0, tl.float32)
    if sinks is not None:
        top, total, alpha = with_sink(sinks, head, top, total, NATURAL)
    inverse = (alpha / tl.where(total == 0.0, 1.0, total))[:, None]
    store_rows(out, place_out, inside, whole1 * inverse, E, 0, E1)
    if E2 > 0:
        store_rows(out, place_out, inside, whole2 * inverse, E, E1, E2)
    tl.store(lse + place_lse, total_of(top, total, NATURAL), mask=inside)


@triton.jit(do_not_specialize=["size", "band", "spans"])
def gather(
    part, out, lse, sinks, spans, size, lay, so, sl, band,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BQ: tl.constexpr, SPAN: tl.constexpr,
    NATURAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row of one head: its spans folded, those of the tile of BQ rows that it was computed in."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0)
    at, head, b = (
        place % size.len_q,
        place // size.len_q % size.heads_q,
        place // size.len_q // size.heads_q,
    )
    first, len_q = rows_of(lay, size, b)
    if at >= len_q:
        return
    _, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    tile = (at * size.group + head % size.group) // BQ
    q_first = tile * BQ // size.group
    q_last = (tl.minimum(tile * BQ + BQ, len_q * size.group) - 1) // size.group
    start, end, _, _ = bounds(band, offset, b, q_first, q_last + 1, len_k, BQ)
    first_span, last_span = span_range(start, end, SPAN)
    length = tl.cast(size.batch, tl.int64) * size.heads_q * size.len_q
    one = tl.zeros([1], tl.int32)
    inside = one == 0
    place = one.to(tl.int64) + place
    ml = part + spans * length * E
    whole1, whole2, total, top = nothing(1, E1, E2)
    for begin in tl.range(first_span, last_span, TOGETHER):
        found = ()
        for i in tl.static_range(TOGETHER):  # all are asked for before the first is folded
            here = place + tl.minimum(begin + i, last_span - 1) * length
            acc1 = load_rows(part, here * E, E, 0, E1)
            acc2 = acc1
            if E2 > 0:
                acc2 = load_rows(part, here * E, E, E1, E2)
            m, l = tl.load(ml + here), tl.load(ml + spans * length + here)
            found = found + ((acc1, acc2, m, l),)  # noqa: RUF005
        for i in tl.static_range(TOGETHER):
            acc1, acc2, m, l = found[i]
            more = begin + i < last_span
            top_new, total_new, by, by_new = fold(top, total, m, l, NATURAL)
            top, total = tl.where(more, top_new, top), tl.where(more, total_new, total)
            folded = tl.fma(acc1, by_new[:, None], whole1 * by[:, None])
            whole1 = tl.where(more, folded, whole1)
            if E2 > 0:
                folded = tl.fma(acc2, by_new[:, None], whole2 * by[:, None])
                whole2 = tl.where(more, folded, whole2)
    row = one.to(tl.int64) + at
    head = one + head
    finish(
        out + origin(so, b, first, 0), lse + origin(sl, b, first, 0), sinks,
        row * so.l + head.to(tl.int64) * so.h, row * sl.l + head.to(tl.int64) * sl.h, inside, head,
        top, total, whole1, whole2, E, E1, E2, NATURAL,
    )  # fmt: skip


def narrowed(plan: Plan, rows: int, device: Device, dtype: torch.dtype) -> Plan:
    """The plan with half the rows and half the warps where these rows are few: the same bits.

    On Hopper each warp has 16 rows to itself, however many there are. Elsewhere, and in fp32, they may share rows.
    """
    few = plan.block_q == 2 * LEAST_ROWS >= rows and plan.warps == 8
    if not few or device.arch != HOPPER or dtype == torch.float32:
        return plan
    return replace(plan, block_q=LEAST_ROWS, warps=4)


def writing(plan: Plan, x: Arrays, device: Device) -> Plan | None:
    """The plan of programs that write spans down; None if no pipeline has room for it.

    Hopper's acc is turned in shared memory on its way, by halves, while the loop's buffers are in use.
    """
    if device.arch != HOPPER or plan.block_q < LEAST_ROWS:
        return plan
    d1, d2, e1, e2 = A.parts(x)
    dim, dim_v, size = d1 + d2, e1 + e2, x.q.element_size()
    room = device.shared_memory - plan.block_q * (dim * size + max(e1, e2) * 4 // 2)
    stages = min(plan.stages, room // (plan.block_k * (dim + dim_v) * size))
    return replace(plan, stages=stages) if stages > 0 else None


def chunks_for(x: Arrays, plan: Plan, tiles: int, spans: int, device: Device) -> int:
    """Among how many programs to share the spans of each of `tiles` row tiles a kv head; 1: they are folded at once."""
    dim, dim_v = x.q.shape[-1], x.v.shape[-1]
    rows = x.batch * x.q.shape[-2] * x.len_q
    if spans < 2 or spans * rows * (dim_v + 2) * 4 > MOST_BYTES or x.into is not None:
        return 1
    tile = plan.block_k * (dim + dim_v) * x.k.element_size()
    slots = device.multiprocessors * resident(device, plan, tile)
    items = x.batch * x.k.shape[-2] * tiles
    if tiles > 1 and items >= slots:
        return 1
    ragged = x.lens_k is not None and tiles == 1
    return min(spans, splits_for(items, spans * plan.span // plan.block_k, slots, ragged))


def invariant(x: Arrays, plan: Plan, *, chunks: int | None = None) -> tuple[Tensor, Tensor]:
    """Out, shaped like q with the head dim of v, and LSE; chunks are for tests, else chosen by the shapes."""
    device = Device.of(x.q.device)
    q, k, v = A.rows_contiguous(x.q), A.rows_contiguous(x.k), A.rows_contiguous(x.v)
    dim, dim_v, heads, groups = q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2]
    out, lse = x.into or (
        torch.empty((*q.shape[:-1], dim_v), dtype=x.out_dtype, device=q.device),
        torch.empty(A.lse_shape(x), dtype=torch.float32, device=q.device),
    )
    no_pages = x.page_table is not None and 0 in (*x.page_table.shape, *k.shape[:2])
    if lse.numel() == 0 or no_pages:
        return x.into or (out.zero_(), lse.fill_(float("-inf")))
    plan = narrowed(plan, x.len_q * (heads // groups), device, q.dtype)
    tiles = triton.cdiv(x.len_q * (heads // groups), plan.block_q)
    size = A.size_of(x, tiles, (dim + dim_v) * k.element_size())
    spans = triton.cdiv(min(size.len_k, x.len_k), plan.span) if plan.span else 1
    shared = writing(plan, x, device)
    if shared is None:
        chunks = 1
    elif chunks is None:
        chunks = chunks_for(x, shared, tiles, spans, device)
    natural, part = A.natural(x), None
    if chunks > 1 and shared is not None:
        plan, length = shared, size.batch * heads * size.len_q
        part = torch.empty(spans * length * (dim_v + 2), dtype=torch.float32, device=q.device)
    section = max(1, size.section // size.group)
    by_group = size._replace(heads=groups, tiles=tiles * chunks, section=section)
    lay, so, sl, band, extra = (
        A.lay_of(x), A.strides(out), A.lse_strides(x, lse), A.band_of(x.band), A.extra_of(x)
    )  # fmt: skip
    d1, d2, e1, e2 = A.parts(x)  # never by whether TMA loads them
    boxes = A.NO_BOXES
    if plan.tma and x.cu_k is None and x.lens_k is None:
        boxes = A.boxes_of(k, v, plan.block_k, (d1, d2), (e1, e2))
    chained = part is not None and chains(device)
    launch(
        attend_spans, size.batch * groups * tiles * chunks, plan, chained,
        q, k, v, *boxes, out, lse, part, x.scale if natural else x.scale * LOG2E.value, chunks, spans, by_group,
        lay._replace(page=None), A.strides(q), A.strides(k), A.strides(v), so, sl, band, extra,
        dim, d1, d2, dim_v, e1, e2, plan.block_q, plan.block_k, plan.span, lay.page or 0,
        natural, precision(x), x.into is not None, chained, fusion=False,
    )  # fmt: skip
    if part is not None:
        launch(
            gather, size.batch * heads * size.len_q, replace(plan, warps=1, stages=1), chained,
            part, out, lse, x.sinks, spans, size, lay._replace(page=None), so, sl, band, dim_v,
            e1, e2, plan.block_q, plan.span, natural, chained, fusion=False,
        )  # fmt: skip
    return out, lse
