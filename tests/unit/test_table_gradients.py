"""Gradients of score mods' arguments: those of the materialised bias, in every axis, layout and backend."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from budget import check
from oracle import dense

import relampago as rl
from relampago.api import Options, prepare
from relampago.mods import relative_bias, t5_bias, window_bias
from relampago.statistics.call import PACKED


def _mixed(score, q, k, head, args, math):
    return score * args[0] + args[1] * args[2] - args[3] * math.tanh(score)


def _mixed_slope(score, q, k, head, args, math):
    t = math.tanh(score)
    return args[0] - args[3] * (1.0 - t * t)


def _by_head(score, q, k, head, args, math):
    return score


def _by_row(score, q, k, head, args, math):
    return args[2]


def _by_key(score, q, k, head, args, math):
    return args[1]


def _by_distance(score, q, k, head, args, math):
    return -math.tanh(score)


def mixed(head, row, key, far) -> rl.ScoreMod:
    """One argument of each axis, none of which enters alone."""
    args = [("head", head), ("q", row), ("k", key), ("distance", far)]
    return rl.ScoreMod(_mixed, _mixed_slope, args, [_by_head, _by_row, _by_key, _by_distance])


B, H, LQ, LK = 2, 4, 90, 110


def draw(*shapes, device: str = "cpu") -> list[torch.Tensor]:
    return [torch.randn(s).to(device) for s in shapes]


def numbers(tables) -> torch.Tensor:
    """Those of the keys, where the tables are."""
    return torch.arange(LK, device=tables[0].device)


CASES = {
    "distance": lambda t: {"score_mod": relative_bias(t[0])},
    "causal": lambda t: {"score_mod": relative_bias(t[0]), "causal": True},
    "window": lambda t: {"score_mod": relative_bias(t[0]), "window": (30, 9)},
    "per sequence": lambda t: {"score_mod": relative_bias(t[0])},
    "one for all heads": lambda t: {"score_mod": relative_bias(t[0]), "softcap": 4.0},
    "all axes": lambda t: {"score_mod": mixed(*t), "softcap": 4.0},
    "all axes per sequence": lambda t: {"score_mod": (mixed(*t), relative_bias(t[3]))},
    "slopes": lambda t: {"alibi_slopes": t[0], "causal": True},
    "slopes per sequence": lambda t: {"alibi_slopes": t[0]},
    "places": lambda t: {"score_mod": relative_bias(t[0], numbers(t) // 3)},
    "places per sequence": lambda t: {
        "score_mod": relative_bias(t[0], torch.stack([numbers(t) % 17, numbers(t) // 2]))
    },
    "t5": lambda t: {"score_mod": t5_bias(t[0], max_distance=60)},
    "t5 decoder": lambda t: {"score_mod": t5_bias(t[0], bidirectional=False, max_distance=60), "causal": True},
    "block-sparse": lambda t: {
        "score_mod": mixed(*t),
        "mask": rl.BlockSparse.from_function(
            lambda b, h, q, k: ((q - k) % 3 == 0) | (k < 5), batch=B, heads=H, len_q=LQ, len_k=LK, block=(16, 32)
        ),
    },
}  # fmt: skip
AXES = [(H,), (LQ,), (H, LK), (H, 51)]
SHAPES = {
    "per sequence": [(B, H, 41)],
    "one for all heads": [(41,)],
    "all axes": AXES,
    "all axes per sequence": [(B, H), (B, H, LQ), (B, H, LK), (B, H, 51)],
    "slopes": [(H,)],
    "slopes per sequence": [(B, H)],
    "t5": [(32, H)],
    "t5 decoder": [(16, H)],
    "block-sparse": AXES,
}


def gradients(call, tensors, tables, make, dtype) -> dict[str, torch.Tensor]:
    """Out, LSE and the gradients of q, k, v and the tables, as `oracle.run` draws them."""
    inputs = [t.to(dtype).requires_grad_() for t in tensors]
    wide = torch.promote_types(dtype, torch.float32)
    learned = [t.to(wide).requires_grad_() for t in tables]
    out, lse = call(tuple(inputs), make(learned))
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).to(torch.bfloat16).to(out)
    dlse = torch.randn(lse.shape, generator=g).to(lse) * lse.isfinite()
    safe = torch.where(lse.isfinite(), lse, 0.0)
    found = torch.autograd.grad((out, safe), (*inputs, *learned), (dout, dlse))
    names = ("dq", "dk", "dv", *(f"d{i}" for i in range(len(learned))))
    return {"out": out, "lse": lse, **dict(zip(names, found, strict=True))}


def agree(tensors, tables, make, dtype, backend, **more) -> None:
    function = rl.attention_varlen if PACKED[0] in make(tables) else rl.attention
    got = gradients(
        lambda t, o: function(*t, **o, **more, return_lse=True, backend=backend),
        tensors,
        tables,
        make,
        dtype,
    )
    standard = gradients(lambda t, o: dense(t, o, dtype), tensors, tables, make, dtype)
    oracle = gradients(
        lambda t, o: dense(t, o, torch.float64), tensors, tables, make, torch.float64
    )
    check(backend, got, standard, oracle, dtype)


ASKED = [*(("cpu", name) for name in CASES),
         *(("reference", name) for name in ("all axes per sequence", "places", "block-sparse"))]  # fmt: skip


@pytest.mark.parametrize(("backend", "name"), ASKED)
def test_against_the_oracle(backend, name) -> None:
    judge(
        backend, name, (torch.float32, torch.bfloat16) if name == "all axes" else (torch.float32,)
    )


def judge(backend: str, name: str, dtypes, device: str = "cpu") -> None:
    """One of CASES."""
    tensors = draw((B, LQ, H, 16), (B, LK, 2, 16), (B, LK, 2, 16), device=device)
    tables = draw(*SHAPES.get(name, [(H, 41)]), device=device)
    for dtype in dtypes:
        agree([t.to(torch.bfloat16) for t in tensors], tables, CASES[name], dtype, backend)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_packed_sequences(backend, device) -> None:
    lengths_q, lengths_k = (0, 20, 37, 3), (5, 20, 50, 9)
    tensors = draw((60, H, 16), (84, 2, 16), (84, 2, 16), device=device)
    ends = [torch.tensor((0, *n)).cumsum(0).int().to(device) for n in (lengths_q, lengths_k)]
    packing = dict(zip(PACKED, (*ends, 37, 50), strict=True))
    tables = draw((H,), (37,), (H, 50), (H, 21), device=device)
    agree(
        tensors,
        tables,
        lambda t: {"score_mod": mixed(*t), "causal": True, **packing},
        torch.float32,
        backend,
    )


@pytest.mark.parametrize("heads", [4, 2])
def test_swin_and_t5_equal_their_materialised_bias(heads) -> None:
    """The table's gradient by way of the N×N bias, as Swin and T5 build it, and by way of the mod."""
    window, buckets = (5, 7), 32
    n = math.prod(window)
    q, k, v = draw((3, n, 4, 16), (3, n, heads, 16), (3, n, heads, 16))
    dout = torch.randn(3, n, 4, 16)
    y, x = torch.arange(n) // 7, torch.arange(n) % 7
    swin = (y[:, None] - y + 4) * 13 + x[:, None] - x + 6  # row minus key
    distance = torch.arange(n) - torch.arange(n)[:, None]  # key minus row
    far, half = distance.abs(), buckets // 2
    coarse = 8 + ((far.clamp(min=1).float() / 8).log() / math.log(128 / 8) * 8).long()
    t5 = torch.where(far < 8, far, coarse.clamp(max=15)) + half * (distance > 0)
    for index, rows, make in (
        (swin, 9 * 13, lambda t: window_bias(t, window)),
        (t5, buckets, lambda t: t5_bias(t)),
    ):
        table = torch.randn(rows, 4, requires_grad=True)
        for options in ({}, {"causal": True}):
            dense_bias = rl.attention(q, k, v, bias=table[index].permute(2, 0, 1), **options)
            (want,) = torch.autograd.grad(dense_bias, table, dout)
            out = rl.attention(q, k, v, score_mod=make(table), **options)
            (got,) = torch.autograd.grad(out, table, dout)
            torch.testing.assert_close(out, dense_bias)
            torch.testing.assert_close(got, want)
            assert got.abs().max() > 0.01


