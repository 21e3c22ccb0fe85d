"""What a user writes, against the pairs it should mean, in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relampago as rl
from relampago.masks.blocks import FULL
from relampago.masks.spec import Extent, resolve

L = 24


def seen_by(mask, len_q: int = L, len_k: int = L, batch: int = 1) -> torch.Tensor:
    """Which pairs attention really sees: with values that are one-hot, out is the weights."""
    q = torch.zeros(batch, len_q, 1, 1)
    k = torch.zeros(batch, len_k, 1, 1)
    v = torch.eye(len_k).expand(batch, len_k, len_k)[:, :, None]
    return rl.attention(q, k, v, mask=mask)[:, :, 0] > 0


def expect(rule, len_q: int = L, len_k: int = L) -> torch.Tensor:
    offset = len_k - len_q
    return torch.tensor([[rule(row + offset, key) for key in range(len_k)] for row in range(len_q)])


def doc(starts):
    return lambda p: sum(1 for s in starts if s <= p)


RULES = [
    (rl.Causal(), lambda p, k: k <= p),
    (rl.Window(3, 2), lambda p, k: p - 3 <= k <= p + 2),
    (rl.Window(None, 2), lambda p, k: k <= p + 2),
    (rl.Causal() & rl.Window(4, 9), lambda p, k: p - 4 <= k <= p),
    (rl.Prefix(7), lambda p, k: k <= p or k < 7),
    (rl.Prefix(7) & rl.Window(3, None), lambda p, k: (k <= p or k < 7) and p - 3 <= k),
    (rl.Prefix(9) & rl.Causal(), lambda p, k: k <= p),
    (
        rl.Document(torch.tensor([0, 5, 6, 15])),
        lambda p, k: doc([0, 5, 6, 15])(p) == doc([0, 5, 6, 15])(k),
    ),
    (
        rl.Causal() & rl.Document(torch.tensor([2, 9])),
        lambda p, k: k <= p and doc([2, 9])(p) == doc([2, 9])(k) > 0,
    ),
    ((lambda b, h, q, k: (q + k) % 2 == 0), lambda p, k: (p + k) % 2 == 0),
    (rl.Causal() & (lambda b, h, q, k: (q + k) % 2 == 0), lambda p, k: k <= p and (p + k) % 2 == 0),
]


@pytest.mark.parametrize("lengths", [(L, L), (10, L), (L, 10)], ids=str)
@pytest.mark.parametrize("number", range(len(RULES)))
def test_meaning(number, lengths) -> None:
    mask, rule = RULES[number]
    assert torch.equal(seen_by(mask, *lengths)[0], expect(rule, *lengths))


def test_document_ids_are_runs() -> None:
    ids = torch.tensor([[3, 3, 3, 1, 1, 8, 8, 8], [1, 2, 2, 2, 2, 2, 2, 1]])
    got = seen_by(rl.Document.from_ids(ids), 8, 8, batch=2)
    assert torch.equal(got[0], ids[0][:, None] == ids[0][None])
    same = ids[1][:, None] == ids[1][None]
    same[0, 7] = same[7, 0] = False  # the id comes back, the run does not
    assert torch.equal(got[1], same)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([4, 8, 16]),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_block_sparse_round_trip(len_q, len_k, block, density, seed) -> None:
    dense = torch.rand(2, 3, len_q, len_k, generator=torch.Generator().manual_seed(seed)) < density
    sparse = rl.BlockSparse.from_mask(dense, block=(block, block))
    q = torch.zeros(2, len_q, 3, 1)
    k = torch.zeros(2, len_k, 3, 1)
    v = torch.eye(len_k)[None, :, None].expand(2, len_k, 3, len_k)
    got = rl.attention(q, k, v, mask=sparse) > 0  # [B, Lq, H, Lk]
    assert torch.equal(got.transpose(1, 2), dense)


def test_block_sparse_lists_agree_both_ways() -> None:
    dense = torch.rand(1, 2, 50, 70) < 0.1
    blocks = rl.BlockSparse.from_mask(dense, block=(8, 16)).blocks
    by_query = {
        (h, i, int(blocks.index[0, h, i, n]), int(blocks.pattern[0, h, i, n]))
        for h in range(2)
        for i in range(7)
        for n in range(int(blocks.count[0, h, i]))
    }
    by_key = {
        (h, int(blocks.q_index[0, h, j, n]), j, int(blocks.q_pattern[0, h, j, n]))
        for h in range(2)
        for j in range(5)
        for n in range(int(blocks.q_count[0, h, j]))
    }
    assert by_query == by_key
    assert any(pattern != FULL for *_, pattern in by_query)


def test_a_function_that_ignores_batch_and_heads_costs_nothing_for_them() -> None:
    sparse = rl.BlockSparse.from_function(
        lambda b, h, q, k: k <= q, batch=5, heads=7, len_q=300, len_k=300
    )
    assert sparse.blocks.count.shape[:2] == (1, 1)
    assert sparse.blocks.tiles.shape[0] == 3  # the diagonal


def test_bands_stay_numbers() -> None:
    """No table is made where two numbers do."""
    extent = Extent(2, 4, 64, 64, 0, torch.device("cpu"))
    for mask in (rl.Causal(), rl.Window(3, 4), rl.Causal() & rl.Window(5, 5), rl.Prefix(9)):
        resolved = resolve(mask, extent)
        assert resolved.row_start is None
        assert resolved.blocks is None


def test_and_is_associative_in_meaning() -> None:
    a, b, c = rl.Causal(), rl.Window(9, 1), rl.Document(torch.tensor([0, 11]))
    assert torch.equal(seen_by((a & b) & c), seen_by(a & (b & c)))
    assert torch.equal(seen_by(a & b & c), seen_by(c & b & a))
