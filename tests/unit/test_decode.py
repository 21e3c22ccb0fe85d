"""Caches and decoding: token by token, in pages, forked, freed, against attention over the whole."""

from __future__ import annotations

import pytest
import torch

import relampago as rl
from relampago.cache import CacheView, KVCache, PagedKVCache

B, G, H, D, E = 3, 2, 6, 16, 24


def tokens(n: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, h, d, generator=g) for h, d in ((H, D), (G, D), (G, E)))


def caches(room: int = 64):
    return [
        KVCache(B, room, G, D, E, dtype=torch.float32),
        PagedKVCache(B, 40, 8, G, D, E, dtype=torch.float32),
        PagedKVCache(B, 10 * B, 7, G, D, E, most=10, dtype=torch.float32),
    ]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {}, {"window": (5, 0)}, {"softcap": 3.0, "sinks": torch.randn(H)}, {"alibi_slopes": torch.rand(H)},
        {"causal": False},
    ],
    ids=["plain", "window", "softcap-sinks", "alibi", "full"],
)  # fmt: skip
def test_token_by_token_equals_the_whole(which, backend, options) -> None:
    q, k, v = tokens(40)
    cache = caches()[which]
    rl.attention_decode(q[:, :9], cache, k[:, :9], v[:, :9], backend=backend, **options)
    start = 9
    for step in (1, 1, 3, 1, 20, 5):
        part = slice(start, start + step)
        out, lse = rl.attention_decode(
            q[:, part], cache, k[:, part], v[:, part], return_lse=True, backend=backend, **options
        )
        end = start + step
        whole = {"causal": True, **options}
        want = rl.attention(
            q[:, part], k[:, :end], v[:, :end], return_lse=True, backend=backend, **whole
        )
        torch.testing.assert_close((out, lse), want)
        start = end


@pytest.mark.parametrize("which", range(3))
def test_lengths_per_sequence(which) -> None:
    q, k, v = tokens(30)
    cache = caches()[which]
    filled = [0] * B
    for counts in ([4, 0, 7], [0, 3, 7], [1, 1, 1], [7, 7, 0]):
        part = [slice(f, f + 7) for f in filled]
        new_k = torch.stack([k[b, part[b]] for b in range(B)])
        new_v = torch.stack([v[b, part[b]] for b in range(B)])
        cache.append(new_k, new_v, torch.tensor(counts, dtype=torch.int32))
        filled = [f + c for f, c in zip(filled, counts, strict=True)]
        out = rl.attention_decode(q[:, :1], cache)
        for b in range(B):
            got_k, got_v = cache.gather(b)
            assert torch.equal(got_k, k[b, : filled[b]])
            assert torch.equal(got_v, v[b, : filled[b]])
            want = rl.attention(
                q[b : b + 1, :1], k[b : b + 1, : filled[b]], v[b : b + 1, : filled[b]]
            )
            torch.testing.assert_close(out[b : b + 1], want)


def test_an_empty_cache_gives_zero() -> None:
    q, _, _ = tokens(2)
    for cache in caches():
        out, lse = rl.attention_decode(q, cache, return_lse=True)
        assert out.abs().max() == 0
        assert (lse == -torch.inf).all()


def test_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    _, k, v = tokens(30)
    cache = PagedKVCache(B, 12, 8, G, D, E, dtype=torch.float32)
    cache.append(k[:, :21], v[:, :21], torch.tensor([21, 3, 0], dtype=torch.int32))
    before = cache.free_pages
    cache.fork(0, [1, 2])
    assert cache.page_table[0, :2].tolist() == cache.page_table[1, :2].tolist()
    assert len({int(cache.page_table[b, 2]) for b in range(B)}) == 3
    cache.append(k[:, 21:24], v[:, 21:24] * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1))
    for b in range(B):
        got_k, got_v = cache.gather(b)
        assert torch.equal(got_k[:21], k[0, :21])
        assert torch.equal(got_v[21:], v[b, 21:24] * (b + 1))
    cache.free([0])
    assert torch.equal(cache.gather(1)[0][:21], k[0, :21])
    cache.free()
    assert cache.free_pages == 12
    assert before <= 12


