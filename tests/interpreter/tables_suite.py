"""Gradients of score mods' arguments in the interpreter, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import pytest
import torch
from budget import check
from oracle import dense
from unit.test_table_gradients import PACKED, agree, draw, mixed

import relampago as rl
from relampago.mods import relative_bias, window_bias

H, LQ, LK = 2, 40, 50
CASES = {
    "distance": (lambda t: {"score_mod": relative_bias(t[0]), "causal": True}, [(H, 21)]),
    "all axes": (
        lambda t: {"score_mod": (mixed(*t), relative_bias(t[3])), "softcap": 4.0, "window": (30, 9)},
        [(H,), (LQ,), (2, H, LK), (2, H, 31)],
    ),
    "places, dropout": (
        lambda t: {"score_mod": relative_bias(t[0], torch.arange(LK) // 3), "dropout_p": 0.2, "dropout_seed": 3},
        [(H, 21)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name) -> None:
    make, shapes = CASES[name]
    tensors = draw((2, LQ, H, 16), (2, LK, 1, 16), (2, LK, 1, 16))
    agree(tensors, draw(*shapes), make, torch.float32, "triton")


def test_packed_sequences() -> None:
    ends = [torch.tensor((0, *n)).cumsum(0).int() for n in ((0, 20, 37, 3), (5, 20, 50, 9))]
    packing = dict(zip(PACKED, (*ends, 37, 50), strict=True))
    tensors = draw((60, H, 40), (84, H, 40), (84, H, 16))
    tables = draw((H,), (37,), (H, 50), (H, 21))
    agree(
        tensors,
        tables,
        lambda t: {"score_mod": mixed(*t), "causal": True, **packing},
        torch.float32,
        "triton",
    )


def test_pairs_beyond_the_clip_are_summed_in_tiles() -> None:
    """Nearly all pairs read an end of this table: each end's gradient may lose what a sum in a tree loses, not more."""
    q, k, v, table = draw((2, LQ, H, 16), (2, LK, H, 16), (2, LK, H, 16), (3,))
    places = torch.arange(LK)
    distance = (places - torch.arange(LQ)[:, None] - (LK - LQ)).clamp(-1, 1) + 1

    def ends(dtype) -> dict[str, torch.Tensor]:
        tensors = tuple(t.to(dtype) for t in (q, k, v))
        bias = table.to(dtype)[distance].expand(2, H, LQ, LK).requires_grad_()
        _, lse = dense(tensors, {"bias": bias}, dtype)
        (change,) = torch.autograd.grad(lse.sum(), bias)
        return {"table": torch.stack([(change * (distance == n)).sum() for n in range(3)])}

    standard, oracle = ends(torch.float32), ends(torch.float64)
    for between in (None, places):
        learned = table.clone().requires_grad_()
        mod = relative_bias(learned, between)
        _, lse = rl.attention(q, k, v, score_mod=mod, return_lse=True, backend="triton")
        (got,) = torch.autograd.grad(lse.sum(), learned)
        check("triton", {"table": got}, standard, oracle, torch.float32)


def test_half() -> None:
    tensors = [t.bfloat16() for t in draw((2, 12, H, 16), (2, 12, H, 16), (2, 12, H, 16))]
    tables = draw((5 * 7, H))
    agree(
        tensors,
        tables,
        lambda t: {"score_mod": window_bias(t[0], (3, 4))},
        torch.bfloat16,
        "triton",
    )


def test_refusals_are_words() -> None:
    q = torch.randn(1, 8, 2, 16)
    table = torch.randn(5, requires_grad=True)
    with pytest.raises(rl.Unsupported, match="not in deterministic mode"):
        rl.attention(
            q, q, q, score_mod=relative_bias(table), deterministic=True, backend="triton"
        ).sum().backward()
    mask = rl.BlockSparse.from_mask(torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(rl.Unsupported, match="with BlockSparse masks"):
        rl.attention(
            q, q, q, score_mod=relative_bias(table), mask=mask, backend="triton"
        ).sum().backward()
