"""Batch invariance of the Triton kernels on tiny problems, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
from budget import check
from interpreter.decode_suite import OPTIONS, arrays
from interpreter.small import small
from interpreter.suite import agree
from unit.invariance import Batch

import relampago as rl
from relampago.backends.reference import attend
from relampago.backends.triton import invariant
from relampago.errors import InvalidInput
from relampago.plan import Plan

PLAN = Plan(block_q=16, block_k=4, span=8)


@pytest.mark.parametrize(("seed", "window"), [(206, (3, 0)), (212, None)])
def test_a_sequence_has_the_bits_it_has_alone(seed, window, monkeypatch) -> None:
    """Two short sequences, GQA, fp16 and fp32 with sinks and a softcap; spans are shared in every other way."""

    def shared(x, plan, tiles, spans, device) -> int:
        return 1 + (x.len_q + x.batch) % min(3, spans)

    monkeypatch.setattr(invariant, "chunks_for", shared)
    with rl.using(plan=PLAN):
        Batch(
            seed, 9, (torch.float32, torch.float16), backend="triton", more={"window": window}
        ).check()


@pytest.mark.parametrize("name", ["large-values", "packed-cross", "bias-row"])
def test_it_is_attention(name, device) -> None:
    """Results and gradients, where spans are folded as they come."""
    with rl.using(plan=Plan(block_q=16, block_k=16, span=32)):
        agree(small(name), torch.float32, device, batch_invariant=True)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("full", "page16", torch.bfloat16),
        ("window", "page7", torch.bfloat16),
        ("prefix", "cache", torch.float32),
        ("softcap-sinks", "dense", torch.float32),
        ("alibi", "page7", torch.bfloat16),
    ],
)
def test_spans_may_be_shared_by_any_number_of_programs(name, kind, dtype, device) -> None:
    """One program for all spans of a row, programs that take several, more programs than there are spans."""
    x, plan = arrays(kind, 3, dtype, device, **OPTIONS[name]), Plan(block_q=16, block_k=8, span=16)
    out, lse = invariant.invariant(x, plan, chunks=1)
    standard, oracle = (
        dict(zip(("out", "lse"), attend(x, to), strict=True)) for to in (dtype, torch.float64)
    )
    check("invariant", {"out": out, "lse": lse}, standard, oracle, dtype)
    for chunks in (2, 9):
        got = invariant.invariant(x, plan, chunks=chunks)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


def gradients(*tensors, cu: torch.Tensor | None = None, rows: int | None = None):
    """Out, LSE, dq, dk and dv; rows from `rows` on have no part in the loss."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    options = {
        "causal": True, "window": (5, 0), "softcap": 5.0, "batch_invariant": True, "return_lse": True,
        "backend": "triton",
    }  # fmt: skip
    if cu is None:
        out, lse = rl.attention(*leaves, **options)
        own = out[:, :rows], lse[..., :rows]
    else:
        most = int(cu.diff().max())
        own = out, lse = rl.attention_varlen(*leaves, cu, cu, most, most, **options)
    loss = own[0].float().square().sum() + own[1].sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def compare_gradients(lengths, heads, dtype, device) -> None:
    """Of sequences alone, packed, and in a batch where both are filled up behind."""
    g = torch.Generator().manual_seed(0)
    parts = [[torch.randn(n, *s, generator=g).to(device, dtype) for s in heads] for n in lengths]
    alone = [gradients(*(t[None] for t in part)) for part in parts]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    packed = gradients(*(torch.cat(ts) for ts in zip(*parts, strict=True)), cu=cu)
    for want, (start, end) in zip(alone, itertools.pairwise(cu.tolist()), strict=True):
        for i, got in enumerate(packed):
            assert torch.equal(got[:, start:end] if i == 1 else got[start:end], want[i][0])
    last = lengths[-1]
    filled = (torch.cat([t, torch.ones_like(t[:4])]) for t in parts[-1])
    padded = gradients(*(torch.stack([torch.ones_like(t), t]) for t in filled), rows=last)
    for i, (got, want) in enumerate(zip(padded, alone[-1], strict=True)):
        assert torch.equal(got[1, :, :last] if i == 1 else got[1, :last], want[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_alone_packed_and_padded(dtype, device) -> None:
    compare_gradients((7, 21), ((2, 24), (1, 24), (1, 16)), dtype, device)


def test_a_span_is_so_many_tiles() -> None:
    with pytest.raises(InvalidInput, match="span is 6; expected a multiple of block_k, 4"):
        Plan(block_q=16, block_k=4, span=6)
