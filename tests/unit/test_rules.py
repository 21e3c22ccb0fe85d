"""Skipping and masking cannot disagree: every range against `visible`, by brute force."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relampago.masks.rules import full_range, key_range, query_range, run_of, visible

side = st.none() | st.integers(0, 30)
bands = st.tuples(st.integers(-30, 30), side, side, st.none() | st.integers(0, 30))


def grid(len_q: int, len_k: int, band) -> torch.Tensor:
    q, k = torch.arange(len_q)[:, None], torch.arange(len_k)[None]
    return visible(q, k, *band) & torch.ones(len_q, len_k, dtype=torch.bool)


@settings(max_examples=500, deadline=None)
@given(bands, st.integers(1, 25), st.integers(1, 25), st.data())
def test_ranges(band, len_q, len_k, data) -> None:
    seen = grid(len_q, len_k, band)
    first = data.draw(st.integers(0, len_q - 1))
    last = data.draw(st.integers(first, len_q - 1))
    start, end = key_range(first, last, len_k, *band)
    outside = torch.ones(len_k, dtype=torch.bool)
    outside[max(start, 0) : max(end, 0)] = False
    if band[1] is None or band[3] is None:  # a left bound holds inside the prefix, too
        assert not seen[first : last + 1, outside].any(), "key_range misses a visible key"
    full_start, full_end = full_range(first, last, len_k, *band)
    assert seen[first : last + 1, max(full_start, 0) : max(full_end, 0)].all()
    k_first = data.draw(st.integers(0, len_k - 1))
    k_last = data.draw(st.integers(k_first, len_k - 1))
    start, end = query_range(k_first, k_last, len_q, *band)
    outside = torch.ones(len_q, dtype=torch.bool)
    outside[max(start, 0) : max(end, 0)] = False
    assert not seen[outside][:, k_first : k_last + 1].any(), "query_range misses a row"


@settings(max_examples=200, deadline=None)
@given(bands, st.integers(1, 20), st.integers(1, 20), st.integers(0, 19))
def test_key_range_is_tight_for_one_row(band, len_q, len_k, row) -> None:
    row %= len_q
    seen = grid(len_q, len_k, band)[row].nonzero().flatten()
    start, end = key_range(row, row, len_k, *band)
    if seen.numel():
        assert start <= int(seen[0])
        assert end == int(seen[-1]) + 1
        if band[3] is None:
            assert start == int(seen[0])
    else:
        assert band[3] is not None or start >= end


@settings(max_examples=200, deadline=None)
@given(bands, st.integers(1, 25), st.integers(1, 25))
def test_what_a_row_sees_is_one_run(band, len_q, len_k) -> None:
    start, end = run_of(torch.arange(len_q)[:, None], len_k, *band)
    keys = torch.arange(len_k)[None]
    assert torch.equal((keys >= start) & (keys < end), grid(len_q, len_k, band))
