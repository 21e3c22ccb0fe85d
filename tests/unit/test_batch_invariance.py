"""Batch invariance on the CPU: same bits in any company, the tried shapes and the canonical one, and its switches."""

from __future__ import annotations

import itertools

import pytest
import torch
from unit.invariance import Batch

import relampago as rl
from relampago.backends.cpu import shapes

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("seed", range(7))
def test_a_sequence_has_the_bits_it_has_alone(seed) -> None:
    Batch(seed, longest=300, dtypes=DTYPES, backend="cpu").check()


@pytest.mark.parametrize("seed", range(100, 103))
def test_where_no_smaller_shape_agrees(seed, monkeypatch) -> None:
    """Every product takes the canonical shape, each row in its own slot."""
    monkeypatch.setattr(shapes, "agrees", lambda *_: False)
    Batch(seed, longest=60, dtypes=(torch.float32,), backend="cpu").check()


def test_tried_shapes_give_what_the_canonical_ones_give(monkeypatch) -> None:
    q, k, v = (
        torch.randn(1, 300, 4, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    want = gradients(q, k, v)
    monkeypatch.setattr(shapes, "agrees", lambda *_: False)
    for a, b in zip(gradients(q, k, v), want, strict=True):
        assert torch.equal(a, b)


def gradients(*tensors: torch.Tensor, cu: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Out, LSE, dq, dk and dv."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    options = {
        "causal": True,
        "softcap": 5.0,
        "batch_invariant": True,
        "return_lse": True,
        "backend": "cpu",
    }
    if cu is None:
        out, lse = rl.attention(*leaves, **options)
    else:
        most = int(cu.diff().max())
        out, lse = rl.attention_varlen(*leaves, cu, cu, most, most, **options)
    return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_alone_in_a_batch_and_packed(dtype) -> None:
    g = torch.Generator().manual_seed(0)
    lengths, heads = (37, 530, 1), ((4, 64), (2, 64), (2, 64))
    parts = [[torch.randn(n, *s, generator=g).to(dtype) for s in heads] for n in lengths]
    alone = [gradients(*(t[None] for t in part)) for part in parts]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = gradients(*(torch.cat(ts) for ts in zip(*parts, strict=True)), cu=cu)
    twice = gradients(*(torch.stack([torch.randn_like(t), t]) for t in parts[1]))
    for b, (start, end) in enumerate(itertools.pairwise(cu)):
        for i, (got, want) in enumerate(zip(packed, alone[b], strict=True)):
            assert torch.equal(got[:, start:end] if i == 1 else got[start:end], want[0])
    for got, want in zip(twice, alone[1], strict=True):
        assert torch.equal(got[1], want[0])


def test_number_of_threads_does_not_matter() -> None:
    q, k, v = (
        torch.randn(1, 200, 6, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    want = gradients(q, k, v)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        got = gradients(q, k, v)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_switches() -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))

    def asked(**options) -> bool:
        return "batch invariance" in str(rl.explain(q, k, v, **options))

    assert asked(batch_invariant=True)
    assert not asked()
    with rl.using(batch_invariant=True):
        assert asked()
        assert not asked(batch_invariant=False)
        with rl.using(batch_invariant=False):
            assert not asked()
        with rl.using(backend="cpu"):
            assert asked()
    before = rl.set_batch_invariant(True)
    try:
        assert asked()
        with rl.using(batch_invariant=False):
            assert not asked()
    finally:
        assert rl.set_batch_invariant(before) is True
    assert not asked()


def test_refusals_say_why() -> None:
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    with pytest.raises(rl.Unsupported, match="place in the batch"):
        rl.attention(q, k, v, dropout_p=0.1, batch_invariant=True)
    with pytest.raises(rl.Unsupported, match="rounding depends on their sizes"):
        rl.attention(q, k, v, batch_invariant=True, backend="reference")
    sparse = rl.BlockSparse.from_tiles(
        torch.ones(1, 1, 2, 2, dtype=torch.bool), shape=(32, 32), block=(16, 16)
    )
    with pytest.raises(rl.Unsupported, match="BlockSparse's lists"):
        rl.attention(q, k, v, mask=sparse, batch_invariant=True)
