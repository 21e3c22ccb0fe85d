"""The contract suite's cases on the Triton kernels, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from budget import check
from contract.test_contract import call
from interpreter.small import small
from oracle import dense, run

import relampago as rl
from relampago import dropout
from relampago.api import Options, Packing, prepare
from relampago.backends.reference import attend
from relampago.backends.triton import arguments as A
from relampago.backends.triton import backward, forward
from relampago.cases import find
from relampago.op import arrays_of
from relampago.plan import Plan
from relampago.problem import Saved, Sums, Wanted

FP32 = (
    "full", "causal", "bottom-right", "one-key", "bhsd", "mqa", "dim-1",
    "dim-40-v-72", "dim-192-v-128", "dim-512", "large-values", "window-sees-nothing",
    "window-causal", "prefix", "prefix-window", "documents-per-sequence", "dense-mask-broadcast",
    "block-sparse", "relative-bias", "user-mod", "bias-row",
    "bias-minus-inf", "bias-finfo-min", "sinks-window", "dropout", "packed-cross", "packed-window",
    "packed-dropout", "packed-bias", "empty-batch", "no-queries",
    "no-keys",
)  # fmt: skip
HALF = ("bottom-right", "dim-192-v-128", "bias-finfo-min", "sinks", "packed-cross")
FUSED = ("mqa", "packed-cross", "bias-row", "block-sparse", "packed-dropout")


def agree(case, dtype, device, **options) -> None:
    tensors, settings = case.make(dtype, device)
    got = run(lambda t, o: call(t, {**o, "backend": "triton", **options}), tensors, settings, dtype)
    standard = run(lambda t, o: dense(t, o, dtype), tensors, settings, dtype)
    oracle = run(lambda t, o: dense(t, o, torch.float64), tensors, settings, torch.float64)
    check(f"triton {case.name}", got, standard, oracle, dtype)


@pytest.mark.parametrize("name", FP32)
def test_fp32(name, device) -> None:
    agree(small(name), torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", HALF)
def test_half(name, dtype, device) -> None:
    agree(find(name), dtype, device)


@pytest.fixture
def dirty(monkeypatch) -> None:
    """Whoever takes memory finds nan there."""
    make = torch.empty

    def empty(*size, **options):
        found = make(*size, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("name", FUSED)
def test_fused(name, device, dirty) -> None:
    with rl.using(plan=Plan(block_q=32, block_k=32, fused=1)):
        agree(small(name), torch.float32, device)


@pytest.mark.parametrize("name", ["bottom-right", "dim-40-v-72"])
def test_tma(name, device, dirty) -> None:
    with rl.using(plan=Plan(block_q=32, block_k=32, tma=1, fused=1)):
        agree(small(name), torch.float32, device)


def lowered(case, device):
    """A case's arrays, as a backend gets them."""
    tensors, options = case.make(torch.float32, device)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = None
    if "cu_seqlens_q" in options:
        packing = Packing(*(options.pop(n) for n in names))
    return arrays_of(prepare(*tensors, Options(**options), packing=packing))


PLAN = Plan(block_q=32, block_k=32)


@pytest.mark.parametrize("name", ["bottom-right", "dim-40-v-72", "relative-bias"])
def test_fold_into_other_keys(name, device) -> None:
    """What another shard found, as rows of a longer result, askew; a row that neither sees stays 0 with LSE -inf."""
    x = lowered(small(name), device)
    standard, oracle = (attend(x, dtype) for dtype in (torch.float32, torch.float64))
    b, n, h, e = standard[0].shape
    other, other_lse = (torch.randn_like(t) for t in standard)
    other[:, 1], other_lse[:, :, 1] = 0, -torch.inf
    standard = rl.merge((other, other_lse), standard)
    oracle = rl.merge((other.double(), other_lse.double()), oracle)
    longer, longer_lse = (
        torch.full(shape, 7.0, device=device) for shape in ((b, n + 40, h, e + 3), (b, h, n + 40))
    )
    x.into = longer[:, 3 : n + 3, :, :e], longer_lse[:, :, 3 : n + 3]
    for t, value in zip(x.into, (other, other_lse), strict=True):
        t.copy_(value)
    forward.forward(x, PLAN)
    named = (dict(zip(("out", "lse"), pair, strict=True)) for pair in (x.into, standard, oracle))
    check(f"into {name}", *named, torch.float32)
    assert (longer[:, :3] == 7).all()
    assert (longer[:, n + 3 :] == 7).all()
    assert (longer[..., e:] == 7).all()
    assert (longer_lse[:, :, n + 3 :] == 7).all()


