"""flash_attn_with_kvcache: append in place, turn, attend. A step of generation in one call, without a gradient.

Whatever the cache (one room per sequence, rooms picked by index, pages, rooms with padding at the left), it becomes
one of two: a room per sequence, or pages. A room picked by an index is a page as long as the room; a room with padding
at the left is read as pages of one token, which begin after the padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.cache import CacheView, host_reads
from relampago.decode import attention_decode
from relampago.flash_attn.fp8 import FP8, Readable, descales_of, put, readable, scaled
from relampago.flash_attn.options import chunk_starts, chunked, options_of, sequence_of
from relampago.flash_attn.rotary import rotate_at
from relampago.integrations.refusals import expect, refuses
from relampago.lower import autocast


class Room(NamedTuple):
    """Where each sequence's tokens lie: pages (B, most) of the cache, `room` tokens at most; None: page b is b's."""

    pages: Tensor | None
    page: int
    room: int


@refuses
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
) -> Any:
    """`flash_attn.flash_attn_with_kvcache`; writes k and v into k_cache and v_cache.

    Args:
        q: (B, Lq, H, D), or packed (Tq, H, D) with cu_seqlens_q.
        k_cache: (caches, room, G, D), or pages (pages, page, G, D) with a block_table; any page size.
        v_cache: likewise, of head dim E.
        k: (B, n, G, D), or packed with cu_seqlens_k_new; goes to places cache_seqlens and after.
        v: likewise.
        rotary_cos: (positions, dims / 2), q's dtype; turns k, and q, at places cache_seqlens and after (a q that is
            neither causal nor local stands at cache_seqlens as a whole).
        rotary_sin: likewise.
        cache_seqlens: tokens in the cache before this call: an int, or int32 (B,); the whole room if None.
        cache_batch_idx: int32 (B,), which cache each sequence has.
        cache_leftpad: int32 (B,), where each sequence begins in its room.
        block_table: int32 (B, most), the pages of each sequence.
        softmax_scale: D ** -0.5 if None.
        causal: aligned to the bottom right.
        window_size: (left, right); -1 is unbounded.
        softcap: 0 is none.
        rotary_interleaved: pairs of neighbours (GPT-J) instead of halves (GPT-NeoX).
        alibi_slopes: (H,) or (B, H).
        num_splits: accepted; relampago chooses for itself.
        return_softmax_lse: also return LSE (B, H, Lq), or (H, Tq).
        qv: as in `flash_attn_func`.
        page_table: FlashAttention-3's name of block_table.
        cu_seqlens_q: int32 (B + 1,), for packed queries.
        cu_seqlens_k_new: int32 (B + 1,), for packed new keys.
        max_seqlen_q: the longest sequence of packed queries.
        rotary_seqlens: int32 (B,), positions to turn by, if not cache_seqlens.
        q_descale: (B, G), as in `flash_attn_func`.
        k_descale: likewise.
        v_descale: likewise.
        attention_chunk: as in `flash_attn_func`.
        scheduler_metadata: accepted.
        pack_gqa: accepted.
        sm_margin: accepted.
        s_aux: (H,), attention sinks.

    Returns:
        out (B, Lq, H, E) or (Tq, H, E), or (out, softmax_lse).

    Raises:
        Refused: an argument is wrong; a RuntimeError, as flash-attn's.
    """
    table = block_table if page_table is None else page_table
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    _check(q, k_cache, k, v, cache_batch_idx, cache_leftpad, table, cache_seqlens)
    room = room_of(k_cache, batch, table, cache_batch_idx)
    before = lengths_of(cache_seqlens, batch, room, k_cache.device)
    if k is not None and v is not None:
        if k.dtype != k_cache.dtype:
            _, k, v = autocast(q, k, v)
        _check_new(k_cache, v_cache, k, v, batch, cu_seqlens_k_new)
    options = options_of(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip
    descales = descales_of(q, k_cache, v_cache, (q_descale, k_descale, v_descale), batch)
    with torch.no_grad():
        if rotary_cos is not None:
            q, k = turned(
                q, k, (rotary_cos, rotary_sin), before if rotary_seqlens is None else rotary_seqlens,
                (cu_seqlens_q, cu_seqlens_k_new), room, rotary_interleaved, follows(options, room),
            )  # fmt: skip
        lengths = before
        if k is not None and v is not None:
            counts = append(k_cache, v_cache, k, v, before, room, cu_seqlens_k_new)
            lengths = before + counts
        call = readable(q, k_cache, v_cache, qv, descales, cu_seqlens_q, cached=True)
        view = view_of(call, lengths, room, cache_leftpad)
        q = call.q
        if cu_seqlens_q is None:
            rows, counts_q = q.shape[1], q.shape[1]
        else:
            expect(
                max_seqlen_q is not None, "max_seqlen_q is None; expected an int, with cu_seqlens_q"
            )
            rows, counts_q = int(max_seqlen_q or 0), cu_seqlens_q.diff()
        if attention_chunk:
            starts = chunk_starts(rows, view.lengths - counts_q, attention_chunk, q)
            options = chunked(options, attention_chunk, starts)
        packed = (
            {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": rows}
        )
        out, lse = attention_decode(q, view, return_lse=True, **packed, **options)
        out = scaled(out, cu_seqlens_q, call.of_out)
    return (out, lse) if return_softmax_lse else out


def _check(
    q: Tensor, k_cache: Tensor, k: Any, v: Any, index: Any, leftpad: Any, table: Any, seqlens: Any
) -> None:
    expect(k_cache.ndim == 4, "k_cache has {} dimensions; expected 4", k_cache.ndim)
    expect((k is None) == (v is None), "v is missing, or k; expected both or neither")
    expect(k is None or seqlens is not None, "cache_seqlens is None; expected it where k is given")
    expect(
        table is None or index is None, "cache_batch_idx is given; expected None with a block_table"
    )
    expect(
        table is None or leftpad is None, "cache_leftpad is given; expected None with a block_table"
    )
    for name, value in (
        ("cache_batch_idx", index),
        ("cache_leftpad", leftpad),
        ("block_table", table),
    ):
        if value is not None:
            expect(
                value.dtype == torch.int32 and value.device == q.device,
                "{} is {} on {}; expected torch.int32 on {}",
                name,
                value.dtype,
                value.device,
                q.device,
            )


def room_of(k_cache: Tensor, batch: int, table: Tensor | None, index: Tensor | None) -> Room:
    """How sequences find their tokens."""
    page = k_cache.shape[1]
    if table is not None:
        expect(
            table.ndim == 2 and table.shape[0] == batch,
            "block_table is {}; expected ({}, most)",
            tuple(table.shape),
            batch,
        )
        return Room(table, page, page * table.shape[1])
    if index is not None:
        expect(
            tuple(index.shape) == (batch,),
            "cache_batch_idx is {}; expected ({},)",
            tuple(index.shape),
            batch,
        )
        return Room(index[:, None], page, page)
    expect(k_cache.shape[0] >= batch, "k_cache has {} rooms; expected {}", k_cache.shape[0], batch)
    return Room(None, page, page)


def lengths_of(given: int | Tensor | None, batch: int, room: Room, device: torch.device) -> Tensor:
    """Tokens that each sequence has, int32 (B,)."""
    if isinstance(given, Tensor):
        expect(
            tuple(given.shape) == (batch,) and given.dtype == torch.int32,
            "cache_seqlens is {} {}; expected ({},) torch.int32",
            tuple(given.shape),
            given.dtype,
            batch,
        )
        return given
    full = room.room if given is None else int(given)
    return torch.full((batch,), full, dtype=torch.int32, device=device)


def follows(options: dict[str, Any], room: Room) -> bool:
    """Whether rows have positions of their own: causal, or a window shorter than the room."""
    window = options["window"] or (None, None)
    return options["causal"] or any(side is not None and side < room.room for side in window)


def turned(
    q: Tensor,
    k: Tensor | None,
    tables: tuple[Tensor, Tensor | None],
    base: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    room: Room,
    interleaved: bool,
    rows_follow: bool,
) -> tuple[Tensor, Tensor]:
    """q and the new keys, turned by their positions."""
    cos, sin = tables
    expect(k is not None, "k is None; expected new keys where rotary_cos is given")
    expect(q.dtype not in FP8, "q is {}; expected bf16 or wider where rotary_cos is given", q.dtype)
    expect(sin is not None, "rotary_sin is None; expected it where rotary_cos is given")
    assert k is not None
    assert sin is not None
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        fits = table.ndim == 2 and table.shape[0] >= room.room and 2 * table.shape[1] <= q.shape[-1]
        expect(
            fits and table.dtype == q.dtype,
            "{} is {} {}; expected (at least {}, at most {}) {}",
            name,
            tuple(table.shape),
            table.dtype,
            room.room,
            q.shape[-1] // 2,
            q.dtype,
        )
    places = [
        positions(t, base, cu, step) for t, cu, step in zip((q, k), cu_seqlens, (rows_follow, True), strict=True)
    ]  # fmt: skip
    return tuple(
        rotate_at(t, cos, sin, place, interleaved=interleaved)
        for t, place in zip((q, k), places, strict=True)
    )  # type: ignore[return-value]


def positions(t: Tensor, base: Tensor, cu: Tensor | None, step: bool = True) -> Tensor:
    """Each token's place, the first of a sequence at base: (B, L) or (T,); all at base without step."""
    base = base.long()
    if cu is None:
        row = torch.arange(t.shape[1], device=t.device)
        return base[:, None] + (row if step else row * 0)
    which = sequence_of(cu, t.shape[0])
    row = torch.arange(t.shape[0], device=t.device) - cu[which]
    return base[which] + (row if step else row * 0)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    room: Room,
    cu: Tensor | None,
) -> Tensor:
    """Write new tokens to their places; how many each sequence got. Only on the CPU is a full room found in time."""
    place = positions(k, before, cu)
    if cu is None:
        which = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(place)
        counts = torch.full_like(before, k.shape[1])
    else:
        which, counts = sequence_of(cu, k.shape[0]), cu.diff()
        if k.device.type == "cpu":  # rows beyond the last sequence
            which, place, k, v = (t[: int(cu[-1])] for t in (which, place, k, v))
    if host_reads(place):
        expect(
            int(place.max()) < room.room,
            "k needs {} places; expected at most the {} of a sequence's room",
            int(place.max()) + 1,
            room.room,
        )
        expect(int(place.min()) >= 0, "cache_seqlens is negative: {}", before)
    pages = which if room.pages is None else room.pages[which, place // room.page].long()
    if host_reads(pages):
        expect(
            int(pages.min()) >= 0 and int(pages.max()) < k_cache.shape[0],
            "block_table or cache_batch_idx goes from {} to {}; expected 0 to {}, what there is of the cache",
            int(pages.min()),
            int(pages.max()),
            k_cache.shape[0] - 1,
        )
    for cache, new in ((k_cache, k), (v_cache, v)):
        put(cache, (pages, place % room.page), new)
    return counts


def _check_new(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: int, cu: Tensor | None
) -> None:
    """New tokens are those of the batch, and as the caches hold them."""
    lead = tuple(k.shape[:-2]) if cu is not None else (batch, *k.shape[1:-2])
    rank = 4 if cu is None else 3
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = (*lead, *cache.shape[2:])
        expect(
            new.ndim == rank and tuple(new.shape) == want and new.dtype == cache.dtype,
            "{} is {} {}; expected {} {}",
            name,
            tuple(new.shape),
            new.dtype,
            want,
            cache.dtype,
        )


def view_of(call: Readable, lengths: Tensor, room: Room, leftpad: Tensor | None) -> CacheView:
    """The cache as `attention_decode` reads it."""
    k, v, scales = call.k, call.v, (call.k_scale, call.v_scale)
    if leftpad is None:
        if room.pages is None and k.shape[0] != lengths.shape[0]:
            k, v = k[: lengths.shape[0]], v[: lengths.shape[0]]
        return CacheView(k, v, lengths, room.pages, *scales)
    first = leftpad[:, None].long() + torch.arange(room.room, device=k.device)
    first = first.clamp(max=room.room - 1)
    owner = (
        torch.arange(len(leftpad), device=k.device)[:, None] if room.pages is None else room.pages
    )
    table = (owner * room.room + first).to(torch.int32)
    k, v = (t.flatten(0, 1).unsqueeze(1) for t in (k, v))
    return CacheView(k, v, (lengths - leftpad).clamp(min=0), table, *scales)
