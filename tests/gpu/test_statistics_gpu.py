"""Statistics of the weights by the kernels of a card, against the dense matrix in fp64."""

from __future__ import annotations

import pytest
import torch
from gpu.card import HOPPER, LENGTHS, sized
from interpreter.statistics_suite import judge, test_statistics  # noqa: F401
from unit.test_statistics import (  # noqa: F401
    dense,
    made,
    test_chosen_rows_are_rows_of_the_matrix,
    test_chosen_rows_of_packed_sequences,
    within_budget,
)

import relampago as rl
from relampago.cases import Case

ASKED = {
    "causal": (64, {"causal": True}),
    "window": (128, {"window": (300, 40)}),
    "softcap": (64, {"softcap": 5.0}),
    "full": (256, {}),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ASKED)
def test_several_tiles(name: str, length: int, device: str) -> None:
    dim, options = ASKED[name]
    judge(sized(length, dim, **options), torch.bfloat16, device)


@pytest.mark.skipif(not HOPPER, reason="needs sm90")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", sorted({*ASKED, "few queries"} - {"softcap"}))
def test_largest_scores_of_hopper(name: str, length: int, device: str) -> None:
    """They come with the forward, also of splits over keys and of heads packed into a tile."""
    dim, options = ASKED.get(name, (128, {"causal": True}))
    q, k, v, options = made(sized(length, dim, **options), torch.bfloat16, device)
    if name == "few queries":
        q = q[:, -9:]  # fewer rows are left to decoding kernels
    oracle, standard = (dense(q, k, options, 7, d) for d in (torch.float64, torch.bfloat16))
    plain = rl.attention(q, k, v, **options, return_lse=True, backend="gluon_sm90")
    *both, top = rl.attention(
        q, k, v, **options, return_lse=True, return_max_logits=True, backend="gluon_sm90"
    )
    for a, b in zip(plain, both, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)  # O may be rescaled more often
    within_budget(name, {"lse": both[1], "max_logits": top}, standard, oracle, torch.bfloat16)


def test_packed_sequences(device: str) -> None:
    lengths = (300, 1, 0, LENGTHS[-1])
    judge(
        Case(name="packed", len_q=lengths, len_k=lengths, kv_heads=2, options={"causal": True}),
        torch.float16,
        device,
    )
