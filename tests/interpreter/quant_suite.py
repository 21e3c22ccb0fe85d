"""The fused casts against `relampago.quant`'s torch path, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import pytest
import torch
from budget import check

from relampago import quant
from relampago.quant.columns import column_of, columns_in_all, first_column
from relampago.quant.kernels import columns_in_e4m3, rows_in_e4m3

CU = torch.tensor([0, 3, 3, 133, 150], dtype=torch.int32)
packing = pytest.mark.parametrize("cu", [None, CU], ids=["dense", "packed"])


def made(cu: torch.Tensor | None, dim: int, device: str):
    """A tensor with outliers, two sequences or packed ones with room behind; cu_seqlens; the longest sequence."""
    shape = (2, 150, 2, dim) if cu is None else (155, 2, dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = (x + 20 * (x > 3)).bfloat16().to(device)
    return (x, None, 150) if cu is None else (x, cu.to(device), 130)


def numbers(t: torch.Tensor) -> torch.Tensor:
    """In fp32, with a number that e4m3 has not in the place of NaN."""
    return t.float().nan_to_num(500.0)


@pytest.mark.parametrize("dim", [16, 128, 256, 96, 40])
@packing
def test_rows(dim, cu, device) -> None:
    """Tensor cores sum in an order of their own, so values and scales are judged beside a rotation in x's dtype."""
    x, cu, longest = made(cu, dim, device)
    end = None if cu is None else int(cu[-1])
    among = {"cu_seqlens": cu, "max_seqlen": longest}
    values, scales = rows_in_e4m3(x, cu, longest)
    standard, oracle = (quant.quantise(quant.rotate(t), **among) for t in (x, x.double()))
    back = [
        quant.dequantise(v, s, **among)[slice(end)]
        for v, s in ((values[..., :dim], scales), standard[:2])
    ]
    exact = quant.rotate(x.double())[slice(end)]
    check("rows", *({"out": t} for t in (*back, exact)), torch.float32)
    check("scales", *({"lse": t} for t in (scales, standard.scales, oracle.scales)), torch.float32)
    assert not values[slice(end)][..., dim:].float().any()


@pytest.mark.parametrize("dim", [16, 40, 256])
@packing
def test_rows_as_they_are(dim, cu, device) -> None:
    """Where nothing is turned nothing is summed: the bits of `quantise`, also beside NaN and infinity."""
    x, cu, longest = made(cu, dim, device)
    x.view(-1, 2, dim)[1, 0, 3], x.view(-1, 2, dim)[140, 1, 5] = torch.inf, torch.nan
    end = None if cu is None else int(cu[-1])
    values, scales = rows_in_e4m3(x, cu, longest, rotated=False)
    want = quant.quantise(x, cu_seqlens=cu, max_seqlen=longest)
    assert torch.equal(numbers(values[slice(end)][..., :dim]), numbers(want.values[slice(end)]))
    there = want.scales > quant.cast.LEAST_SCALE
    assert torch.equal(scales[there], want.scales[there])


@packing
@pytest.mark.parametrize("given", [False, True])
def test_columns(cu, given, device) -> None:
    """The bits of `quantise`, each key a column; beyond a sequence's keys 0."""
    v, cu, longest = made(cu, 40, device)
    v.view(-1, 2, 40)[140, 1, 5] = torch.nan
    want = quant.quantise(v, cu_seqlens=cu, max_seqlen=longest)
    if given:
        got, scales = columns_in_e4m3(want.values, cu, longest, want.scales)
    else:
        got, scales = columns_in_e4m3(v, cu, longest)
    ends = [0, 150] if cu is None else cu.tolist()
    assert got.shape[-1] == (256 if cu is None else columns_in_all(155, 4, 128))
    for b in range(2 if cu is None else 4):
        first, n = (0, 150) if cu is None else (ends[b], ends[b + 1] - ends[b])
        start = 0 if cu is None else first_column(first, b, 128)
        part = got[b if cu is None else 0][..., start : start + max(1, -(-n // 128)) * 128].float()
        places = torch.tensor([column_of(key) for key in range(n)], dtype=torch.long, device=device)
        rows = want.values[b, :, :] if cu is None else want.values[first : first + n]
        assert torch.equal(numbers(part[..., places]), numbers(rows.permute(1, 2, 0)))
        part[..., places] = 0
        assert not part.any()
        blocks = -(-n // 128)
        assert torch.equal(scales[b, :, :blocks], want.scales[b, :, :blocks])