@pytest.mark.parametrize(
    "shape", [(2, 4, 40, 48), (1, 4, 40, 48), (2, 1, 40, 48), (1, 1, 40, 48), (4, 40, 48), (40, 48), (2, 4, 1, 48)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_pair_bias_shared_over_anything(backend, shape) -> None:
    """AlphaFold's pair bias: its gradient is the sum over all that share it."""
    q, k, v = (t.double() for t in draw((2, 40, 4, 8), (2, 48, 2, 8), (2, 48, 2, 8)))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(2, 40, 4, 8, dtype=torch.float64)
    scores = torch.einsum("blhd,bmhd->bhlm", q, k.repeat_interleave(2, 2)) / 8**0.5 + bias
    want = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    got = rl.attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, bias, dout)[0], torch.autograd.grad(want, bias, dout)[0]
    )


def test_two_runs_agree_to_the_bit() -> None:
    tensors, table = draw((2, 300, 4, 16), (2, 300, 4, 16), (2, 300, 4, 16)), torch.randn(41)

    def once() -> torch.Tensor:
        learned = table.clone().requires_grad_()
        out = rl.attention(*tensors, score_mod=relative_bias(learned), deterministic=True)
        return torch.autograd.grad(out.square().sum(), learned)[0]

    first = once()
    assert all(torch.equal(first, once()) for _ in range(3))


