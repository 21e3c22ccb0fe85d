"""Gradients of score mods' arguments: dS summed over the elements that read an entry, without an N×N tensor.

All tiles on one diagonal of tiles read the same entries of a table of distances, element by element: their dS is summed
in registers, and scattered once. That makes O(N) atomic additions, where one for each element would be O(N²). With
places of their own, distances differ from tile to tile, and each tile is scattered. Sums depend on the order of
programs: deterministic mode is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relampago.backends.triton import arguments as A
from relampago.backends.triton.forward import launch, precision
from relampago.backends.triton.gradients import row_facts
from relampago.backends.triton.tile import (
    arguments,
    assignment,
    bounds,
    call,
    distance_of,
    kept,
    keys_of,
    load_tile,
    offset_of,
    origin,
    plain,
    rows_of,
    scores,
    stepped,
    weights,
)
from relampago.mods import BETWEEN, rule_of
from relampago.plan import Plan
from relampago.problem import Arrays

PLAN = Plan(block_q=32, block_k=32, warps=4, stages=1)


class Target(NamedTuple):
    """A `Slot` whose value is the argument's gradient, and the derivative of its mod by it."""

    axis: Any
    value: Any
    b: int
    h: int
    size: int
    places: Any
    places_b: Any
    places_size: Any
    darg: Any


@triton.jit
def slope_by(
    s, darg, mods, N: tl.constexpr, MOD: tl.constexpr, b, head, rows, keys, offset
):  # fmt: skip
    """The derivative of the scores after all mods by an argument of the MOD-th, at the scaled products s."""
    place = rows + offset
    total = tl.full(s.shape, 1.0, tl.float32)
    for i in tl.static_range(N):
        args = arguments(mods[i], b, head, rows, keys, place)
        if i == MOD:
            total = call(darg, s, place, keys, head, args)
        if i > MOD:
            total = total * call(mods[i].dfn, s, place, keys, head, args)
        s = call(mods[i].fn, s, place, keys, head, args)
    return total


