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

OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_several_tiles(name: str, dim: int, length: int, device: str) -> None:
    judge(sized(length, dim, **OPTIONS[name]), torch.bfloat16, device)


def test_packed_sequences(device: str) -> None:
    lengths = (300, 1, 0, LENGTHS[-1])
    judge(
        Case(name="packed", len_q=lengths, len_k=lengths, kv_heads=2, options={"causal": True}),
        torch.float16,
        device,
    )
