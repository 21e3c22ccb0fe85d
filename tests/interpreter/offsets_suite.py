"""Rows so far apart that a tile of them passes 2^31 elements, as sequence-major keys of a large batch lie.

Run by `test_interpreter.py` in a process of its own, and by tests/gpu. The memory between rows is asked for and never
touched, so that it is no more than addresses. An offset in 32 bits reads or writes outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from relampago.api import Options, prepare
from relampago.backends.triton import backward, decode, forward, invariant, statistics, tangent
from relampago.backends.triton.backward_tangent import backward_tangent
from relampago.mods import alibi, softcap
from relampago.op import arrays_of
from relampago.plan import Plan
from relampago.problem import Arrays, Moving, Saved, Sums, Tangents, Wanted
from relampago.quant import E4M3

ROWS, DIM = 64, 16
STEP = 36 << 20  # elements between rows: 63 of them are 2^31 and more
PLACES, PLACE = 16, 256  # tensors, and the elements of a row that each has to itself
PLAN = Plan(block_q=64, block_k=64)


class Land:
    """Storage of ROWS rows, so many elements apart; each tensor laid out in it has columns of its own."""

    def __init__(self, device: str, dtype: torch.dtype, step: int = STEP) -> None:
        self.storage = torch.empty((ROWS - 1) * step + PLACES * PLACE, dtype=dtype, device=device)
        self.step, self.used = step, 0

    def hold(self, t: Tensor) -> Tensor:
        """A copy of t, (B, L, H, D), sequence-major."""
        b, n, h, d = t.shape
        assert b * h * d <= PLACE
        start, self.used = self.used * PLACE, self.used + 1
        return self.storage.as_strided((b, n, h, d), (h * d, self.step, d, 1), start).copy_(t)


@pytest.fixture
def land(device) -> Land:
    return Land(device, torch.float16)


def arrays(device: str, heads: tuple[int, int] = (2, 1), **options) -> Arrays:
    """A call whose tensors lie as usual."""
    shapes = ((2, ROWS, heads[0], DIM), (2, ROWS, heads[1], DIM), (2, ROWS, heads[1], DIM))
    q, k, v = (torch.randn(s, dtype=torch.float16, device=device) for s in shapes)
    return arrays_of(prepare(q, k, v, Options(causal=True, **options)))


def last(rows: int, x: Arrays) -> Arrays:
    """The same keys for so many rows, aligned bottom right."""
    return replace(x, q=x.q[:, -rows:], len_q=rows, band=x.band._replace(offset=ROWS - rows))


def moved(x: Arrays, land: Land) -> Arrays:
    """The same call, whose tensors lie far apart."""
    return replace(x, q=land.hold(x.q), k=land.hold(x.k), v=land.hold(x.v))


def summed(tensors: Iterable[Tensor]) -> Sums:
    q, k, v = tensors
    return Sums(q, k, v)


def same(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_forward(device, land) -> None:
    x = arrays(device)
    want = forward.forward(x, PLAN)
    far = moved(x, land)
    same(forward.forward(far, PLAN), want)
    other = torch.randn_like(want[0]), torch.randn_like(want[1])
    near = replace(x, into=tuple(t.clone() for t in other))
    far = replace(far, into=(land.hold(other[0]), other[1].clone()))
    same(forward.forward(far, PLAN), forward.forward(near, PLAN))


@pytest.mark.parametrize("fused", [0, 1])
def test_backward(fused, device, land) -> None:
    """Out and dO lie far too, and so do the sums that gradients are added to."""
    x = arrays(device, score_mod=(alibi(torch.rand(2, device=device)), softcap(3.0)))
    out, lse = forward.forward(x, PLAN)
    dout, sums = torch.randn_like(out), [torch.randn_like(t) for t in (x.q, x.k, x.v)]
    plan = replace(PLAN, fused=fused)

    def gradients(x: Arrays, out: Tensor, dout: Tensor):
        wanted = Wanted(mod_args=(True,) * len(x.mod_args))
        found = backward.backward(x, plan, PLAN, Saved(out, lse), dout, None, wanted, not fused)
        return found[:3], found.mod_args[0]

    def added(x: Arrays, out: Tensor, dout: Tensor):
        plain = replace(x, mods=(), mod_args=())
        saved = Saved(out, lse)
        return backward.backward(plain, plan, PLAN, saved, dout, None, Wanted(), not fused)[:3]

    far = moved(x, land), land.hold(out), land.hold(dout)
    (got, slopes), (want, expected) = gradients(*far), gradients(x, out, dout)
    same(got, want)
    torch.testing.assert_close(slopes, expected)  # added up in any order
    near = replace(x, sums=summed(t.clone() for t in sums))
    far = replace(far[0], sums=summed(map(land.hold, sums))), *far[1:]
    same(added(*far), added(near, out, dout))


@pytest.mark.parametrize("rows", [1, 3])
def test_decode(rows, device, land) -> None:
    x = last(rows, arrays(device))
    same(decode.decode(moved(x, land), PLAN, splits=1), decode.decode(x, PLAN, splits=1))


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "paged"])
def test_decode_from_e4m3(paged, device) -> None:
    """Values are read two at a time: their rows lie half as many steps apart."""
    x = last(1, arrays(device))
    x.k_scale = x.v_scale = torch.ones(2, 1, 1, device=device)
    x.lens_k = torch.tensor([ROWS, 40], dtype=torch.int32, device=device)
    if paged:
        x.page_table = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    x.k, x.v = x.k.to(E4M3), x.v.to(E4M3)
    land = Land(device, torch.uint8, 2 * STEP)
    far = replace(x, **{n: land.hold(getattr(x, n).view(torch.uint8)).view(E4M3) for n in "kv"})
    same(decode.decode(far, PLAN, splits=1), decode.decode(x, PLAN, splits=1))


@pytest.mark.parametrize(("rows", "chunks"), [(ROWS, 1), (2, 2)])
def test_batch_invariant(rows, chunks, device, land) -> None:
    x, plan = last(rows, arrays(device)), replace(PLAN, span=64)
    want = invariant.invariant(x, plan, chunks=chunks)
    same(invariant.invariant(moved(x, land), plan, chunks=chunks), want)


def test_statistics(device, land) -> None:
    x = arrays(device)
    far = moved(x, land)
    want = statistics.row_statistics(x, PLAN, ROWS)
    same(statistics.row_statistics(far, PLAN, ROWS), want)
    want = statistics.column_sums(x, PLAN, want.lse, ROWS), want.lse
    same((statistics.column_sums(far, PLAN, want[1], ROWS), want[1]), want)


@pytest.mark.parametrize("fused", [0, 1])
def test_derivatives(fused, device, land) -> None:
    """What moves lies far as well."""
    x, plan = arrays(device), replace(PLAN, fused=fused)
    along = Tangents(*(torch.randn_like(t) for t in (x.q, x.k, x.v)))
    out, lse, tout, tlse = tangent.tangent(x, PLAN, along)
    dout, tdout = torch.randn_like(out), torch.randn_like(out)

    def gradients(
        x: Arrays, along: Tangents, out: Tensor, tout: Tensor, dout: Tensor, tdout: Tensor
    ):
        moving = Moving(along, tout, tlse, tdout, None)
        return backward_tangent(
            x, plan, PLAN, moving, Saved(out, lse), dout, None, Wanted(), not fused
        )[:3]

    far = moved(x, land), Tangents(*map(land.hold, along[:3]))
    same(tangent.tangent(far[0], PLAN, far[1]), (out, lse, tout, tlse))
    near = (out, tout, dout, tdout)
    same(gradients(*far, *map(land.hold, near)), gradients(x, along, *near))
