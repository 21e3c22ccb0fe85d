"""The fused casts against `relampago.quant`'s torch path, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import pytest
import torch

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


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same numbers but for ties that fp32 sums of another order break: a step of e4m3, at few places."""
    got, want = got.float(), want.float()
    apart = got != want
    assert apart.float().mean() < 2e-3
    steps = torch.maximum(got.abs(), want.abs()).clamp(min=2.0**-6) * 2.0**-3
    assert ((got - want).abs() <= steps)[apart].all()


@pytest.mark.parametrize("dim", [16, 128, 256, 96, 40])
@packing
def test_rows(dim, cu, device) -> None:
    x, cu, longest = made(cu, dim, device)
    got, scales = rows_in_e4m3(x, cu, longest)
    want = quant.quantise(quant.rotate(x.float()), cu_seqlens=cu, max_seqlen=longest)
    found = want.scales > quant.cast.LEAST_SCALE  # of what is there
    coarse = 1e-2 if dim == 40 else 1e-5
    torch.testing.assert_close(scales[found], want.scales[found], rtol=coarse, atol=0)
    rows = slice(None) if cu is None else slice(150)
    if dim == 40:  # rotated in bf16 first: no part of 8 goes to the tensor cores
        want = quant.quantise(quant.rotate(x), cu_seqlens=cu, max_seqlen=longest)
    near(got[rows][..., :dim], want.values[rows])
    assert not got[rows][..., dim:].float().any()


@packing
@pytest.mark.parametrize("given", [False, True])
def test_columns(cu, given, device) -> None:
    v, cu, longest = made(cu, 40, device)
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
        assert torch.equal(part[..., places], rows.float().permute(1, 2, 0))
        part[..., places] = 0
        assert not part.any()
        blocks = -(-n // 128)
        assert torch.equal(scales[b, :, :blocks], want.scales[b, :, :blocks])