def test_a_full_cache_refuses_and_writes_nothing() -> None:
    _, k, v = tokens(70)
    cache = KVCache(B, 64, G, D, E, dtype=torch.float32)
    cache.append(k[:, :60], v[:, :60])
    with pytest.raises(rl.InvalidInput, match="k has 5 tokens; expected at most 4: the room is 64"):
        cache.append(k[:, 60:65], v[:, 60:65])
    assert cache.lengths.tolist() == [60] * B
    paged = PagedKVCache(B, 5, 8, G, D, E, dtype=torch.float32)
    with pytest.raises(
        rl.InvalidInput, match="tokens needs 6 more pages; expected at most the 5 unused"
    ):
        paged.append(k[:, :9], v[:, :9])
    assert paged.free_pages == 5
    narrow = PagedKVCache(B, 50, 8, G, D, E, most=2, dtype=torch.float32)
    with pytest.raises(
        rl.InvalidInput, match="tokens is 17; expected at most 16, the room of one sequence"
    ):
        narrow.reserve(17)


def test_bad_input() -> None:
    q, k, v = tokens(4)
    cache = KVCache(B, 8, G, D, E, dtype=torch.float32)
    for arguments, words in (
        ((q, "cache"), "cache is a str; expected a KVCache or PagedKVCache"),
        ((q, cache, k), "v_new is given without k_new"),
        ((q[:2], cache), "cache holds 3 sequences; expected 2, as q"),
        (
            (q, cache, k[..., :8], v),
            r"k is \(3, 4, 2, 8\) torch.float32 cpu; expected \(3, n, 2, 16\)",
        ),
    ):
        with pytest.raises(rl.InvalidInput, match=words):
            rl.attention_decode(*arguments)
    with pytest.raises(rl.InvalidInput, match="options hold a bias"):
        rl.attention_decode(q, cache, bias=torch.zeros(1))
    with pytest.raises(rl.InvalidInput, match="mask gives tables per row"):
        rl.attention_decode(q, cache, mask=rl.Document(torch.tensor([0])))
    many, few = (torch.full((B,), n, dtype=torch.int32) for n in (5, -1))
    for counts, words in (
        (torch.tensor([1, 2]), "counts is"), ([1, 2, 3], r"counts is \[1, 2, 3\]; expected \(3,\)"),
        (many, r"counts is \[5, 5, 5\]; expected 0 to 4"), (few, r"counts is \[-1, -1, -1\]"),
    ):  # fmt: skip
        with pytest.raises(rl.InvalidInput, match=words):
            cache.append(k, v, counts)
    for new, words in (((3, v), r"k is 3; expected \(3, n"), ((k, [1]), r"v is \[1\]; expected")):
        with pytest.raises(rl.InvalidInput, match=words):
            rl.attention_decode(q, cache, *new)
    with pytest.raises(rl.InvalidInput, match="q is a NoneType"):
        rl.attention_decode(None, cache)
    with pytest.raises(rl.InvalidInput, match="room is 0; expected a positive int"):
        KVCache(1, 0, 1, 1)
    assert cache.lengths.tolist() == [0] * B


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_view_beyond_its_cache(backend) -> None:
    """Values are read on a CPU only: there in each call, also in one that is like an earlier."""
    q, k, v = tokens(8)
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    lengths = torch.tensor([3, 8, 0], dtype=torch.int32)
    rl.attention_decode(q[:, :1], CacheView(k, v, lengths, table), backend=backend)
    for n, page, words in (
        (9, 2, "lengths are .*; expected 0 to the room of 8"), (-1, 2, "lengths are"),
        (8, 3, "page table has pages beyond 0 to 2"), (8, -1, "page table has pages"),
    ):  # fmt: skip
        lengths[1], table[1, 0] = n, page
        with pytest.raises(rl.InvalidInput, match=words):
            rl.attention_decode(q[:, :1], CacheView(k, v, lengths, table), backend=backend)
    lengths[1], lengths[2], table[1, 0], table[2, 0] = 8, 0, 1, -1  # no token, no page
    rl.attention_decode(q[:, :1], CacheView(k, v, lengths, table), backend=backend)
    with pytest.raises(rl.InvalidInput, match="lengths is None; expected"):
        CacheView(k, v, None)
    with pytest.raises(rl.InvalidInput, match="k is 3; expected a tensor"):
        CacheView(3, v, lengths)


