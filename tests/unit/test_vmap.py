"""torch.vmap: samples join the batch, or go one by one; what they share may have a batch of its own."""

from __future__ import annotations

import pytest
import torch

import relampago as rl
from relampago import flash_attn as fa
from relampago.cache import KVCache, PagedKVCache
from relampago.mods import relative_bias, softcap


def make(batch=2, length=24):
    return tuple(torch.randn(batch, length, heads, 16) for heads in (4, 2, 2))


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (None, 2, 2)], ids=str)
def test_samples_join_the_batch(dims) -> None:
    q, k, v = make()
    stacked = tuple(
        t if d is None else torch.stack([t, t + 1, t * 2], d)
        for t, d in zip((q, k, v), dims, strict=True)
    )
    got = torch.func.vmap(lambda q, k, v: rl.attention(q, k, v, causal=True), dims)(*stacked)
    for i in range(3):
        one = (t if d is None else t.select(d, i) for t, d in zip(stacked, dims, strict=True))
        torch.testing.assert_close(got[i], rl.attention(*one, causal=True))


def test_bias_and_gradients_per_sample() -> None:
    q, k, v = make(batch=1)
    samples = torch.stack([q, q + 1, q * 2])
    bias = torch.randn(3, 4, 24, 24)

    def loss(q, bias):
        return rl.attention(q, k, v, bias=bias).square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(samples, bias)
    for i in range(3):
        want = torch.func.grad(loss, argnums=(0, 1))(samples[i], bias[i])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b)


def one_by_one(fn, *samples):
    return torch.stack([fn(*sample) for sample in zip(*samples, strict=True)])


SHARED = {
    "slopes": {"alibi_slopes": torch.rand(2, 4)},
    "slopes for all": {"alibi_slopes": torch.rand(4)},
    "relative bias": {"score_mod": relative_bias(torch.rand(2, 4, 9))},
    "places": {"score_mod": relative_bias(torch.rand(9), torch.randint(0, 9, (2, 24)))},
    "mods": {"score_mod": [relative_bias(torch.rand(2, 4, 9)), softcap(3.0)], "alibi_slopes": torch.rand(2, 4)},
    "blocks": {"mask": rl.BlockSparse.from_mask(torch.rand(2, 4, 24, 24) > 0.3, block=(8, 8))},
    "function": {"mask": lambda b, h, q, k: (q + k + b) % 3 > 0},
    "bias": {"bias": torch.rand(2, 4, 24, 24)},
    "sinks": {"sinks": torch.rand(4)},
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_samples_share_may_differ_by_sequence(name) -> None:
    q, k, v = make()
    samples = torch.stack([q, q + 1, q * 2])

    def fn(q):
        return rl.attention(q, k, v, **SHARED[name])

    torch.testing.assert_close(torch.func.vmap(fn)(samples), one_by_one(fn, samples))
    grad = torch.func.grad(lambda q: fn(q).sin().sum())
    torch.testing.assert_close(torch.func.vmap(grad)(samples), one_by_one(grad, samples))


def held(cache):
    cache.append(*make()[1:])
    return cache


def flash_attns_cache():
    _, k, v = make()
    return lambda q: fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=5)


def packed_sequences():
    _, k, v = (t.flatten(0, 1) for t in make())
    cu = torch.tensor([0, 20, 48], dtype=torch.int32)
    return lambda q: rl.attention_varlen(q.flatten(0, 1), k, v, cu, cu, 28, 28)


def decoding(cache):
    return lambda q: rl.attention_decode(q, cache)


SINGLE = {
    "room": lambda: decoding(held(KVCache(2, 32, 2, 16, dtype=torch.float32))),
    "pages": lambda: decoding(held(PagedKVCache(2, 20, 4, 2, 16, dtype=torch.float32))),
    "flash-attn's cache": flash_attns_cache,
    "packed": packed_sequences,
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_by_one(name) -> None:
    fn, (q, _, _) = SINGLE[name](), make()
    samples = torch.stack([q, q + 1, q * 2])
    torch.testing.assert_close(torch.func.vmap(fn)(samples), one_by_one(fn, samples))


@pytest.mark.parametrize("option", ["sinks", "alibi_slopes"])
def test_one_by_one_where_what_has_no_batch_is_mapped(option) -> None:
    q, k, v = make()
    samples, values = torch.stack([q, q + 1, q * 2]), torch.randn(3, 4)

    def fn(q, value):
        return rl.attention(q, k, v, **{option: value})

    got = torch.func.vmap(fn)(samples, values)
    torch.testing.assert_close(got, one_by_one(fn, samples, values))
    with pytest.raises(NotImplementedError, match="vmap over"):
        torch.func.vmap(
            lambda s: rl.attention(q, k, v, dropout_p=0.1, dropout_seed=1, **{option: s})
        )(values)
