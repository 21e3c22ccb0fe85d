"""Random batches in which every sequence must get the bits that it gets alone, however it is laid out and cut.

`test_batch_invariance.py` runs a few on the CPU, `benchmarks/batch_invariance.py` hundreds on any device.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import relampago as rl
from relampago.cache import KVCache, PagedKVCache

DIMS = ((16, 16), (40, 72), (64, 64), (128, 128))
GROUPS = ((1, 4), (2, 1), (2, 3), (4, 2))  # kv heads, query heads of each


@dataclass
class Sequence:
    """One sequence and what it gets alone."""

    q: Tensor  # (L, H, D)
    k: Tensor
    v: Tensor
    out: Tensor = field(default_factory=lambda: torch.empty(0))
    lse: Tensor = field(default_factory=lambda: torch.empty(0))  # (H, L)


@dataclass
class Batch:
    """One random problem."""

    seed: int
    longest: int
    dtypes: tuple[torch.dtype, ...]
    device: str = "cpu"
    backend: str | None = None
    more: dict[str, Any] = field(default_factory=dict)  # options that are not left to chance
    dims: tuple[tuple[int, int], ...] = DIMS
    groups: tuple[tuple[int, int], ...] = GROUPS
    options: dict[str, Any] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.random = random.Random(self.seed)
        g = torch.Generator().manual_seed(self.seed)
        (dim, dim_v), (kv, group) = r.choice(self.dims), r.choice(self.groups)
        self.dtype = r.choice(self.dtypes)
        loud = r.choice((1.0, 1.0, 8.0))  # 8: beyond the bound under which no maximum is kept
        window = r.choice((None, None, (r.randrange(1, 200), 0)))
        self.options = {
            "causal": True,
            "window": window,
            "batch_invariant": True,
            "backend": self.backend,
        }
        if r.random() < 0.3:
            self.options["sinks"] = torch.randn(kv * group, generator=g).to(self.device) * 9
        if r.random() < 0.3:
            self.options["softcap"] = 3.0
        self.options.update(self.more)
        lengths = [int(self.longest ** r.random()) for _ in range(r.randrange(1, 6))]
        lengths[r.randrange(len(lengths))] = r.randrange(1, self.longest + 1)
        for n in lengths:
            shapes = ((kv * group, dim), (kv, dim), (kv, dim_v))
            tensors = [
                torch.randn(n, *s, generator=g) * (loud if i < 2 else 1)
                for i, s in enumerate(shapes)
            ]
            self.sequences.append(Sequence(*(t.to(self.device, self.dtype) for t in tensors)))
        for s in self.sequences:
            out, lse = rl.attention(
                s.q[None], s.k[None], s.v[None], **self.options, return_lse=True
            )
            s.out, s.lse = out[0], lse[0]

    def __str__(self) -> str:
        (_, heads, dim), kv = self.sequences[0].q.shape, self.sequences[0].k.shape[1]
        lengths = [s.q.shape[0] for s in self.sequences]
        return (
            f"seed {self.seed}: {self.dtype} {lengths} heads {heads}/{kv} dim {dim} {self.options}"
        )

    def same(
        self, how: str, s: Sequence, out: Tensor, lse: Tensor, rows: slice = slice(None)
    ) -> None:
        """Assert that rows of a sequence got the bits they got alone."""
        assert torch.equal(out, s.out[rows]), f"out, {how}, {self}"
        assert torch.equal(lse, s.lse[:, rows]), f"LSE, {how}, {self}"

    def check(self) -> None:
        """Every layout and cut."""
        self.packed()
        self.padded()
        for paged in (False, True):
            self.chunked(paged)
        self.shared_prefix()

    def packed(self) -> None:
        """All in one packed tensor, in any order."""
        order = self.random.sample(self.sequences, len(self.sequences))
        lengths = [s.q.shape[0] for s in order]
        cu = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)
        q, k, v = (torch.cat([getattr(s, name) for s in order]) for name in "qkv")
        out, lse = rl.attention_varlen(
            q, k, v, cu, cu, max(lengths), max(lengths), **self.options, return_lse=True
        )
        start = 0
        for s, n in zip(order, lengths, strict=True):
            self.same("packed", s, out[start : start + n], lse[:, start : start + n])
            start += n

    def padded(self) -> None:
        """Side by side, filled up behind with other numbers, which causal masks hide."""
        most = max(s.q.shape[0] for s in self.sequences) + self.random.randrange(9)
        q, k, v = (self._filled([getattr(s, name) for s in self.sequences], most) for name in "qkv")
        out, lse = rl.attention(q, k, v, **self.options, return_lse=True)
        for b, s in enumerate(self.sequences):
            n = s.q.shape[0]
            self.same("padded", s, out[b, :n], lse[b, :, :n])

    def _filled(self, parts: list[Tensor], most: int) -> Tensor:
        return torch.stack(
            [torch.cat([t, t.new_ones(most - t.shape[0], *t.shape[1:])]) for t in parts]
        )

    def _cache(self, paged: bool, batch: int, room: int) -> KVCache:
        s = self.sequences[0]
        shape = (s.k.shape[1], s.k.shape[2], s.v.shape[2])
        if not paged:
            cache = KVCache(batch, room, *shape, dtype=self.dtype, device=self.device)
            cache.k.fill_(torch.nan)  # what is not filled is not read
            cache.v.fill_(torch.nan)
            return cache
        page = self.random.choice((8, 16, 33, 64))
        pages = -(-room // page)
        return PagedKVCache(
            batch, batch * pages, page, *shape, dtype=self.dtype, device=self.device
        )

    def chunked(self, paged: bool) -> None:
        """Through a cache: a chunk of each, then more, some of them one token long, until all are done."""
        lengths = [s.q.shape[0] for s in self.sequences]
        cache = self._cache(paged, len(lengths), max(lengths) + max(lengths))
        done = [0] * len(lengths)
        while any(a < n for a, n in zip(done, lengths, strict=True)):
            most = self.random.choice((1, 1, 3, max(lengths) // 2 + 1))
            counts = [min(most, n - a) for a, n in zip(done, lengths, strict=True)]
            if most == 1 and self.random.random() < 0.7:  # most of the tokens come in chunks
                done, most = self._step(cache, done, counts, 1), max(lengths) // 3 + 1
                counts = [min(most, n - a) for a, n in zip(done, lengths, strict=True)]
            done = self._step(cache, done, counts, max(counts))

    def _step(self, cache: KVCache, done: list[int], counts: list[int], rows: int) -> list[int]:
        if rows == 0:
            return done
        # each sequence's rows stand last: row i is at position lengths - rows + i
        parts = {name: [getattr(s, name)[a : a + n] for s, a, n in zip(self.sequences, done, counts, strict=True)]
                 for name in "qkv"}  # fmt: skip
        q = torch.stack(
            [torch.cat([t.new_ones(rows - t.shape[0], *t.shape[1:]), t]) for t in parts["q"]]
        )
        k, v = (self._filled(parts[name], rows) for name in "kv")
        out, lse = rl.attention_decode(
            q, cache, k, v, counts=torch.tensor(counts, dtype=torch.int32, device=self.device),
            **self.options, return_lse=True,
        )  # fmt: skip
        cache.bound([a + n for a, n in zip(done, counts, strict=True)])
        for b, (s, a, n) in enumerate(zip(self.sequences, done, counts, strict=True)):
            if n:
                self.same(
                    f"rows {a} to {a + n}",
                    s,
                    out[b, rows - n :],
                    lse[b, :, rows - n :],
                    slice(a, a + n),
                )
        return [a + n for a, n in zip(done, counts, strict=True)]

    def shared_prefix(self) -> None:
        """Two that begin alike: the second takes the first's pages, and only its rest is computed."""
        s = max(self.sequences, key=lambda s: s.q.shape[0])
        n = s.q.shape[0]
        if n < 2:
            return
        known = self.random.randrange(1, n)
        cache = self._cache(True, 2, n)
        first = [t[None, :known].expand(2, -1, -1, -1) for t in (s.q, s.k, s.v)]
        rl.attention_decode(
            first[0], cache, *first[1:],
            counts=torch.tensor([known, 0], dtype=torch.int32, device=self.device), **self.options,
        )  # fmt: skip
        cache.bound([known, 0])
        assert isinstance(cache, PagedKVCache)
        cache.fork(0, [1])
        rest = [t[None, known:].expand(2, -1, -1, -1) for t in (s.q, s.k, s.v)]
        out, lse = rl.attention_decode(rest[0], cache, *rest[1:], **self.options, return_lse=True)
        self.same("after a known prefix", s, out[1], lse[1], slice(known, n))