@pytest.mark.parametrize("dims", [(40, 72), (36, 35)])
def test_strides_without_meaning(dims, device) -> None:
    """A dimension of one entry may have any: kernels take the others for multiples of a row's part."""
    x = prepare(*(torch.randn(1, 5, 1, d, device=device) for d in (dims[0], *dims)), Options())
    x = arrays_of(x)
    want = forward.forward(x, PLAN)
    for name in "qkv":
        t = getattr(x, name)
        setattr(x, name, t.as_strided(t.shape, (7, t.stride(1), 3, 1)))
    assert A.rows_contiguous(x.q) is x.q
    for got, other in zip(forward.forward(x, PLAN), want, strict=True):
        assert torch.equal(got, other)


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("name", ["bottom-right", "dim-40-v-72"])
def test_gradients_added_to_others(name, fused, device) -> None:
    """To parts of longer and wider tensors, whose neighbours stay; delta is known, and out is not read."""
    x = lowered(small(name), device)
    out, lse = forward.forward(x, PLAN)
    dout = torch.randn_like(out)
    plan = Plan(block_q=32, block_k=32, fused=fused)
    want = backward.backward(x, plan, PLAN, Saved(out, lse), dout, None, Wanted(), False)
    longer = [
        torch.randn(t.shape[0], t.shape[1] + 9, t.shape[2], t.shape[3] + 3, device=device)
        for t in (x.q, x.k, x.v)
    ]
    before = [t.clone() for t in longer]
    delta = (dout * out).sum(-1).transpose(1, 2)
    saved = Saved(torch.full_like(out, torch.nan), lse, delta)
    parts = [t[:, 2 : t.shape[1] - 7, :, :-3] for t in longer]
    fresh = [torch.full_like(t, torch.nan) for t in parts[1:]]
    for sums in (Sums(*parts), Sums(parts[0], *fresh, anew=True)):
        x.sums = sums
        got = backward.backward(x, plan, PLAN, saved, dout, None, Wanted(), False)
        assert all(a is b for a, b in zip(got[:3], sums[:3], strict=True))
    for one, other in zip(fresh, want[1:3], strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
    for t, old, grad, times in zip(longer, before, want[:3], (2, 1, 1), strict=True):
        old[:, 2 : t.shape[1] - 7, :, :-3] += times * grad
        torch.testing.assert_close(t, old, atol=1e-5, rtol=1e-5)


def test_rows_and_keys_of_no_sequence(device) -> None:
    """Beyond cu_seqlens' end: out 0, LSE -inf, gradients 0, whatever lies there."""
    x = lowered(small("packed"), device)
    pad = 70
    wide = [torch.cat([t, t.new_full((pad, *t.shape[1:]), 3.0)]) for t in (x.q, x.k, x.v)]
    x.q, x.k, x.v = wide
    out, lse = forward.forward(x, PLAN)
    assert (out[-pad:] == 0).all()
    assert (lse[:, -pad:] == -torch.inf).all()
    for fused in (0, 1):
        plan = Plan(block_q=32, block_k=32, fused=fused)
        grads = backward.backward(
            x, plan, PLAN, Saved(out, lse), torch.ones_like(out), None, Wanted(), False
        )
        for grad in grads[:3]:
            assert grad[:-pad].any()
            assert (grad[-pad:] == 0).all()


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "paged"])
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_keys_in_a_cache(paged, ragged, device) -> None:
    """Each sequence equals attention on its own keys."""
    torch.manual_seed(0)
    lens, rows, page = [37, 5, 0], [4, 9, 2] if ragged else [6, 6, 6], 8
    lens_k = torch.tensor(lens, dtype=torch.int32, device=device)
    k, v = (torch.randn(3, 48, 2, d, device=device) for d in (32, 16))
    q = torch.randn(sum(rows), 4, 32, device=device)
    x = lowered(find("causal"), device)
    x.k, x.v, x.lens_k, x.len_q, x.len_k = k, v, lens_k, max(rows), 48
    x.q = q if ragged else q.unflatten(0, (3, 6))
    if ragged:
        x.cu_q = torch.tensor([0, *rows], device=device).cumsum(0).int()
    if paged:
        order = torch.randperm(3 * 6, device=device)
        x.page_table = order.argsort().int().view(3, 6)
        x.k, x.v = (t.reshape(18, page, 2, -1)[order].contiguous() for t in (k, v))
    x.scale, x.band = 0.2, x.band._replace(offset=0, right=0)
    out, lse = forward.forward(x, PLAN)
    first = 0
    for b, (n, m) in enumerate(zip(rows, lens, strict=True)):
        part = slice(first, first + n)
        alone = q[None, part], k[b : b + 1, :m], v[b : b + 1, :m]
        standard, oracle = (
            dict(zip(("out", "lse"), dense(alone, {"causal": True, "scale": 0.2}, t), strict=True))
            for t in (torch.float32, torch.float64)
        )
        got = (out[part], lse[:, part]) if ragged else (out[b], lse[b])
        named = {name: t[None] for name, t in zip(("out", "lse"), got, strict=True)}
        check(f"sequence {b}", named, standard, oracle, torch.float32)
        first += n


