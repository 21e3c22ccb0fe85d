"""FP8 on a card: products by Hopper's kernel, fused casts, and caches in e4m3 that Triton decodes from."""

from __future__ import annotations

import pytest
from gpu.card import HOPPER, LENGTHS, PRESENT, sized
from interpreter.quant_suite import test_columns, test_rows  # noqa: F401
from unit import test_fp8 as emulated
from unit import test_fp8_cache as caches

from relampago.cache import KVCache, PagedKVCache
from relampago.cases import Case, find

PRODUCTS = "gluon_sm90" if HOPPER else "cpu"  # whose FP8 products are judged
needs_products = pytest.mark.skipif(PRESENT and not HOPPER, reason="FP8 products need sm90")


@needs_products
@pytest.mark.parametrize("name", emulated.CASES)
def test_every_case_or_a_refusal(name: str, device: str) -> None:
    """The kernel beside the formula with the same roundings, on the same card."""
    emulated.judge(PRODUCTS, find(name), device)


@needs_products
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("length", LENGTHS)
def test_several_tiles(length: int, dim: int, causal: bool, device: str) -> None:
    assert emulated.judge(PRODUCTS, sized(length, dim, causal=causal), device)


@needs_products
def test_packed_sequences_of_several_tiles(device: str) -> None:
    lengths = (300, 1, 0, LENGTHS[-1], 128)
    case = Case(
        name="packed", len_q=lengths, len_k=lengths, kv_heads=2, dim=128, options={"causal": True}
    )
    assert emulated.judge(PRODUCTS, case, device)


@needs_products
def test_gradients_are_those_without_fp8(device: str) -> None:
    emulated.test_gradients_are_those_without_fp8(PRODUCTS, device)


@pytest.mark.parametrize("counts", [(37, 1, 50), (LENGTHS[-1], 1, 300)], ids=["short", "long"])
@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_keys_in_e4m3(kind: type, counts: tuple[int, ...], device: str) -> None:
    caches.decode(kind, counts, False, "triton", device)
