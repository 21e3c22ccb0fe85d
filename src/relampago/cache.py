"""Key-value caches for decoding: one contiguous room per sequence, or pages that sequences own and share.

Both append in place, several tokens at a time and per sequence, without waiting for the device: a step can be captured
in a CUDA graph once room is reserved. Lengths live on the device (int32) and, as a bound, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relampago.errors import InvalidInput
from relampago.quant.cast import E4M3, quantise
from relampago.shapes import is_one_of


class KVCache:
    """Keys (B, room, G, D) and values (B, room, G, E); sequence b has filled the first `lengths[b]`.

    Args:
        batch: sequences.
        room: tokens each may hold.
        kv_heads: G.
        dim: D.
        dim_v: E; D if None.
        dtype: of keys and values; float8_e4m3fn needs scales, and new tokens are cast as they are appended.
        device: where they live.
        k_scale: fp32 (G,), what e4m3 keys are multiplied by.
        v_scale: fp32 (G,), of values.
    """

    page_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    saturated: Tensor | None = (
        None  # int64 scalar: entries beyond e4m3's range that were appended, real or not
    )

    def __init__(
        self,
        batch: int,
        room: int,
        kv_heads: int,
        dim: int,
        dim_v: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        dim_v = dim if dim_v is None else dim_v
        _positive(batch=batch, room=room, kv_heads=kv_heads, dim=dim, dim_v=dim_v)
        self.room = room
        self.k = torch.zeros(batch, room, kv_heads, dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, room, kv_heads, dim_v, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._bound = [0] * batch
        self._take_scales(k_scale, v_scale, (kv_heads,))

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.lengths.shape[0]

    @property
    def longest(self) -> int:
        """What kernels plan for: the room, since lengths are on the device."""
        return self.room

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Add tokens to every sequence, in place.

        Args:
            k: (B, n, G, D).
            v: (B, n, G, E).
            counts: int32 (B,) on the cache's device: how many of the n each sequence really gets; all if None.

        Raises:
            InvalidInput: wrong shapes, or a sequence would outgrow its room. Nothing is written then.
        """
        k, v, beyond = self._narrow(k, v)
        n = self._check(k, v, counts)
        self._reserve_for(n)
        self._count(beyond)
        place, valid = self._places(n, counts)
        b = torch.arange(self.batch, device=self.k.device)[:, None]
        self._write((b, place % self.room), k, v, valid)
        self._grow(n, counts)

    def bound(self, lengths: Sequence[int]) -> None:
        """Tell the host that sequences hold no more than this; after `counts`, it believes they hold more."""
        self._bound = [min(b, int(n)) for b, n in zip(self._bound, lengths, strict=True)]

    def free(self, sequences: Sequence[int] | None = None) -> None:
        """Empty some sequences, or all."""
        for b in range(self.batch) if sequences is None else sequences:
            self.lengths[b] = 0
            self._bound[b] = 0

    def gather(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys (L, G, D) and values (L, G, E) of one sequence. Waits for the device."""
        n = int(self.lengths[b])
        return self.k[b, :n], self.v[b, :n]

    @property
    def descales(self) -> dict[str, Tensor]:
        """The scales as options of a call, (B, G)."""
        named = {"k_descale": self.k_scale, "v_descale": self.v_scale}
        return {name: t.expand(self.batch, -1) for name, t in named.items() if t is not None}

    def _take_scales(
        self, k_scale: Tensor | None, v_scale: Tensor | None, *shapes: tuple[int, ...]
    ) -> None:
        """Check the scales, which have one of these shapes, and keep them; none where keys are not e4m3."""
        kind, wanted = (torch.float32, self.k.device), self.k.dtype == E4M3
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if isinstance(scale, Tensor):
                fits = wanted and is_one_of(tuple(scale.shape), shapes)
                fits = fits and (scale.dtype, scale.device) == kind
            else:
                fits = scale is None and not wanted
            if not fits:
                form = f"{' or '.join(map(str, shapes))} torch.float32 {self.k.device}"
                raise InvalidInput(
                    f"{name} is {_shown(scale)}; expected {form if wanted else None}, as keys are {self.k.dtype}"
                )
        self.k_scale, self.v_scale = k_scale, v_scale
        if self.k.dtype == E4M3:
            self.saturated = torch.zeros((), dtype=torch.int64, device=self.k.device)

    def _narrow(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """New tokens in the cache's dtype: cast where it is e4m3 and they are not; and how many saturated."""
        found, beyond = [], []
        for new, scale in ((k, self.k_scale), (v, self.v_scale)):
            fits = (
                isinstance(new, Tensor)
                and new.ndim == 4
                and new.shape[2] == self.k.shape[2]
                and new.device == self.k.device
            )
            if scale is None or not fits or new.dtype == E4M3 or not new.is_floating_point():
                found.append(new)
                continue
            of_heads = scale[None, :, None].expand(new.shape[0], -1, -1)
            one = quantise(new, scales=of_heads, count=True)
            found.append(one.values)
            beyond.append(one.saturated)
        return found[0], found[1], beyond

    def _count(self, beyond: list[Tensor | None]) -> None:
        for n in beyond:
            if self.saturated is not None and n is not None:
                self.saturated += n

    def _check(self, k: Tensor, v: Tensor, counts: Tensor | None) -> int:
        n = k.shape[1] if isinstance(k, Tensor) and k.ndim == 4 else -1
        for name, got, like in (("k", k, self.k), ("v", v, self.v)):
            want = (self.batch, n, *like.shape[2:])
            if (
                n < 0
                or not isinstance(got, Tensor)
                or tuple(got.shape) != want
                or got.dtype != like.dtype
                or got.device != like.device
            ):
                raise InvalidInput(
                    f"{name} is {_shown(got)}; expected "
                    f"({self.batch}, n, {like.shape[2]}, {like.shape[3]}) {like.dtype} {like.device}"
                )
        if counts is None:
            return n
        like = self.lengths
        if (
            not isinstance(counts, Tensor)
            or tuple(counts.shape) != (self.batch,)
            or (counts.dtype, counts.device) != (like.dtype, like.device)
        ):
            raise InvalidInput(
                f"counts is {_shown(counts)}; expected ({self.batch},) {like.dtype} {like.device}"
            )
        if host_reads(counts) and (int(counts.min()) < 0 or int(counts.max()) > n):
            raise InvalidInput(
                f"counts is {counts.tolist()[:16]}; expected 0 to {n}, the new tokens"
            )
        return n

    def _reserve_for(self, n: int) -> None:
        """Make sure that n more tokens fit, by the host's bound of the lengths."""
        fullest = max([0, *self._bound])
        if fullest + n > self.room:
            raise InvalidInput(
                f"k has {n} tokens; expected at most {self.room - fullest}: the room is {self.room}"
            )

    def _places(self, n: int, counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Positions (B, n) of the new tokens, and which of them are real."""
        step = torch.arange(n, device=self.k.device)
        place = self.lengths[:, None].long() + step
        return place, None if counts is None else step < counts[:, None]

    def _write(self, index: tuple[Tensor, ...], k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Write new tokens; where one is not real, its own (unfilled) place is written back unchanged."""
        for new, cache in ((k, self.k), (v, self.v)):
            if cache.dtype == E4M3:
                new, cache = new.view(torch.uint8), cache.view(torch.uint8)
            value = new if valid is None else torch.where(valid[..., None, None], new, cache[index])
            cache.index_put_(index, value)

    def _grow(self, n: int, counts: Tensor | None) -> None:
        self.lengths += n if counts is None else counts
        self._bound = [bound + n for bound in self._bound]


class PagedKVCache(KVCache):
    """Keys (pages, page, G, D) that sequences own page by page, found through `page_table` (B, most) int32.

    Page 0 belongs to nobody: entries of the table that are not reserved point there. Pages are handed out on the host;
    `reserve` ahead of a captured graph, since a replay cannot ask for more.

    Args:
        batch: sequences.
        pages: pages in all, page 0 besides.
        page: tokens a page holds.
        kv_heads: G.
        dim: D.
        dim_v: E; D if None.
        most: pages one sequence may own; all of them if None.
        dtype: as in `KVCache`.
        device: where they live.
        k_scale: as in `KVCache`.
        v_scale: as in `KVCache`.
    """

    page_table: Tensor

    def __init__(
        self,
        batch: int,
        pages: int,
        page: int,
        kv_heads: int,
        dim: int,
        dim_v: int | None = None,
        *,
        most: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        _positive(batch=batch, pages=pages, page=page)
        super().__init__(
            pages + 1, page, kv_heads, dim, dim_v, dtype=dtype, device=device, k_scale=k_scale, v_scale=v_scale
        )  # fmt: skip
        self.page = page
        self.room = page * (most or pages)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(batch, most or pages, dtype=torch.int32, device=device)
        self._bound = [0] * batch
        self._owned: list[list[int]] = [[] for _ in range(batch)]
        self._unused = list(range(pages, 0, -1))
        self._sharers = [0] * (pages + 1)

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._unused)

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Own pages for so many tokens in all, for every sequence or for each.

        Raises:
            InvalidInput: there are not enough pages, or a table is too short. Nothing is reserved then.
        """
        wanted = [tokens] * self.batch if isinstance(tokens, int) else list(tokens)
        short = [
            max(0, -(-n // self.page) - len(owned))
            for n, owned in zip(wanted, self._owned, strict=True)
        ]
        if max([0, *wanted]) > self.room:
            raise InvalidInput(
                f"tokens is {max(wanted)}; expected at most {self.room}, the room of one sequence"
            )
        if sum(short) > self.free_pages:
            raise InvalidInput(
                f"tokens needs {sum(short)} more pages; expected at most the {self.free_pages} unused"
            )
        for b, n in enumerate(short):
            if n:
                fresh = [self._unused.pop() for _ in range(n)]
                start = len(self._owned[b])
                self._owned[b] += fresh
                self._enter(b, start, fresh)
                for number in fresh:
                    self._sharers[number] = 1

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """As `KVCache.append`; takes pages as it needs them.

        Args:
            k: (B, n, G, D).
            v: (B, n, G, E).
            counts: int32 (B,): how many of the n each sequence really gets; all if None.

        Raises:
            InvalidInput: wrong shapes, or no pages are left. Nothing is written then.
        """
        k, v, beyond = self._narrow(k, v)
        n = self._check(k, v, counts)
        self._reserve_for(n)
        self._count(beyond)
        place, valid = self._places(n, counts)
        page = self.page_table.gather(
            1, (place // self.page).clamp(max=self.page_table.shape[1] - 1)
        )
        self._write((page.long(), place % self.page), k, v, valid)
        self._grow(n, counts)

    def fork(self, source: int, into: Sequence[int]) -> None:
        """Let other sequences begin with what `source` holds. Full pages are shared, the last partial one is copied.

        Raises:
            InvalidInput: no pages are left. Nothing is changed then.
        """
        length = int(self.lengths[source])
        full, rest = divmod(length, self.page)
        into = [b for b in into if b != source]
        released = sum(self._sharers[p] == 1 for b in into for p in self._owned[b])
        if rest and len(into) > self.free_pages + released:
            raise InvalidInput(
                f"into needs {len(into)} pages; expected at most {self.free_pages + released}"
            )
        self.free(into)
        for b in into:
            shared = self._owned[source][:full]
            for number in shared:
                self._sharers[number] += 1
            self._owned[b] = list(shared)
            if rest:
                copy, last = self._unused.pop(), self._owned[source][full]
                self._sharers[copy] = 1
                self.k[copy, :rest] = self.k[last, :rest]
                self.v[copy, :rest] = self.v[last, :rest]
                self._owned[b].append(copy)
            self._enter(b, 0, self._owned[b])
            self.lengths[b] = length
            self._bound[b] = length

    def free(self, sequences: Sequence[int] | None = None) -> None:
        """Empty some sequences, or all; pages that no other sequence shares become unused."""
        for b in range(self.batch) if sequences is None else sequences:
            for number in self._owned[b]:
                self._sharers[number] -= 1
                if self._sharers[number] == 0:
                    self._unused.append(number)
            self._owned[b] = []
            self.page_table[b] = 0
            self.lengths[b] = 0
            self._bound[b] = 0

    def gather(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys (L, G, D) and values (L, G, E) of one sequence, copied. Waits for the device."""
        place = torch.arange(int(self.lengths[b]), device=self.k.device)
        index = (self.page_table[b, place // self.page].long(), place % self.page)
        return self.k[index], self.v[index]

    def _reserve_for(self, n: int) -> None:
        self.reserve([bound + n for bound in self._bound])

    def _enter(self, b: int, start: int, pages: list[int]) -> None:
        row = torch.tensor(pages, dtype=torch.int32)
        self.page_table[b, start : start + len(pages)] = row.to(
            self.page_table.device, non_blocking=True
        )


class CacheView(KVCache):
    """Keys and values that somebody else keeps and appends to: an engine's pages, a framework's static cache.

    Nothing is copied, and nothing waits for the device.

    Args:
        k: (B, room, G, D), or (pages, page, G, D) with a page table; any strides.
        v: likewise, of head dim E.
        lengths: int32 (B,): how many keys each sequence holds.
        page_table: int32 (B, most): a sequence's pages in order; entries beyond its length may be anything.
        k_scale: fp32 (G,) or (B, G), what keys are multiplied by, where k is float8_e4m3fn.
        v_scale: likewise of v.

    Raises:
        InvalidInput: a shape, dtype or device is wrong; the message names it.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        page_table: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        for name, t in (("k", k), ("v", v)):
            if not isinstance(t, Tensor):
                raise InvalidInput(f"{name} is {_shown(t)}; expected a tensor")
        tables = {"lengths": (lengths, 1), "page_table": (page_table, 2)}
        for name, (table, rank) in tables.items():
            if table is None and rank == 2:
                continue
            form = "(batch,)" if rank == 1 else "(batch, most)"
            if (
                not isinstance(table, Tensor)
                or table.ndim != rank
                or table.dtype != torch.int32
                or table.device != k.device
            ):
                raise InvalidInput(
                    f"{name} is {_shown(table)}; expected {form} torch.int32 {k.device}"
                )
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise InvalidInput(
                f"v is {tuple(v.shape)}; expected the first three sizes of k {tuple(k.shape)}, of 4"
            )
        batch = k.shape[0] if page_table is None else page_table.shape[0]
        if lengths.shape[0] != batch:
            raise InvalidInput(f"lengths has {lengths.shape[0]} entries; expected {batch}")
        self.k, self.v, self.lengths, self.page_table = k, v, lengths, page_table
        self.room = k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]
        self._take_scales(k_scale, v_scale, (k.shape[2],), (batch, k.shape[2]))

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Refused: whoever keeps the cache appends to it.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput(
            "k_new is given; expected None: a CacheView belongs to another, who appends"
        )

    def free(self, sequences: Sequence[int] | None = None) -> None:
        """Refused, as `append`.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput(
            "free was called; expected a cache of one's own: a CacheView belongs to another"
        )

    def gather(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys (L, G, D) and values (L, G, E) of one sequence. Waits for the device."""
        n = int(self.lengths[b])
        if self.page_table is None:
            return self.k[b, :n], self.v[b, :n]
        page = self.k.shape[1]
        place = torch.arange(n, device=self.k.device)
        index = (self.page_table[b, place // page].long(), place % page)
        return self.k[index], self.v[index]


def host_reads(t: Tensor) -> bool:
    """Whether the host may look at a tensor's values: nothing waits for a device, and no graph depends on them."""
    return t.device.type == "cpu" and t.numel() > 0 and not torch.compiler.is_compiling()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device}"
    return repr(value)


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{name} is {value!r}; expected a positive int")