def test_dropout_bits(device) -> None:
    """The kernel drops what `dropout.kept` says: with v the identity, out shows which weights stayed."""
    x = lowered(find("dropout"), device)
    x.q, x.k = (torch.zeros(2, n, h, 16, device=device) for n, h in ((40, 4), (48, 2)))
    x.v = torch.eye(48, device=device)[None, :, None].expand(2, 48, 2, 48).contiguous()
    x.len_q, x.len_k, x.seed = 40, 48, torch.tensor(-(2**35) + 11, device=device)
    out, _ = forward.forward(x, PLAN)
    stream, row, key = (torch.arange(n, device=device) for n in (8, 40, 48))
    stream, row, key = stream.view(2, 1, 4, 1), row.view(1, -1, 1, 1), key.view(1, 1, 1, -1)
    assert torch.equal(out > 0, dropout.kept(x.seed, stream, row, key, x.dropout_p))


def test_lengths_are_clamped(device) -> None:
    """Lengths beyond the tensors read nothing outside of them."""
    x = lowered(small("packed"), device)
    x.cu_q, x.cu_k = x.cu_q + 1000, x.cu_k + 1000
    out, _ = forward.forward(x, PLAN)
    assert out.shape[0] == x.q.shape[0]


def test_a_mod_without_source_is_refused() -> None:
    q = torch.randn(1, 8, 1, 16)
    mod = rl.ScoreMod(lambda s, q, k, head, args, math: s)
    with pytest.raises(rl.Unsupported, match="lambda"):
        rl.attention(q, q, q, score_mod=mod, backend="triton")


def _twice(score, q, k, head, args, math):
    return score * 2.0


def test_a_mod_without_arguments(device) -> None:
    q = torch.randn(1, 24, 2, 16, device=device)
    got = call((q, q, q), {"score_mod": rl.ScoreMod(_twice), "backend": "triton"})
    beside_the_formula("twice", got, (q, q, q), {"scale": 0.5})


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_odd_scales(scale, device) -> None:
    tensors = tuple(torch.randn(3, 1, 24, 2, 16, device=device))
    options = {"scale": scale, "causal": True}
    got = call(tensors, {**options, "backend": "triton"})
    beside_the_formula(f"scale {scale}", got, tensors, options)


def beside_the_formula(name, got, tensors, options) -> None:
    """Out and LSE keep the budget of fp32."""
    standard, oracle = (dense(tensors, options, t) for t in (torch.float32, torch.float64))
    named = (dict(zip(("out", "lse"), pair, strict=True)) for pair in (got, standard, oracle))
    check(name, *named, torch.float32)


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("shape", [(2, 2, 1, 48), (2, 2, 40, 1), (1, 1, 1, 1)], ids=str)
def test_gradient_of_a_shared_bias(shape, fused, device) -> None:
    """One bias for all rows, or all keys: every tile adds to it."""
    case = replace(
        find("bias"),
        heads=2,
        kv_heads=1,
        options={"bias": lambda g: torch.randn(shape, generator=g)},
    )
    with rl.using(plan=Plan(block_q=32, block_k=32, fused=fused)):
        agree(case, torch.float32, device)
        if not fused:
            agree(case, torch.float32, device, deterministic=True)
