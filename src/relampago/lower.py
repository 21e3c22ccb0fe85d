"""A call, validated and lowered to what the ops take: steps 1 and 2 of ARCHITECTURE.md, but for what needs sizes."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from relampago import defaults, quant, validate
from relampago.cache import KVCache
from relampago.masks.spec import Extent, Resolved, resolve
from relampago.mods import constant
from relampago.options import Options, Packing, mask_of, mods_of, seed_of
from relampago.problem import Facts
from relampago.select import by_name
from relampago.shapes import plain


class Call(NamedTuple):
    """A validated call: what the ops take, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    lens_k: Tensor | None
    page_table: Tensor | None
    row_start: Tensor | None
    row_end: Tensor | None
    seed: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    blocks: list[Tensor]
    mod_args: list[Tensor]
    sizes: list[int]  # offset, longest q, longest k
    facts: str


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    packing: Packing | None = None,
    offset: int | None = None,
    shard: bool = False,
    cache: KVCache | None = None,
) -> Call:
    """Validate a call and lower it to what the ops take; k and v are a cache's own where one is given."""
    o = options
    q, k, v = autocast(q, k, v)
    validate.tensors(q, k, v, packed=packing is not None, cached=cache is not None)
    validate.numbers(o.scale, o.softcap, o.dropout_p, o.window)
    if cache is not None:
        if packing is None:
            batch, len_q = q.shape[0], q.shape[1]
        else:
            validate.packed("q", q, packing.cu_q, packing.max_q)
            batch, len_q = packing.cu_q.shape[0] - 1, packing.max_q
        found, len_k = cache.batch, cache.longest
        validate.require(
            [("cache", ("holds {} sequences", found), ("{}, as q", batch), found == batch)]
        )
        offset = 0
    elif packing is None:
        batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
        offset = len_k - len_q if offset is None else offset
        whole = isinstance(offset, int | torch.SymInt)
        validate.require([("offset", ("is {!r}", offset), "an int or None", whole)])
    else:
        validate.packing(q, k, *packing)
        batch, len_q, len_k = packing.cu_q.shape[0] - 1, packing.max_q, packing.max_k
        offset = 0
    full = (batch, q.shape[-2], len_q, len_k)
    asked = o.precision
    if asked is None and not shard and cache is None:
        asked = defaults.forced.precision
    scales = validate.fp8(q, k, v, asked, (o.q_descale, o.k_descale, o.v_descale), full, shard)
    precision = "fp8" if q.dtype == quant.E4M3 or asked == "fp8" else None
    validate.extras(q, o.bias, o.sinks, o.alibi_slopes, full)
    seen = resolve(
        mask_of(o), Extent(*full, offset, q.device, packing is not None or cache is not None)
    )
    mods = mods_of(o)
    validate.score_args(mods, full, q.device)
    invariant = defaults.invariant(o.batch_invariant)
    facts = Facts(
        scale=None if o.scale is None else constant(o.scale),
        left=plain(seen.left),
        right=plain(seen.right),
        prefix=plain(seen.prefix),
        block=_tile(seen),
        mods=tuple(mod.token for mod in mods),
        dropout_p=constant(o.dropout_p),
        deterministic=defaults.deterministic(o.deterministic) or invariant,
        dtype=_out_dtype(q, shard),
        shard=shard,
        backend=_backend(defaults.forced.backend if o.backend is None else o.backend),
        plan=defaults.forced.plan,
        precision=precision,
        batch_invariant=invariant,
    )
    return Call(
        q=q,
        k=k,
        v=v,
        bias=None
        if o.bias is None
        else o.bias.reshape((1,) * (4 - o.bias.ndim) + tuple(o.bias.shape)),
        sinks=o.sinks,
        mask=seen.dense,
        cu_q=packing.cu_q if packing else None,
        cu_k=packing.cu_k if packing else None,
        lens_k=cache.lengths if cache else None,
        page_table=cache.page_table if cache else None,
        row_start=seen.row_start,
        row_end=seen.row_end,
        seed=seed_of(o.dropout_seed, q.device) if o.dropout_p else None,
        q_scale=scales[0],
        k_scale=scales[1],
        v_scale=scales[2],
        blocks=list(seen.blocks.blocks) if seen.blocks is not None else [],
        mod_args=[tensor for mod in mods for tensor in mod.tensors],
        sizes=[offset, len_q, len_k],
        facts=facts.encode(),
    )


def _out_dtype(q: Tensor, shard: bool) -> str | None:
    """What out and gradients are held in, if not in q's dtype."""
    if shard:
        return "float64" if q.dtype == torch.float64 else "float32"
    return "bfloat16" if q.dtype == quant.E4M3 else None


def _tile(seen: Resolved) -> tuple[int, int] | None:
    """A BlockSparse's (queries, keys) as plain ints, also of one that is an argument of what is compiled."""
    if seen.blocks is None:
        return None
    rows, keys = seen.blocks.block
    return operator.index(rows), operator.index(keys)


def _backend(name: str | None) -> str | None:
    if name is not None:
        by_name(name)
    return name


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as torch.autocast asks, where it is active: also what differs, as a rotary embedding's fp32 q and k."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in (q, k, v)):
        return q, k, v  # validation says what is wrong
    kind = q.device.type
    narrow = q.dtype not in (torch.float64, quant.E4M3)
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and narrow:
        dtype = torch.get_autocast_dtype(kind)
        return q.to(dtype), *(t if t.dtype == quant.E4M3 else t.to(dtype) for t in (k, v))  # type: ignore[return-value]
    return q, k, v
