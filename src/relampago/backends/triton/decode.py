"""Flash decoding: few queries against many keys, which are split among programs; a second kernel combines the parts.

The loop is the forward's (Algorithm 1 of arXiv 2307.08691) with two differences. All rows of all query heads of one
kv head share a tile, row r being query r // group and head r % group, so that keys and values are read once. And since
memory is what limits, one pipelined loop masks every tile unless the host knows that none needs it: instructions are
free here, while a second loop would have to fill its pipeline anew. l is one sum per column until the end.

How many splits there are follows from shapes, so nothing waits for the device; which keys each takes follows from the
sequence's own length, so all of a sequence's splits work alike. On Hopper and later both kernels start while their
predecessor ends (programmatic dependent launch).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from relampago.backends.triton import arguments as A
from relampago.backends.triton.forward import precision
from relampago.backends.triton.tile import (
    LN2,
    LOG2E,
    bounds,
    finite,
    in_fp16,
    key_origin,
    keys_of,
    load_tile,
    loop_bounds,
    offset_of,
    origin,
    power,
    scores,
    stepped,
)
from relampago.plan import Plan
from relampago.problem import Arrays, Device, Layout, Problem
from relampago.tape import note

ROWS = 64  # rows of all heads of a group that are still few
QUERIES = 16  # queries that are still few, whatever the group
LONG = 8  # keys per query from which on there are many
MOST_SPLITS = 256
RAGGED_TILES = 64  # tiles of a split in a cache, at most: sequences may differ in length
FILL = 0.5  # what starting a wave of programs costs, in the time of a tile
COMBINE = 1.0  # what the second kernel costs, likewise
ALONE = 0.3  # a tile's time in a program that has the memory's bandwidth to itself, likewise
SECTOR = tl.constexpr(8)  # entries of a page table that memory gives together
RESERVED = 1024  # bytes of shared memory that each program's own are rounded up by
HELD = 32  # numbers of parts that a thread of the second kernel holds at most
AT_ONCE = 1024  # of them, what a program of it is cut down to, in columns
NARROW, WIDE = (
    16,
    128,
)  # columns of it: at least two sectors of memory, at most what a warp reads in one instruction


@triton.jit
def pages_of(lay, b, k0, PAGE: tl.constexpr, BK: tl.constexpr):
    """The page of the keys from k0 on where they lie in one, else the page of each of BK keys; 0 if not in pages."""
    if lay.page_table is None:
        return k0 * 0
    else:
        key = k0
        if PAGE % BK != 0:
            key = k0 + tl.arange(0, BK)
        entry = tl.minimum(key // PAGE, lay.width - 1)
        page = tl.load(lay.page_table + tl.cast(b, tl.int64) * lay.width + entry)
        return tl.minimum(tl.maximum(page, 0), lay.pages - 1)


@triton.jit
def load_keys(
    base, page, lay, k0, limit, stride, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr,
    BK: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values k0..k0 + BK as [BK, WIDTH], 0 beyond limit; page is that of `pages_of`."""
    if lay.page_table is None:
        return load_tile(base, k0, limit, stride.l, DIM, COL, WIDTH, BK, MASKED)
    elif PAGE % BK == 0:
        base += tl.cast(page, tl.int64) * stride.b
        first = k0 % PAGE
        return load_tile(base, first, first + limit - k0, stride.l, DIM, COL, WIDTH, BK, MASKED)
    else:
        key = k0 + tl.arange(0, BK)
        row = page.to(tl.int64) * stride.b + (key % PAGE).to(tl.int64) * stride.l
        col = COL + tl.arange(0, WIDTH)
        inside = (key < limit)[:, None]
        if COL + WIDTH > DIM:
            inside = inside & (col < DIM)[None, :]
        return tl.load(base + row[:, None] + col[None, :], mask=inside, other=0.0)