@triton.jit
def change_of(
    q, k, v, dout, shift, delta, norm, q0, k0, b, head, len_q, len_k, offset, factor, scale, size, sq, sk, sv,
    sdo, band, extra, target,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, B: tl.constexpr, MOD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS times the mod's derivative by the argument, [B, B]: Algorithm 2, lines 11, 12, 14 and 15."""
    rows = q0 + tl.arange(0, B)[:, None]
    keys = k0 + tl.arange(0, B)[None, :]
    q1 = load_tile(q, q0, len_q, sq.l, D, 0, D1, B, True)
    k1 = load_tile(k, k0, len_k, sk.l, D, 0, D1, B, True)
    s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        q2 = load_tile(q, q0, len_q, sq.l, D, D1, D2, B, True)
        k2 = load_tile(k, k0, len_k, sk.l, D, D1, D2, B, True)
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    do1 = load_tile(dout, q0, len_q, sdo.l, E, 0, E1, B, True)
    v1 = load_tile(v, k0, len_k, sv.l, E, 0, E1, B, True)
    dp = tl.dot(do1, tl.trans(v1), input_precision=PRECISION)
    if E2 > 0:
        do2 = load_tile(dout, q0, len_q, sdo.l, E, E1, E2, B, True)
        v2 = load_tile(v, k0, len_k, sv.l, E, E1, E2, B, True)
        dp = tl.dot(do2, tl.trans(v2), dp, input_precision=PRECISION)
    top, di = row_facts(shift, delta, q0, len_q, B, True)
    row_norm = norm
    if norm is not None:
        row_norm = tl.load(norm + rows, mask=rows < len_q, other=1.0)
    masked = scores(s, factor, band, extra, offset, b, head, rows, keys, len_q, len_k, True, True)
    p = weights(masked, top[:, None], row_norm, factor, True)
    if extra.seed is not None:
        dp = tl.where(kept(extra, size, b, head, rows, keys), dp * extra.upscale, 0.0)
    change = slope_by(
        s * scale, target.darg, extra.mods, extra.modified, MOD, b, head, rows, keys, offset
    )
    return p * (dp - di[:, None]) * change


@triton.jit
def scatter(table, entry, value, inside, size):
    """Add each element to its entry of a table of distances, and to the two ends a sum each.

    All pairs beyond the clip share an end: one by one, thousands would be rounded one after another, to the digits of
    what stands there already.
    """
    last = size // 2 * 2
    first = inside & (entry == 0)
    end = inside & (entry == last) & (entry > 0)  # a table of one entry has one end
    tl.atomic_add(table, tl.sum(tl.sum(tl.where(first, value, 0.0), 1), 0), sem="relaxed")
    tl.atomic_add(table + last, tl.sum(tl.sum(tl.where(end, value, 0.0), 1), 0), sem="relaxed")
    tl.atomic_add(table + entry, value, mask=inside & (entry > 0) & (entry < last), sem="relaxed")


@triton.jit(do_not_specialize=["size", "band"])
def by_argument(
    q, k, v, dout, shift, delta, norm, factor, scale, size, lay, sq, sk, sv, sdo, sl, band, extra, target,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, B: tl.constexpr, MOD: tl.constexpr, DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What one diagonal of tiles, or one row of tiles, adds to an argument's gradient."""
    sq = stepped(sq, q, D)
    sk = stepped(sk, k, D)
    sv = stepped(sv, v, E)
    sdo = stepped(sdo, dout, E)
    tile, head, b = assignment(size, False)
    first, len_q = rows_of(lay, size, b)
    first_k, len_k = keys_of(lay, size, b)
    offset = offset_of(lay, band, len_q, len_k)
    if DIAGONAL:
        gap = tile - (tl.cdiv(size.len_q, B) - 1)  # tiles from a row's to its key's
        begin = max(0, -gap)
        end = min(tl.cdiv(len_q, B), tl.cdiv(len_k, B) - gap)
    else:
        if tile * B >= len_q:
            return
        gap = 0
        start, stop, _, _ = bounds(band, offset, b, tile * B, min(tile * B + B, len_q), len_k, B)
        begin, end = tl.cast(start, tl.int32) // B, tl.cdiv(tl.cast(stop, tl.int32), B)
    if begin >= end:
        return
    g = head // size.group
    q += origin(sq, b, first, head)
    dout += origin(sdo, b, first, head)
    k += origin(sk, b, first_k, g)
    v += origin(sv, b, first_k, g)
    at = origin(sl, b, first, head)
    norm_head = norm
    if norm is not None:
        norm_head = norm + at
    table = target.value + tl.cast(b, tl.int64) * target.b + tl.cast(head, tl.int64) * target.h
    total = tl.zeros([B, B], tl.float32)
    for i in tl.range(begin, end):
        q0, k0 = tile * B, i * B
        if DIAGONAL:
            q0, k0 = i * B, (i + gap) * B
        change = change_of(
            q, k, v, dout, shift + at, delta + at, norm_head, q0, k0, b, head, len_q, len_k, offset, factor, scale,
            size, sq, sk, sv, sdo, band, extra, target, D, D1, D2, E, E1, E2, B, MOD, PRECISION,
        )  # fmt: skip
        if target.axis == "k":
            keys = k0 + tl.arange(0, B)
            tl.atomic_add(table + keys, tl.sum(change, 0), mask=keys < len_k, sem="relaxed")
        elif target.places is not None:
            rows, keys = q0 + tl.arange(0, B)[:, None], k0 + tl.arange(0, B)[None, :]
            entry = distance_of(target, b, tl.minimum(keys, len_k - 1), rows + offset)
            inside = (rows < len_q) & (keys < len_k)
            scatter(table, entry, change, inside, target.size)
        else:
            total += change
    if target.axis == "head":
        tl.atomic_add(table, tl.sum(tl.sum(total, 1), 0), sem="relaxed")
    elif target.axis == "q":
        rows = tile * B + tl.arange(0, B)
        tl.atomic_add(table + rows, tl.sum(total, 1), mask=rows < len_q, sem="relaxed")
    elif DIAGONAL:
        reach = target.size // 2
        nearest = gap * B - offset  # of the tile's first row to its first key
        if nearest - B + 1 >= reach:  # beyond the clip: all read one entry
            tl.atomic_add(table + 2 * reach, tl.sum(tl.sum(total, 1), 0), sem="relaxed")
        elif nearest + B - 1 <= -reach:
            tl.atomic_add(table, tl.sum(tl.sum(total, 1), 0), sem="relaxed")
        else:
            row, key = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
            entry = distance_of(target, b, nearest + key, row)
            scatter(table, entry, total, entry >= 0, target.size)


def argument_gradients(
    x: Arrays,
    wanted: tuple[bool, ...],
    tensors: tuple[Tensor, ...],
    rows: tuple[Any, ...],
    dims: tuple[int, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments that are wanted, in fp32.

    Args:
        x: the call.
        wanted: for each of its mod_args.
        tensors: q, k, v and dO, rows contiguous.
        rows: shift, delta and norm, shaped like LSE.
        dims: D, D1, D2, E, E1, E2.
    """
    sums = [
        torch.zeros(t.shape, dtype=torch.float32, device=t.device) if wish else None
        for t, wish in zip(x.mod_args, wanted, strict=False)
    ]
    q, k, v, _ = tensors
    if q.numel() == 0 or k.numel() == 0:
        return tuple(sums)
    block = PLAN.block_q
    tiles = triton.cdiv(x.len_q, block)
    diagonals = tiles + triton.cdiv(x.len_k, block) - 1
    size = A.size_of(x, tiles, (q.shape[-1] + v.shape[-1]) * q.element_size())
    for mod, target in targets(x, sums):
        diagonal = target.axis.value == "distance" and target.places is None
        own = size._replace(tiles=diagonals if diagonal else tiles)
        launch(
            by_argument, own.tiles * own.batch * own.heads, PLAN, *tensors, *rows, x.scale, x.scale, own, A.lay_of(x),
            *map(A.strides, tensors), A.lse_strides(x), A.band_of(x.band), A.extra_of(x), target, *dims, block, mod,
            diagonal, precision(x),
        )  # fmt: skip
    return tuple(sums)


def targets(x: Arrays, sums: list[Tensor | None]) -> list[tuple[int, Target]]:
    """The wanted arguments, each with the number of its mod."""
    found, number = [], 0
    for mod, (rule, compiled) in enumerate(
        zip(map(rule_of, x.mods), A.mods_of(x) or (), strict=True)
    ):
        for slot, own, darg in zip(rule.slots, compiled.slots, rule.dargs, strict=True):
            if not isinstance(slot, str):
                continue
            table = sums[number] if number < len(sums) else None
            number += 2 if slot == BETWEEN else 1
            if table is None or darg is None:
                continue
            lead = table.stride()[:-1]
            b, h = ((0, 0), (0, *lead), lead)[len(lead)]
            if slot == "head":
                b, h = (lead[0] if lead else 0), 1
            found.append((mod, Target(own.axis, table, b, h, own.size, *own[5:], plain(darg))))
    return found