def packed(counts: list[int]):
    """Queries of so many rows each, packed, with where each sequence's rows begin."""
    q = torch.randn(sum(counts), H, D, generator=torch.Generator().manual_seed(5))
    return q, torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "options",
    [{}, {"window": (5, 0)}, {"softcap": 3.0, "sinks": torch.randn(H)}],
    ids=["plain", "window", "sinks"],
)
def test_packed_queries_of_prompts_and_single_tokens(which, backend, options) -> None:
    _, k, v = tokens(30)
    cache = caches()[which]
    cache.append(k, v, torch.tensor([30, 7, 12], dtype=torch.int32))
    q, cu = packed([1, 7, 4])
    out, lse = rl.attention_decode(
        q, cache, cu_seqlens_q=cu, max_seqlen_q=7, return_lse=True, backend=backend, **options
    )
    for b, n in enumerate((30, 7, 12)):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        want, want_lse = rl.attention(
            q[None, rows], k[b : b + 1, :n], v[b : b + 1, :n], causal=True, return_lse=True, backend=backend, **options
        )  # fmt: skip
        torch.testing.assert_close((out[rows], lse[:, rows]), (want[0], want_lse[0]))


@pytest.mark.parametrize("which", range(3))
def test_a_view_of_anothers_cache(which) -> None:
    q, k, v = tokens(12)
    cache = caches()[which]
    cache.append(k, v, torch.tensor([12, 3, 0], dtype=torch.int32))
    view = CacheView(cache.k, cache.v, cache.lengths, cache.page_table)
    torch.testing.assert_close(
        rl.attention_decode(q[:, :2], view), rl.attention_decode(q[:, :2], cache)
    )
    for b in range(B):
        torch.testing.assert_close(view.gather(b), cache.gather(b))
    with pytest.raises(rl.InvalidInput, match="k_new is given; expected None"):
        rl.attention_decode(q[:, :1], view, k[:, :1], v[:, :1])
    with pytest.raises(rl.InvalidInput, match="free was called"):
        view.free()


def test_bad_views_and_packings() -> None:
    q, k, v = tokens(4)
    lengths = torch.full((B,), 4, dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    for arguments, words in (
        (
            (k, v, lengths.long()),
            r"lengths is \(3,\) torch.int64 cpu; expected \(batch,\) torch.int32",
        ),
        ((k, v, lengths, table[0]), "page_table is"),
        ((k, v[:, :3], lengths), "v is"),
        ((k, v, lengths, table), "lengths has 3 entries; expected 2"),
    ):
        with pytest.raises(rl.InvalidInput, match=words):
            CacheView(*arguments)
    view = CacheView(k, v, lengths)
    rows, cu = packed([1, 2, 1])
    with pytest.raises(rl.InvalidInput, match="max_seqlen_q is given without cu_seqlens_q"):
        rl.attention_decode(rows, view, cu_seqlens_q=cu)
    with pytest.raises(rl.InvalidInput, match="q has 4 dimensions; expected 3"):
        rl.attention_decode(q, view, cu_seqlens_q=cu, max_seqlen_q=2)
    with pytest.raises(rl.InvalidInput, match="max_seqlen_q is 1; expected at least 2"):
        rl.attention_decode(rows, view, cu_seqlens_q=cu, max_seqlen_q=1)
    with pytest.raises(rl.InvalidInput, match="cache holds 3 sequences; expected 2"):
        rl.attention_decode(rows, view, cu_seqlens_q=cu[:3], max_seqlen_q=2)


def test_under_torch_compile() -> None:
    """In one graph, with a cache from outside."""
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)
    cache = CacheView(k, v, torch.tensor([20, 9], dtype=torch.int32))

    def step(q: torch.Tensor) -> torch.Tensor:
        return rl.attention_decode(q, cache, window=(5, 0))

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), step(q))
