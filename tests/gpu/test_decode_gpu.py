"""Flash decoding on a card: the interpreter's suite, and caches that take splits by the plan's own choice."""

from __future__ import annotations

import pytest
import torch
from budget import check
from gpu.card import LENGTHS
from interpreter.decode_suite import (  # noqa: F401
    test_a_bias_of_the_least_number_keeps_its_weights,
    test_chunks_in_the_drop_in,
    test_dense_masks_and_biases,
    test_documents,
    test_keys_in_e4m3,
    test_keys_wherever_they_lie,
    test_more_rows_than_a_tile,
    test_options,
    test_packed_queries,
    test_views_of_a_fused_tensor,
)
from oracle import dense

import relampago as rl
from relampago.cache import KVCache, PagedKVCache

HEADS, KV = 8, 2


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_caches(dim: int, page: int | None, rows: int, device: str) -> None:
    dtype, lengths = torch.bfloat16, (LENGTHS[-1], rows, LENGTHS[0] + 3)
    kinds = {"dtype": dtype, "device": device}
    most = max(lengths)
    if page is None:
        cache = KVCache(3, most + 5, KV, dim, **kinds)
    else:
        cache = PagedKVCache(3, 3 * (most // page + 1), page, KV, dim, **kinds)
    q, k, v = (
        torch.randn(3, n, h, dim, **kinds) for n, h in ((rows, HEADS), (most, KV), (most, KV))
    )
    cache.append(k, v, torch.tensor(lengths, dtype=torch.int32, device=device))
    found = rl.attention_decode(q, cache, return_lse=True, backend="triton")
    for b, n in enumerate(lengths):
        alone = q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]
        standard, oracle = (
            dict(zip(("out", "lse"), dense(alone, {"causal": True}, t), strict=True))
            for t in (dtype, torch.float64)
        )
        got = {name: t[b : b + 1] for name, t in zip(("out", "lse"), found, strict=True)}
        check(f"sequence {b}", got, standard, oracle, dtype)
