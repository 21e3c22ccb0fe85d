"""Dropout is a pure function of seed and place, with the right rate and no visible pattern."""

from __future__ import annotations

import pytest
import torch

import relampago as rl
from relampago import dropout


def kept(p: float, seed: int = 1, heads: int = 2, rows: int = 300, keys: int = 500) -> torch.Tensor:
    return dropout.kept(
        torch.tensor(seed),
        torch.arange(heads).view(-1, 1, 1),
        torch.arange(rows).view(1, -1, 1),
        torch.arange(keys).view(1, 1, -1),
        p,
    )


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_rate(p) -> None:
    keep = kept(p)
    deviation = (p * (1 - p) / keep.numel()) ** 0.5
    assert abs(keep.double().mean().item() - (1 - p)) <= 5 * deviation


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_neighbours_are_independent(dim) -> None:
    keep = kept(0.5).double() - 0.5
    n = keep.shape[dim] - 1
    product = keep.narrow(dim, 0, n) * keep.narrow(dim, 1, n)
    assert product.mean().abs() <= 5 * 0.25 / product.numel() ** 0.5
    along = keep.mean(dim)
    assert along.std() <= 1.2 * 0.5 / keep.shape[dim] ** 0.5


def test_seeds_streams_and_high_words_differ() -> None:
    base = kept(0.5)
    for other in (kept(0.5, seed=2), kept(0.5, seed=1 + 2**32), kept(0.5, seed=-1)):
        agree = (base == other).double().mean().item()
        assert abs(agree - 0.5) < 0.01
    assert abs((base[0] == base[1]).double().mean().item() - 0.5) < 0.01


def test_whatever_the_backend_the_same_weights_fall() -> None:
    q, k = torch.zeros(1, 40, 2, 8), torch.zeros(1, 50, 2, 8)
    v = torch.eye(50)[None, :, None].expand(1, 50, 2, 50)
    cpu = rl.attention(q, k, v, dropout_p=0.5, dropout_seed=11, backend="cpu")
    reference = rl.attention(q, k, v, dropout_p=0.5, dropout_seed=11, backend="reference")
    assert torch.equal(cpu > 0, reference > 0)
    torch.testing.assert_close(cpu.sum(-1).mean(), torch.tensor(1.0), rtol=0.05, atol=0)


def test_unseeded_calls_differ_and_follow_manual_seed() -> None:
    q = torch.randn(1, 30, 2, 8)
    torch.manual_seed(4)
    a, b = (rl.attention(q, q, q, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(4)
    c = rl.attention(q, q, q, dropout_p=0.3)
    assert not torch.equal(a, b)
    assert torch.equal(a, c)
