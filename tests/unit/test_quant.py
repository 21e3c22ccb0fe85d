"""relampago.quant: the rotation is orthogonal, casts are to the nearest, scales are checked, saturation is counted."""

from __future__ import annotations

import math

import pytest
import torch

import relampago as rl
from relampago import quant
from relampago.quant.rotation import parts, signs

DIMS = (1, 2, 16, 33, 64, 80, 96, 128, 192, 256, 512)


def hadamard(dim: int) -> torch.Tensor:
    """Sylvester's matrix."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < dim:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_the_signed_hadamard_matrix(dim) -> None:
    eye = torch.eye(dim, dtype=torch.float64)
    matrix = quant.rotate(eye)
    blocks = [hadamard(n) / math.sqrt(n) for n in parts(dim)]
    want = signs(dim, eye.device).double().diag() @ torch.block_diag(*blocks)
    torch.testing.assert_close(matrix, want)
    torch.testing.assert_close(matrix @ matrix.T, eye)
    torch.testing.assert_close(quant.rotate(quant.rotate(eye), inverse=True), eye)


@pytest.mark.parametrize("dim", [4, 16, 64, 256])
def test_rotation_keeps_products_exactly(dim) -> None:
    """Where the norm is a power of two and nothing rounds, not a bit of q·kᵀ changes."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-50, 50, (7, dim), generator=g).double() for _ in range(2))
    assert torch.equal(quant.rotate(q) @ quant.rotate(k).T, q @ k.T)


def test_rotation_spreads_an_outlier() -> None:
    spread = quant.rotate(torch.eye(128)[3] * 100)
    torch.testing.assert_close(spread.abs(), torch.full((128,), 100 / math.sqrt(128)))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_cast_is_to_the_nearest(per) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 300, 3, 40, generator=g) * torch.tensor([1.0, 1e-3, 50.0])[:, None]
    got = quant.quantise(x, per=per, count=True)
    assert (
        tuple(got.scales.shape) == {"tensor": (1, 1, 1), "head": (2, 3, 1), "block": (2, 3, 3)}[per]
    )
    assert got.values.dtype == torch.float8_e4m3fn
    assert got.saturated is not None
    assert int(got.saturated) == 0
    scales = got.scales.expand(2, 3, -1).repeat_interleave(128 if per == "block" else 300, 2)
    scales = scales[:, :, :300].transpose(1, 2)[..., None]
    unit = x / scales
    assert unit.abs().max() <= quant.LARGEST * (1 + 1e-6)
    # half a step: 2^-4 of the power of two below, 2^-10 among the smallest
    step = torch.exp2(torch.floor(torch.log2(unit.abs().clamp(min=2.0**-6)))) * 2.0**-3
    back = quant.dequantise(got.values, got.scales)
    assert ((back - x).abs() <= step * scales * 0.5 * (1 + 1e-6)).all()


def test_packed_sequences_have_scales_of_their_own() -> None:
    g = torch.Generator().manual_seed(2)
    lengths = [3, 0, 200, 129]
    x = torch.randn(sum(lengths) + 5, 2, 16, generator=g)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    got = quant.quantise(x, cu_seqlens=cu, max_seqlen=200)
    assert tuple(got.scales.shape) == (4, 2, 2)
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        if n:
            alone = quant.quantise(x[rows][None])
            assert torch.equal(got.values[rows].float(), alone.values[0].float())
            assert torch.equal(got.scales[b, :, : alone.scales.shape[2]], alone.scales[0])
    assert not got.values[int(cu[-1]) :].float().any()
    back = quant.dequantise(got.values, got.scales, cu_seqlens=cu, max_seqlen=200)
    torch.testing.assert_close(back[: int(cu[-1])], x[: int(cu[-1])], atol=0.2, rtol=2.0**-4)


def test_saturation_is_counted() -> None:
    x = torch.tensor([1.0, -500.0, 448.0, 465.0, math.inf, math.nan, -math.inf, 0.0]).view(
        1, 1, 1, 8
    )
    got = quant.quantise(x, scales=torch.ones(1, 1, 1), count=True)
    assert got.saturated is not None
    assert int(got.saturated) == 4
    assert got.values.float()[0, 0, 0, :5].tolist() == [1.0, -448.0, 448.0, 448.0, 448.0]
    assert got.values.float()[..., 5].isnan()
    assert quant.quantise(x, scales=torch.ones(1, 1, 1)).saturated is None


def test_nothing_to_cast() -> None:
    for shape in ((0, 4, 2, 8), (2, 0, 2, 8)):
        got = quant.quantise(torch.zeros(shape))
        assert got.values.shape == shape
        assert (got.scales > 0).all()


X = torch.zeros(2, 200, 3, 8)
BAD = {
    "rank": ({"x": X[0]}, r"x is torch.float32 \(200, 3, 8\); expected a float tensor \(batch, length, heads, dim\)"),
    "ints": ({"x": X.int()}, "x is torch.int32"),
    "no tensor": ({"x": [1]}, "x is list"),
    "per": ({"per": "row"}, "per is 'row'; expected 'tensor', 'head' or 'block'"),
    "shape": ({"scales": torch.ones(2, 3, 3)}, r"scales has shape \(2, 3, 3\); expected one of .*\(2, 3, 2\)"),
    "dtype": ({"scales": torch.ones(1, 1, 1).double()}, "scales is torch.float64 on cpu; expected torch.float32"),
    "number": ({"scales": 0.1}, "scales is 0.1; expected a tensor"),
    "longest": ({"x": X[0], "cu_seqlens": torch.tensor([0, 9])}, "max_seqlen is None; expected an int"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_input(changed, message) -> None:
    call = {"x": X, **changed}
    with pytest.raises(rl.InvalidInput, match=message):
        quant.quantise(call.pop("x"), **call)


def test_rotate_refuses() -> None:
    with pytest.raises(rl.InvalidInput, match=r"x is torch\.int64"):
        quant.rotate(torch.ones(4, dtype=torch.int64))
