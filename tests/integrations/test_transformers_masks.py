"""Masks of the Transformers integration: what a BandMask says is what Transformers would have written."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

from transformers import masking_utils as mu

from relampago.integrations.transformers import BandMask, attention_forward, mask_for

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2]])
PLACE = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0, 1]])


def within(function):
    remapped = mu.remap_positions_for_packed_sequence(function, PLACE)
    return mu.and_masks(remapped, mu.packed_sequence_mask_function(IDS))


FUNCTIONS = {
    "causal": mu.causal_mask_function,
    "window": mu.sliding_window_causal_mask_function(3),
    "all": mu.bidirectional_mask_function,
    "near": mu.sliding_window_bidirectional_mask_function(2),
    "packed": within(mu.causal_mask_function),
    "packed window": within(mu.sliding_window_causal_mask_function(2)),
    "packed, all": within(mu.bidirectional_mask_function),
    "chunks": mu.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)),
    "union": mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(IDS)),
}
SIZES = {"window": 3, "near": 2, "chunks": 3}
WRITTEN = ("chunks", "union")
PADDING = {
    "none": None,
    "left": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8]).bool(),
    "full": torch.ones(2, 8).bool(),
}
# rows, keys, first row's position, first key's position
PLACES = {
    "square": (8, 8, 0, 0),
    "chunk": (3, 8, 5, 0),
    "room": (5, 8, 0, 0),
    "middle": (3, 8, 2, 0),
    "slid": (3, 5, 5, 3),
    "one": (1, 8, 7, 0),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_attention_as_by_the_dense_mask(name, place, padding) -> None:
    rows, length, q_offset, kv_offset = PLACES[place]
    if "packed" in name and place != "square":
        pytest.skip("packed sequences come without a cache")
    words = {
        "batch_size": 2,
        "q_length": rows,
        "kv_length": length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[name],
        "attention_mask": PADDING[padding],
    }
    if name in SIZES:  # so Transformers calls the interface
        words["local_size"] = SIZES[name]
    words["allow_is_causal_skip"] = name in ("causal", "window", "chunks")
    dense = mu.sdpa_mask(**words | {"allow_is_causal_skip": False})
    causal = name not in ("all", "near", "packed, all")
    mask = mask_for(**words, allow_is_bidirectional_skip=not causal)
    g = torch.Generator().manual_seed(1)
    sizes = ((4, rows), (2, length), (2, length))
    q, k, v = (torch.randn(2, h, n, 8, generator=g, dtype=torch.float64) for h, n in sizes)
    layer = torch.nn.Module()
    got, _ = attention_forward(layer, q, k, v, mask, is_causal=causal)
    want, _ = attention_forward(layer, q, k, v, dense, is_causal=causal)
    torch.testing.assert_close(got, want)
    if name in WRITTEN or rows == 1:
        assert not isinstance(mask, BandMask)
    elif place in ("square", "chunk") and padding == "left":
        assert isinstance(mask, BandMask)
    if isinstance(mask, BandMask):
        assert mask.shape == dense.shape
        assert mask.dtype == torch.bool
        with torch._C.DisableTorchFunctionSubclass():
            assert mask.untyped_storage().nbytes() == 1


def test_a_band_mask_is_dense_as_soon_as_it_is_computed_with() -> None:
    words = {"batch_size": 2, "q_length": 8, "kv_length": 8, "attention_mask": PADDING["left"]}
    mask, dense = mask_for(**words), mu.sdpa_mask(**words)
    assert isinstance(mask, BandMask)
    changes = (
        lambda m: m[:, :, :, :5],
        lambda m: ~m,
        lambda m: m.to(torch.float32),
        lambda m: m & True,
        lambda m: torch.cat([m, m], -1),
        lambda m: m.clone(),
    )
    for change in changes:
        got = change(mask)
        assert type(got) is torch.Tensor
        assert torch.equal(got, change(dense))
    assert torch.equal(mask.dense(), dense)
    assert "BandMask((2, 1, 8, 8)" in repr(mask)


def test_no_mask_where_is_causal_says_it_all() -> None:
    for words in ({"q_length": 8, "kv_length": 8}, {"q_length": 5, "kv_length": 8}):
        assert mask_for(batch_size=1, **words) is None
        assert mask_for(batch_size=1, **words, attention_mask=torch.ones(1, 8).bool()) is None
    assert mask_for(batch_size=1, q_length=8, kv_length=8, allow_is_causal_skip=False) is not None