def test_gradcheck() -> None:
    q, k, v = (t.double().requires_grad_() for t in draw((1, 6, 2, 3), (1, 7, 1, 3), (1, 7, 1, 3)))
    tables = [t.double().requires_grad_() for t in draw((2,), (2, 6), (7,), (2, 5))]

    def fn(q, k, v, *tables):
        return rl.attention(
            q, k, v, score_mod=mixed(*tables), softcap=3.0, causal=True, return_lse=True
        )

    assert torch.autograd.gradcheck(fn, (q, k, v, *tables))


def test_in_pytorch() -> None:
    """opcheck, torch.compile; torch.func and double backward refuse by name."""
    q, k, v = draw((2, 20, 4, 16), (2, 20, 4, 16), (2, 20, 4, 16))
    table = torch.randn(4, 9, requires_grad=True)
    call = tuple(prepare(q, k, v, Options(score_mod=relative_bias(table))))
    torch.library.opcheck(torch.ops.relampago.forward.default, call)
    plain = tuple(prepare(q, k, v, Options(score_mod=relative_bias(table.detach()))))
    out, lse = torch.ops.relampago.forward(*plain)
    wanted = [True, True, True, False, False, True]
    torch.library.opcheck(
        torch.ops.relampago.backward_args.default,
        (torch.ones_like(out), None, out, lse, wanted, *plain),
    )

    def fn(table):
        return rl.attention(q, k, v, score_mod=t5_bias(table, max_distance=30), causal=True)

    learned = torch.randn(16, 4, requires_grad=True)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(learned).sin().sum(), learned)[0] for f in (compiled, fn))
    torch.testing.assert_close(got, want)
    with pytest.raises(rl.Unsupported, match="gradients of score mod arguments inside a transform"):
        torch.func.grad(lambda t: fn(t).sum())(learned.detach())
    samples = torch.randn(3, 16, 4)
    torch.testing.assert_close(torch.func.vmap(fn)(samples), torch.stack([fn(t) for t in samples]))


def test_refusals_are_words() -> None:
    q = torch.randn(1, 8, 2, 8)
    learned = torch.randn(2, requires_grad=True)
    with pytest.raises(
        rl.InvalidInput, match="requires a gradient; expected its derivative in dargs"
    ):
        rl.attention(q, q, q, score_mod=replace(mixed(*draw((2,), (8,), (8,), (3,))), dargs=(), args=[
            ("head", learned), *mixed(*draw((2,), (8,), (8,), (3,))).args[1:]]))  # fmt: skip
    with pytest.raises(rl.InvalidInput, match="dargs has 1 entries; expected 4"):
        replace(mixed(*draw((2,), (8,), (8,), (3,))), dargs=(_by_head,))
    with pytest.raises(rl.InvalidInput, match="places of shape"):
        rl.attention(q, q, q, score_mod=relative_bias(torch.randn(5), torch.arange(7)))
    with pytest.raises(rl.InvalidInput, match="places of dtype"):
        rl.attention(q, q, q, score_mod=relative_bias(torch.randn(5), torch.rand(8)))
    with pytest.raises(rl.InvalidInput, match="expected a tensor \\(25, H\\)"):
        window_bias(torch.randn(24, 2), (3, 3))
    with pytest.raises(rl.InvalidInput, match="max_distance is 3"):
        t5_bias(torch.randn(32, 2), max_distance=3)
    with pytest.raises(rl.InvalidInput, match="buckets"):
        t5_bias(torch.randn(2, 2))


def test_dead_entries_stay_zero() -> None:
    """Distances that no visible pair has get no gradient."""
    q, k, v = draw((1, 10, 2, 8), (1, 10, 2, 8), (1, 10, 2, 8))
    table = torch.randn(2, 31, requires_grad=True)
    out = rl.attention(q, k, v, score_mod=relative_bias(table), causal=True)
    (got,) = torch.autograd.grad(out.square().sum(), table)
    assert bool((got[:, 16:] == 0).all())
    assert bool((got[:, :6] == 0).all())
    assert bool((got[:, 6:16] != 0).all())