@triton.jit
def load_rows(base, at, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr):
    """Rows at offsets `at` as [BQ, WIDTH]."""
    col = COL + tl.arange(0, WIDTH)
    place = base + at[:, None] + col[None, :]
    if COL + WIDTH > DIM:
        return tl.load(place, mask=(col < DIM)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def store_rows(
    base, at, inside, x, DIM: tl.constexpr, COL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_rows`, for rows that are inside."""
    col = COL + tl.arange(0, WIDTH)
    tl.store(
        base + at[:, None] + col[None, :], x.to(base.dtype.element_ty),
        mask=inside[:, None] & (col < DIM)[None, :],
    )  # fmt: skip


@triton.jit
def share(n, split, splits):
    """Tiles [first, last) of a split, of n in all: as many as another's, or one more."""
    each = n // splits
    rest = n - each * splits
    first = split * each + tl.minimum(split, rest)
    return first, first + each + tl.where(split < rest, 1, 0)


@triton.jit
def with_sink(sinks, head, m, l, NATURAL: tl.constexpr):
    """The maximum, the sum and what acc is multiplied by, after one more score that has no value."""
    sink = tl.load(sinks + head).to(tl.float32) * (1.0 if NATURAL else LOG2E)
    m_new = tl.maximum(m, sink)
    shift = finite(m_new)
    alpha = power(m - shift, NATURAL)
    return m_new, l * alpha + power(sink - shift, NATURAL), alpha


@triton.jit
def total_of(m, l, NATURAL: tl.constexpr):
    """LSE."""
    total = finite(m) + tl.log2(l) * (LN2 if NATURAL else 1.0)
    return total * (1.0 if NATURAL else LN2)


@triton.jit
def work_of(size, splits):
    """Which sequence, kv head, tile of rows and split are this program's."""
    groups = size.heads // size.group
    pid = tl.program_id(0)
    g = pid % groups
    tile = pid // groups % size.tiles
    split = pid // groups // size.tiles % splits
    b = pid // groups // size.tiles // splits
    return b, g, tile, split


@triton.jit
def foresee(lay, size, b, splits):
    """Ask the L2 cache for what a sequence's programs wait for one after the other: its length, its row of pages.

    Each asks for one sector, its own. Nothing is read, so that this needs no predecessor's end.
    """
    if lay.lens_k is not None:
        turn = tl.program_id(0) - b * (size.heads // size.group * size.tiles) * splits
        place = lay.lens_k + b
        if lay.page_table is not None:
            entry = tl.minimum(tl.maximum(turn - 1, 0) * SECTOR, lay.width - 1)
            row = lay.page_table + tl.cast(b, tl.int64) * lay.width
            place = tl.where(turn == 0, place, row + entry)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def rows_of(size, g, tile, BQ: tl.constexpr):
    """(query, head, whether it is one to be stored) of a tile's rows, all of which may be loaded."""
    r = tile * BQ + tl.arange(0, BQ)
    most = size.len_q * size.group
    inside = r < most
    r = tl.minimum(r, most - 1)  # rows beyond the last repeat it, and are not stored
    return r // size.group, g * size.group + r % size.group, inside


@triton.jit
def tiles_of(
    size, band, offset, b, tile, len_k, split, splits, BQ: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Where the tiles of keys begin that a tile of rows visits, and which of them, [first, last), are the split's."""
    most = size.len_q * size.group
    q_first = tile * BQ // size.group
    q_last = (tl.minimum(tile * BQ + BQ, most) - 1) // size.group
    start, end, _, _ = bounds(band, offset, b, q_first, q_last + 1, len_k, BQ)
    start, _, _, _, n = loop_bounds(start, end, 0, 0, BK)
    first, last = share(n, split, splits)
    return start, first, last


@triton.jit
def finish(
    acc1, acc2, m, l, scale_v, out, lse, part, so, size, sinks, b, split, splits, row, head, inside,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Store a tile's result, or what `combine` makes it from where keys are split."""
    place = (tl.cast(b, tl.int64) * size.heads + head) * size.len_q + row  # in (B, H, Lq)
    if part is None:
        if sinks is not None:
            m, l, alpha = with_sink(sinks, head, m, l, NATURAL)
            acc1 = acc1 * alpha[:, None]
            if E2 > 0:
                acc2 = acc2 * alpha[:, None]
        inverse = (scale_v / tl.where(l == 0.0, 1.0, l))[:, None]
        at = row.to(tl.int64) * so.l + head.to(tl.int64) * so.h
        out += tl.cast(b, tl.int64) * so.b
        store_rows(out, at, inside, acc1 * inverse, E, 0, E1)
        if E2 > 0:
            store_rows(out, at, inside, acc2 * inverse, E, E1, E2)
        tl.store(lse + place, total_of(m, l, NATURAL), mask=inside)
    else:
        length = tl.cast(size.batch, tl.int64) * size.heads * size.len_q
        at = (split * length + place) * E
        store_rows(part, at, inside, acc1 * scale_v, E, 0, E1)
        if E2 > 0:
            store_rows(part, at, inside, acc2 * scale_v, E, E1, E2)
        part += splits * length * E
        at = place * splits + split  # a row's lie together
        tl.store(part + at, m, mask=inside)
        tl.store(part + splits * length + at, l, mask=inside)


@triton.jit
def weighed(s, m, factor, AXIS: tl.constexpr, NATURAL: tl.constexpr):
    """Weights of scores under their new maximum over AXIS, that maximum, and what earlier sums are multiplied by."""
    if NATURAL:
        m_new = tl.maximum(m, tl.max(s, AXIS))
        shift = finite(m_new)
        p = tl.exp2((s - tl.expand_dims(shift, AXIS)) * LOG2E)
        alpha = tl.exp2((m - shift) * LOG2E)
    else:
        m_new = tl.maximum(m, tl.max(s, AXIS) * factor)
        shift = finite(m_new)
        p = tl.exp2(s * factor - tl.expand_dims(shift, AXIS))
        alpha = tl.exp2(m - shift)
    return p, m_new, alpha


@triton.jit(do_not_specialize=["size", "band", "splits"])
def attend_part(
    q, k, v, out, lse, part, k_scale, v_scale, factor, splits, size, lay, sq, sk, sv, so, band, extra,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's keys, for up to BQ rows of one kv head."""
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    if out is not None:
        so = stepped(so, out, E)
    b, g, tile, split = work_of(size, splits)
    row, head, inside = rows_of(size, g, tile, BQ)
    rows, heads = row[:, None], head[:, None]
    at = row.to(tl.int64) * sq.l + head.to(tl.int64) * sq.h
    q += tl.cast(b, tl.int64) * sq.b
    if CHAINED:
        foresee(lay, size, b, splits)
        gdc_launch_dependents()  # first: ptxas moves the wait up, before the divisions above, but not past this
        gdc_wait()
    _, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, size.len_q, len_k)
    q1 = load_rows(q, at, D, 0, D1)  # [BQ, D1]
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q, at, D, D1, D2)
    scale_v = 1.0
    if k_scale is not None:  # e4m3: what is loaded is exact in fp16 and bf16; scales are linear
        scale = b * (size.heads // size.group) + g
        factor *= tl.load(k_scale + scale)
        scale_v = tl.load(v_scale + scale)
        if q.dtype.element_ty == tl.bfloat16:
            q1, q2, factor = in_fp16(q1, q2, factor)
    k += key_origin(lay, sk, b, 0, g)
    v += key_origin(lay, sv, b, 0, g)
    start, first, last = tiles_of(size, band, offset, b, tile, len_k, split, splits, BQ, BK)
    m = tl.full([BQ], float("-inf"), tl.float32)
    sums = tl.zeros([BQ, BK], tl.float32)
    acc1 = tl.zeros([BQ, E1], tl.float32)
    acc2 = m
    if E2 > 0:
        acc2 = tl.zeros([BQ, E2], tl.float32)
    page = pages_of(lay, b, start + first * BK, PAGE, BK)
    for i in tl.range(first, last):
        k0 = start + i * BK
        keys = k0 + tl.arange(0, BK)[None, :]
        k1 = load_keys(k, page, lay, k0, len_k, sk, D, 0, D1, BK, PAGE, MASKED)  # [BK, D1]
        k1 = k1.to(q1.dtype)
        s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D2 > 0:
            k2 = load_keys(k, page, lay, k0, len_k, sk, D, D1, D2, BK, PAGE, MASKED)
            k2 = k2.to(q1.dtype)
            s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
        s = scores(
            s, factor, band, extra, offset, b, heads, rows, keys, size.len_q, len_k, NATURAL, MASKED
        )
        p, m, alpha = weighed(s, m, factor, 1, NATURAL)
        sums = sums * alpha[:, None] + p
        p = p.to(q1.dtype)
        acc1 = acc1 * alpha[:, None]
        v1 = load_keys(v, page, lay, k0, len_k, sv, E, 0, E1, BK, PAGE, MASKED)  # [BK, E1]
        v1 = v1.to(q1.dtype)
        acc1 = tl.dot(p, v1, acc1, input_precision=PRECISION)
        if E2 > 0:
            acc2 = acc2 * alpha[:, None]
            v2 = load_keys(v, page, lay, k0, len_k, sv, E, E1, E2, BK, PAGE, MASKED)
            v2 = v2.to(q1.dtype)
            acc2 = tl.dot(p, v2, acc2, input_precision=PRECISION)
        page = pages_of(lay, b, k0 + BK, PAGE, BK)  # early: the next tile's loads depend on it
    l = tl.sum(sums, 1)
    finish(
        acc1, acc2, m, l, scale_v, out, lse, part, so, size, extra.sinks, b, split, splits, row, head, inside,
        E, E1, E2, NATURAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "length", "heads", "len_q"])
def combine(
    part, out, lse, sinks, splits, length, heads, len_q, so,
    E: tl.constexpr, BE: tl.constexpr, SPLITS: tl.constexpr, NATURAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BE columns of one row's parts as one: `merge` of m, l and acc. SPLITS is `splits` rounded up.

    All is loaded before anything is needed: one way to the L2 cache, whatever the splits.
    """
    columns: tl.constexpr = (E + BE - 1) // BE
    place = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BE
    row, head, b = place % len_q, place // len_q % heads, place // len_q // heads
    split = tl.arange(0, SPLITS)
    col = column + tl.arange(0, BE)
    length = tl.cast(length, tl.int64)
    ml = part + splits * length * E + tl.cast(place, tl.int64) * splits + split
    part += (split * length + place)[:, None] * E + col[None, :]
    there = split < splits
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.load(ml, mask=there, other=float("-inf"))
    l = tl.load(ml + splits * length, mask=there, other=0.0)
    parts = tl.load(part, mask=there[:, None] & (col < E)[None, :], other=0.0)  # [SPLITS, BE]
    top = tl.max(m, 0)
    weight = power(m - finite(top), NATURAL)
    l = tl.sum(l * weight, 0)
    acc = tl.sum(weight[:, None] * parts, 0)
    if sinks is not None:
        top, l, alpha = with_sink(sinks, head, top, l, NATURAL)
        acc = acc * alpha
    inverse = 1.0 / tl.where(l == 0.0, 1.0, l)
    out += origin(so, b, row, head)
    tl.store(out + col, (acc * inverse).to(out.dtype.element_ty), mask=col < E)
    tl.store(lse + place, total_of(top, l, NATURAL), mask=column == 0)


def applies(p: Problem) -> bool:
    """Whether this kernel is the better choice: a forward of few queries, or not quite so few against many keys."""
    long = p.layout_k is not Layout.DENSE or p.len_k >= LONG * p.len_q
    few = p.len_q <= QUERIES or (long and p.len_q * p.heads_q <= ROWS * max(1, p.heads_kv))
    odd = p.blocks or p.dropout or p.statistic or p.batch_invariant
    simple = p.direction == "forward" and not odd
    return few and simple and Layout.RAGGED not in (p.layout_q, p.layout_k)


@functools.lru_cache(maxsize=4096)
def splits_for(items: int, tiles: int, slots: int, ragged: bool) -> int:
    """Into how many splits to cut `tiles` tiles of keys, if `items` programs share them and `slots` run at once.

    Programs run in waves. Those of one that is not full share the bandwidth among fewer, down to what a tile takes
    anyhow. In a cache lengths may differ, so a split is kept short enough to even that out.
    """
    least = min(MOST_SPLITS, -(-tiles // RAGGED_TILES)) if ragged else 1
    best, lowest = 1, float("inf")
    for splits in range(max(1, least), min(MOST_SPLITS, max(1, tiles)) + 1):
        each = -(-tiles // splits)
        full, rest = divmod(items * splits, slots)
        last = each * math.hypot(ALONE, rest / slots) + FILL if rest else 0.0
        cost = full * (each * math.hypot(ALONE, 1.0) + FILL) + last
        cost += COMBINE if splits > 1 else 0.0
        if cost < lowest * 0.999:
            best, lowest = splits, cost
    return best


def resident(device: Device, plan: Plan, tile_bytes: int, more_bytes: int = 0) -> int:
    """Programs that a multiprocessor runs at once, by the shared memory of their pipelines and of all else."""
    depth = (
        plan.stages if plan.block_q >= 64 else max(1, plan.stages - 1)
    )  # wgmma reads its buffers later
    own = depth * tile_bytes + more_bytes
    warps = 16 if plan.warps >= 4 else 12  # fewer have more registers each
    return max(1, min(device.shared_memory // max(1, own), warps // plan.warps))


def combining(splits: int, dim_v: int) -> tuple[int, int, int]:
    """Columns of a program of `combine`, splits rounded up, and warps: few, whose sums need no shared memory."""
    whole = triton.next_power_of_2(splits)
    width = min(WIDE, max(NARROW, AT_ONCE // whole), triton.next_power_of_2(dim_v))
    return width, whole, min(4, max(1, whole * width // (32 * HELD)))


def sees_all(x: Arrays) -> bool:
    """Whether the right side hides nothing from the only query, as in generating token by token."""
    right, offset = x.band.right, x.band.offset
    if x.len_q != 1 or right is None:
        return right is None
    last = 0 if x.layout_k is not Layout.DENSE else x.k.shape[1] - 1
    return offset + right >= last


def launch(
    kernel: Any, grid: int, plan: Plan, chained: bool, *args: Any, fusion: bool = True
) -> None:
    """Start a kernel on the current device; if chained, while its predecessor ends."""
    options = {"launch_pdl": True} if chained else {}
    compiled = kernel.run(
        *args, grid=(grid, 1, 1), warmup=False, num_warps=plan.warps, num_stages=plan.stages,
        enable_fp_fusion=fusion, **options,
    )  # fmt: skip
    note(compiled, (grid, 1, 1), args)


def chains(device: Device) -> bool:
    """Whether the machine has programmatic dependent launch."""
    return device.kind == "cuda" and int(device.arch.removeprefix("sm")) >= 90


def decode(
    x: Arrays, plan: Plan, *, splits: int | None = None, chained: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Out (B, Lq, H, E) and LSE (B, H, Lq); splits and chained are for measuring, else chosen by the shapes."""
    from relampago.backends.triton import decode_fp8

    device = Device.of(x.q.device)
    q, k, v = A.rows_contiguous(x.q), A.rows_contiguous(x.k), A.rows_contiguous(x.v)
    batch, len_q, heads, dim = q.shape
    groups, dim_v = k.shape[-2], v.shape[-1]
    out = torch.empty((batch, len_q, heads, dim_v), dtype=x.out_dtype, device=q.device)
    lse = torch.empty((batch, heads, len_q), dtype=torch.float32, device=q.device)
    if lse.numel() == 0 or k.shape[0] == 0 or (x.page_table is not None and k.shape[1] == 0):
        return out.zero_(), lse.fill_(float("-inf"))
    rows = len_q * (heads // groups)
    bytewise = decode_fp8.applies(x, rows, device)
    block_q = min(plan.block_q, max(16, triton.next_power_of_2(rows)))
    block_q = decode_fp8.ROWS if bytewise else block_q
    size = A.size_of(x, triton.cdiv(rows, block_q), 1)
    items = batch * groups * size.tiles
    if splits is None:
        tile = plan.block_k * (dim + dim_v) * k.element_size()
        own = 2 * block_q * (dim + plan.block_k) + RESERVED if bytewise else 0
        at_once = resident(device, replace(plan, block_q=block_q), tile, own)
        slots = device.multiprocessors * at_once
        tiles = triton.cdiv(min(size.len_k, x.len_k), plan.block_k)
        splits = splits_for(items, tiles, slots, x.layout_k is not Layout.DENSE)
    band = x.band._replace(right=None, prefix=None) if sees_all(x) else x.band
    masked = x.layout_k is not Layout.DENSE or band.bounded or bool(size.len_k % plan.block_k)
    chained = chains(device) if chained is None else chained
    natural, is_split = A.natural(x), splits > 1
    length = batch * heads * len_q
    part = None
    d1, d2, e1, e2 = A.parts(x)
    if is_split:
        part = torch.empty(splits * length * (dim_v + 2), dtype=torch.float32, device=q.device)
    lay, so = A.lay_of(x), A.strides(out)
    extra = A.extra_of(x)
    kernel, widths = attend_part, (dim, d1, d2, dim_v, e1, e2)
    more = natural, precision(x), masked, chained
    if bytewise:
        d1, e1 = decode_fp8.widths(dim, dim_v)
        kernel, widths = decode_fp8.attend_bytes, (dim, d1, dim_v, e1)
        v, more = v.view(torch.int16), (natural, masked, chained)
    launch(
        kernel, items * splits, plan, chained,
        q, k, v, None if is_split else out, None if is_split else lse, part,
        *A.cache_scales(x), x.scale if natural else x.scale * LOG2E.value, splits, size, lay._replace(page=None),
        A.strides(q), A.strides(k), A.strides(v), so, A.band_of(band),
        extra._replace(sinks=None) if is_split else extra, *widths, block_q, plan.block_k, lay.page or 0, *more,
    )  # fmt: skip
    if is_split:
        width, whole, warps = combining(splits, dim_v)
        launch(
            combine, length * triton.cdiv(dim_v, width), replace(plan, warps=warps, stages=1), chained,
            part, out, lse, x.sinks, splits, length, heads, len_q, so, dim_v, width, whole, natural, chained,
        )  # fmt: skip
    return out, lse
