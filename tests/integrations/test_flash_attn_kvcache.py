"""flash_attn_with_kvcache: wherever the cache lies, what is appended, turned and attended to; rotary and padding."""

from __future__ import annotations

import math

import pytest
import torch
from budget import check
from integrations.formula import attend, both, seen

from relampago import flash_attn as fa
from relampago.flash_attn import padding, rotary

B, H, G, D, ROOM = 3, 4, 2, 16, 32
LENGTHS = (5, 0, 20)


def angles(rows=ROOM, dims=D, dtype=torch.float32):
    turn = torch.rand(rows, dims // 2, generator=torch.Generator().manual_seed(9)) * 2 * math.pi
    return turn.cos().to(dtype), turn.sin().to(dtype)


def turned(x, cos, sin, positions, interleaved):
    """By complex numbers: another way to write the rotation."""
    dims = 2 * cos.shape[1]
    factor = torch.complex(cos.double(), sin.double())[positions][:, None]
    head, rest = x[..., :dims].double(), x[..., dims:]
    if interleaved:
        pairs = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous())
        out = torch.view_as_real(pairs * factor).flatten(-2)
    else:
        pairs = torch.complex(*head.chunk(2, -1)) * factor
        out = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([out.to(x.dtype), rest], -1)


class Cache:
    """A cache of one kind, poisoned where nothing may be read, and what each sequence really holds."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(2)
        self.words, self.kind = {}, kind
        self.start = [2, 0, 7] if kind == "leftpad" else [0] * B
        page = {"page8": 8, "page7": 7}.get(kind, ROOM)
        count = {"page8": 14, "page7": 16, "index": 5}.get(kind, B)
        self.k, self.v = (torch.full((count, page, G, D), torch.nan, dtype=dtype) for _ in range(2))
        self.page, most = page, -(-ROOM // page)
        if kind == "index":
            self.table = torch.tensor([[4], [0], [2]], dtype=torch.int32)
            self.words["cache_batch_idx"] = self.table[:, 0].contiguous()
        elif kind.startswith("page"):
            self.table = torch.randperm(count, generator=g)[: B * most].view(B, most).int()
            self.words["block_table"] = self.table
        else:
            self.table = torch.arange(B)[:, None]
        if kind == "leftpad":
            self.words["cache_leftpad"] = torch.tensor(self.start, dtype=torch.int32)
        self.lengths = [max(n, s) for n, s in zip(LENGTHS, self.start, strict=True)]
        for b, n in enumerate(self.lengths):
            for j in range(self.start[b], n):
                for t in (self.k, self.v):
                    t[self.at(b, j)] = torch.randn(G, D, generator=g).to(dtype)
        self.words["cache_seqlens"] = torch.tensor(self.lengths, dtype=torch.int32)

    def at(self, b, j):
        return int(self.table[b, j // self.page]), j % self.page

    def holds(self, b, end):
        places = [self.at(b, j) for j in range(self.start[b], end)]
        return tuple(torch.stack([t[p] for p in places]) if places else t[0, :0] for t in (self.k, self.v))  # fmt: skip


def new(n=3, dtype=torch.float32):
    g = torch.Generator().manual_seed(7)
    return tuple(torch.randn(B, n, h, D, generator=g).to(dtype) for h in (H, G, G))


KINDS = ["room", "index", "page8", "page7", "leftpad"]


@pytest.mark.parametrize("appends", [False, True], ids=["read", "append"])
@pytest.mark.parametrize("words", [
    {"causal": True}, {}, {"causal": True, "window_size": (4, 0)}, {"softcap": 2.0},
    {"causal": True, "attention_chunk": 4}, {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.5, H)},
], ids=["causal", "full", "window", "softcap", "chunk", "alibi"])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_the_cache_lies(kind, words, appends) -> None:
    cache = Cache(kind, torch.float32)
    q, k, v = new()
    fresh = {"k": k, "v": v} if appends else {}
    out, lse = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, **fresh, **cache.words, return_softmax_lse=True, num_splits=2, **words
    )
    mask = {"causal": words.get("causal", False), "chunk": words.get("attention_chunk", 0)}
    mask["left"] = words.get("window_size", (-1,))[0]
    rest = {"softcap": words.get("softcap", 0.0), "alibi": words.get("alibi_slopes")}
    for b, n in enumerate(cache.lengths):
        end = n + (3 if appends else 0)
        keys, values = cache.holds(b, end)
        if appends:
            assert torch.equal(keys[-3:], k[b])
            assert torch.equal(values[-3:], v[b])
        if not len(keys):
            assert (out[b] == 0).all()
            assert (lse[b] == -torch.inf).all()
            continue
        results = both(q[b], keys, values, seen(3, len(keys), **mask), dtype=torch.float32, **rest)
        check(kind, {"out": out[b], "lse": lse[b]}, *results, torch.float32)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("words", [{"causal": True}, {}, {"window_size": (3, 3)}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rotary(kind, words, interleaved) -> None:
    cache = Cache(kind, torch.float32)
    before = [t.clone() for t in (cache.k, cache.v)]
    q, k, v = new()
    cos, sin = angles(40, 8)
    out = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        **cache.words, **words,
    )  # fmt: skip
    left, right = words.get("window_size", (-1, -1))
    mask = {"causal": "causal" in words, "left": left, "right": right}
    for b, n in enumerate(cache.lengths):
        at = torch.arange(n, n + 3)
        keys, values = cache.holds(b, n + 3)
        torch.testing.assert_close(keys[-3:], turned(k[b], cos, sin, at, interleaved))
        assert torch.equal(values[-3:], v[b])
        query = turned(q[b], cos, sin, at if words else torch.full((3,), n), interleaved)
        want, _ = attend(query, keys, values, seen(3, len(keys), **mask))
        torch.testing.assert_close(out[b], want.float(), rtol=1e-5, atol=1e-5)
        for j in range(cache.start[b], n):
            for was, now in zip(before, (cache.k, cache.v), strict=True):
                assert torch.equal(was[cache.at(b, j)], now[cache.at(b, j)])


def test_an_int_for_all_and_none_for_the_whole_room() -> None:
    cache, (q, _, _) = Cache("room", torch.float32), new()
    cache.k.normal_()
    cache.v.normal_()
    for given, n in ((6, 6), (None, ROOM)):
        got = fa.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=given, causal=True)
        want = fa.flash_attn_func(q, cache.k[:, :n], cache.v[:, :n], causal=True)
        torch.testing.assert_close(got, want)


def test_packed_queries_and_packed_new_keys() -> None:
    """FlashAttention-3: cu_seqlens_q and cu_seqlens_k_new, a prompt beside single tokens."""
    cache = Cache("page8", torch.float32)
    g = torch.Generator().manual_seed(3)
    counts = torch.tensor([4, 0, 1])
    cu = torch.tensor([0, 4, 4, 5], dtype=torch.int32)
    q, k, v = (torch.randn(5, h, D, generator=g) for h in (H, G, G))
    cos, sin = angles(40)
    out, lse = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=4, causal=True,
        rotary_cos=cos, rotary_sin=sin, return_softmax_lse=True, **cache.words,
    )  # fmt: skip
    assert lse.shape == (H, 5)
    for b, n in enumerate(cache.lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        at = torch.arange(n, n + int(counts[b]))
        keys, values = cache.holds(b, n + int(counts[b]))
        if len(at):
            torch.testing.assert_close(keys[n:], turned(k[rows], cos, sin, at, True))
            query = turned(q[rows], cos, sin, at, True)
            want, _ = attend(query, keys, values, seen(len(at), len(keys), causal=True))
            torch.testing.assert_close(out[rows], want.float(), rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    cache, (q, k, v) = Cache("room", torch.float32), new()
    lengths = cache.words["cache_seqlens"]
    cos, sin = angles()
    kept = cache.k.clone()
    for words, message in (
        ({"k": k, "v": v}, "cache_seqlens is None"),
        ({"k": k, "cache_seqlens": lengths}, "v is missing"),
        ({"cache_seqlens": lengths.long()}, "cache_seqlens is"),
        ({"k": k, "v": v, "cache_seqlens": ROOM - 1}, "k needs 34 places; expected at most the 32"),
        ({"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lengths}, "k is None"),
        ({"k": k, "v": v, "rotary_cos": cos, "cache_seqlens": lengths}, "rotary_sin is None"),
        ({"k": k, "v": v, "rotary_cos": cos[:9], "rotary_sin": sin, "cache_seqlens": 3}, "rotary_cos is"),
        ({"k": k, "v": v, "cache_seqlens": -2}, "cache_seqlens is negative"),
        ({"k": k, "v": v, "cache_seqlens": 3, "cache_batch_idx": torch.full_like(lengths, 9)},
         "cache_batch_idx goes from 9 to 9; expected 0 to 2"),
        ({"k": k, "v": 3, "cache_seqlens": 3}, "v is a int; expected a tensor"),
        ({"cache_batch_idx": lengths.long()}, "cache_batch_idx is torch.int64"),
        ({"block_table": lengths[:, None], "cache_leftpad": lengths}, "cache_leftpad is given"),
        ({"block_table": lengths[:2, None]}, "block_table is"),
        ({"k": k[..., :8], "v": v, "cache_seqlens": 3}, r"k is \(3, 3, 2, 8\)"),
        ({"k": k, "v": v[..., :8], "cache_seqlens": 3}, r"v is \(3, 3, 2, 8\)"),
        ({"k": k[:1], "v": v[:1], "cache_seqlens": 3}, r"k is \(1, 3, 2, 16\) torch.float32; expected \(3, 3, 2, 16\)"),
        ({"k": k, "v": v[:, :2], "cache_seqlens": 3}, r"v is \(3, 2, 2, 16\)"),
        ({"k": k[0], "v": v[0], "cache_seqlens": 3}, r"k is \(3, 2, 16\)"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            fa.flash_attn_with_kvcache(q, cache.k, cache.v, **words)
    assert torch.equal(kept.nan_to_num(), cache.k.nan_to_num())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings(interleaved) -> None:
    x = torch.randn(B, 9, H, D, dtype=torch.float64, requires_grad=True)
    cos, sin = angles(40, 8, torch.float64)
    offsets = torch.tensor([0, 5, 11])
    got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    want = torch.stack(
        [turned(x[b], cos, sin, torch.arange(9) + offsets[b], interleaved) for b in range(B)]
    )
    torch.testing.assert_close(got, want)
    g = torch.randn_like(got)
    slope = torch.autograd.grad(want, x, g)
    torch.testing.assert_close(torch.autograd.grad(got, x, g), slope)
    cu = torch.tensor([0, 9, 18, 27], dtype=torch.int32)
    flat = rotary.apply_rotary_emb(
        x.flatten(0, 1), cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=9
    )
    torch.testing.assert_close(flat.view_as(got), got)
    torch.testing.assert_close(
        rotary.apply_rotary_emb_torch(x, cos[:9], sin[:9], interleaved),
        rotary.apply_rotary_emb(x, cos, sin, interleaved),
    )
    inplace = x.clone()
    back = rotary.apply_rotary_emb(inplace, cos, sin, interleaved, True, offsets)
    assert back.data_ptr() == inplace.data_ptr()
    torch.testing.assert_close(torch.autograd.grad(back, x, g), slope)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_module_turns_in_place(scale_base) -> None:
    module = rotary.RotaryEmbedding(D, scale_base=scale_base)
    heads = torch.randn(B, 9, H, D), torch.randn(B, 9, G, D), torch.randn(B, 9, G, D)
    joined = torch.cat(heads, 2)
    out = module(joined, seqlen_offset=4, num_heads_q=H)
    assert out is joined
    cos, sin, cos_k, sin_k = module._tables
    assert cos.shape == (13, D // 2)
    q, k, v = out.split([H, G, G], 2)
    for got, was, tables in ((q, heads[0], (cos, sin)), (k, heads[1], (cos_k, sin_k))):
        want = rotary.apply_rotary_emb(was, *tables, seqlen_offsets=4)
        torch.testing.assert_close(got, want)
    assert torch.equal(v, heads[2])
    apart, kv = module(heads[0].clone(), torch.stack(heads[1:], 2), seqlen_offset=4)
    torch.testing.assert_close((apart, kv[:, :, 0], kv[:, :, 1]), (q, k, v))
    qkv = torch.randn(B, 5, 3, H, D, requires_grad=True)
    module(qkv * 1).sum().backward()
    assert qkv.grad is not None
    ones = torch.ones(B, 5, H, D)
    back = [rotary.apply_rotary_emb(ones, c, -s) for c, s in ((cos, sin), (cos_k, sin_k))]
    torch.testing.assert_close(qkv.grad, torch.stack([*back, ones], 2))
    with pytest.raises(RuntimeError, match="qkv has 8 heads; expected num_heads_q = 7"):
        module(joined, num_heads_q=7)


def test_padding_there_and_back() -> None:
    x = torch.randn(B, 6, H, D, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 0]])
    tokens, indices, cu, longest, used = padding.unpad_input(x, mask)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 7, 9], 4, [3, 4, 2])
    assert cu.dtype == used.dtype == torch.int32
    assert torch.equal(tokens, x[mask.bool()])
    padded = padding.pad_input(tokens, indices, B, 6)
    assert torch.equal(padded, x * mask[..., None, None])
    assert torch.equal(torch.autograd.grad(padded.sum(), x)[0], torch.ones_like(x) * mask[..., None, None])  # fmt: skip
    _, _, cu, longest, used = padding.unpad_input(x, mask, 1 - mask)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 6, 12, 18], 6, [3, 4, 2])
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, _, cu, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert (cu.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    rows, whole = padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    assert whole.shape == (18, H, D)
    with pytest.raises(AssertionError):
        padding.index_first_axis(torch.zeros(3), indices)
