"""Statistics of the weights by the kernels of a card, against the dense matrix in fp64."""

from __future__ import annotations

import pytest
import torch
from gpu.card import LENGTHS, sized
from interpreter.statistics_suite import judge, test_statistics  # noqa: F401
from unit.test_statistics import (  # noqa: F401
    test_chosen_rows_are_rows_of_the_matrix,
    test_chosen_rows_of_packed_sequences,
)

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


def test_packed_sequences(device: str) -> None:
    lengths = (300, 1, 0, LENGTHS[-1])
    judge(
        Case(name="packed", len_q=lengths, len_k=lengths, kv_heads=2, options={"causal": True}),
        torch.float16,
        device,
    )
