"""Laws that hold whatever the backend: merging, splitting, causality, permutation, empty rows, specials."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relampago as rl
from relampago.plan import Plan
from relampago.shards import Rows, delta_of

BACKENDS = ("cpu", "reference")
lengths = st.integers(1, 90)


def make(len_q, len_k, seed=0, heads=4, kv=2, dim=16, dtype=torch.float64, batch=2):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, len_q, heads, dim), (batch, len_k, kv, dim), (batch, len_k, kv, dim))
    return tuple(torch.randn(s, generator=g, dtype=dtype) for s in shapes)


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # fp64: rounding only


@settings(max_examples=40, deadline=None)
@given(
    lengths,
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(BACKENDS),
)
def test_splitting_keys_anywhere_and_merging_equals_not_splitting(
    len_q, pieces, causal, backend
) -> None:
    len_k = sum(pieces)
    q, k, v = make(len_q, len_k)
    whole = rl.attention(q, k, v, causal=causal, return_lse=True, backend=backend)
    parts, start = [], 0
    for n in pieces:
        offset = len_k - len_q - start
        part = rl.partial(
            q,
            k[:, start : start + n],
            v[:, start : start + n],
            causal=causal,
            offset=offset,
            backend=backend,
        )
        parts.append(part)
        start += n
    merged = rl.merge(*parts)
    for a, b in zip(whole, merged, strict=True):
        near(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_into_rows_of_a_longer_result(backend) -> None:
    """Shards in any order, one of them empty, some rows that see none of a shard; neighbours stay as they are."""
    q, k, v = make(37, 64)
    want = rl.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    batch, _, heads, _ = q.shape
    out, lse = q.new_zeros(batch, 80, heads, v.shape[3]), q.new_full((batch, heads, 80), -torch.inf)
    out[:, 57:], lse[:, :, 57:] = 7.0, 7.0
    into = out[:, 20:57], lse[:, :, 20:57]
    for start, end in ((48, 64), (0, 20), (30, 30), (20, 48)):
        found = rl.partial(
            q, k[:, start:end], v[:, start:end], causal=True, offset=64 - 37 - start, into=into,
            backend=backend,
        )  # fmt: skip
        assert found is into
    for a, b in zip(want, into, strict=True):
        near(a, b)
    assert (out[:, 57:] == 7).all()
    assert (out[:, :20] == 0).all()
    assert (lse[:, :, 57:] == 7).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_partial_into_refuses_what_would_lose_a_gradient(name) -> None:
    q, k, v = make(8, 8)
    tensors = {"q": q, "k": k, "v": v, "bias": q.new_zeros(8, 8), "sinks": q.new_zeros(4)}
    tensors[name].requires_grad_()
    into = torch.zeros_like(q), q.new_full((2, 4, 8), -torch.inf)
    with pytest.raises(rl.InvalidInput, match="into is given while gradients are recorded"):
        rl.partial(**tensors, into=into)
    with torch.no_grad():
        assert rl.partial(**tensors, into=into) is into


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_backward_sums_to_the_whole(backend) -> None:
    q, k, v = (t.requires_grad_() for t in make(37, 64))
    out, lse = rl.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    dq, dks, dvs = 0, [], []
    with torch.no_grad():
        for start in range(0, 64, 16):
            part = (k[:, start : start + 16], v[:, start : start + 16])
            shard = rl.partial_backward(
                dout,
                q,
                *part,
                out,
                lse,
                dlse=dlse,
                causal=True,
                offset=64 - 37 - start,
                backend=backend,
            )
            dq = dq + shard[0]
            dks.append(shard[1])
            dvs.append(shard[2])
    for a, b in zip(want, (dq, torch.cat(dks, 1), torch.cat(dvs, 1)), strict=True):
        near(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("known", [False, True])
def test_gradients_of_shards_add_up_in_place(backend, known) -> None:
    """In rows of longer tensors, by `into` and by `Rows`, whose delta is given or found; some rows by some shards."""
    q, k, v = (t.requires_grad_() for t in make(37, 64))
    out, lse = rl.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    q, k, v, out, lse = (t.detach() for t in (q, k, v, out, lse))
    longer = [t.new_full((t.shape[0], 80, *t.shape[2:]), 7.0) for t in (q, k, v)]
    dq, dk, dv = (t[:, 5 : 5 + n].zero_() for t, n in zip(longer, (37, 64, 64), strict=True))
    more = {"delta": delta_of(out, dout, dlse, lse.dtype)} if known else {"dlse": dlse}
    rows = Rows(dout, q, k, v, out, lse, backend=backend, **more)
    for start, end, first in ((0, 30, 0), (30, 40, 0), (40, 64, 11)):
        keys, at = (k[:, start:end], v[:, start:end]), {"causal": True}
        into = dq, dk[:, start:end], dv[:, start:end]
        at["offset"] = 64 - 37 - start
        found = rl.partial_backward(
            dout, q, *keys, out, lse, dlse=dlse, into=into, backend=backend, **at
        )
        assert all(a is b for a, b in zip(found, into, strict=True))
        only = rl.partial_backward(
            dout, q, *keys, out, lse, dlse=dlse, into=(torch.zeros_like(dq), None, None), backend=backend, **at,
        )  # fmt: skip
        near(only[1], into[1])
        at["offset"] += first
        near(rows.add(slice(first, 37), *keys, **at)[1], into[2])
    for a, b in zip(want, (dq, dk, dv), strict=True):
        near(a, b)
    near(rows.finish(), want[0])
    for t, n in zip(longer, (37, 64, 64), strict=True):
        assert (t[:, :5] == 7).all()
        assert (t[:, n + 5 :] == 7).all()


def test_partial_of_low_precision_is_fp32() -> None:
    q, k, v = make(8, 8, dtype=torch.bfloat16)
    out, lse = rl.partial(q, k, v)
    assert out.dtype == lse.dtype == torch.float32
    grads = rl.partial_backward(out, q, k, v, out, lse)
    assert all(g.dtype == torch.float32 for g in grads)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 9))
def test_merge_is_associative_and_commutative(order, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(2, 5, 3, 4, generator=g, dtype=torch.float64),
         torch.randn(2, 3, 5, generator=g, dtype=torch.float64) * 20)
        for _ in range(4)
    ]  # fmt: skip
    flat = rl.merge(*parts)
    nested = rl.merge(rl.merge(parts[0], parts[1]), rl.merge(parts[2], parts[3]))
    shuffled = rl.merge(*(parts[i] for i in order))
    for a, b, c in zip(flat, nested, shuffled, strict=True):
        near(a, b)
        near(a, c)


def test_merge_has_an_identity_and_gradients() -> None:
    out = torch.randn(1, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    nothing = (torch.zeros_like(out), torch.full_like(lse, -math.inf))
    merged = rl.merge(nothing, (out, lse), nothing)
    near(merged[0], out)
    near(merged[1], lse)
    other = (torch.randn_like(out).detach(), torch.randn_like(lse).detach())
    torch.autograd.gradcheck(lambda o, l: rl.merge((o, l), other), (out, lse))
    both = rl.merge(nothing, nothing)
    assert both[0].abs().max() == 0
    assert both[1].max() == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_output_ignores_future_keys_bit_for_bit(backend, dtype) -> None:
    q, k, v = make(100, 100, dtype=dtype)
    before = rl.attention(q, k, v, causal=True, backend=backend)
    k2, v2 = k.clone(), v.clone()
    k2[:, 60:] += 3
    v2[:, 60:] *= -2
    after = rl.attention(q, k2, v2, causal=True, backend=backend)
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.equal(before[:, 60:], after[:, 60:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_the_batch_permutes_the_output(backend) -> None:
    q, k, v = make(70, 70, batch=4, dtype=torch.float32)
    order = torch.tensor([2, 0, 3, 1])
    out = rl.attention(q, k, v, causal=True, backend=backend)
    assert torch.equal(
        out[order], rl.attention(q[order], k[order], v[order], causal=True, backend=backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_no_key(backend) -> None:
    q, k, v = (t.requires_grad_() for t in make(20, 8))
    out, lse = rl.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert out[:, :12].abs().max() == 0
    assert (lse[..., :12] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[..., 12:].sum(), (q, k, v))
    assert dq[:, :12].abs().max() == 0
    assert all(t.isfinite().all() for t in (dq, dk, dv))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70))
def test_tiling_changes_rounding_only(block_q, block_k) -> None:
    q, k, v = make(61, 67)
    options = {"causal": True, "dropout_p": 0.2, "dropout_seed": 3, "softcap": 4.0}
    want = rl.attention(q, k, v, **options)
    with rl.using(plan=Plan(block_q=block_q, block_k=block_k), backend="cpu"):
        near(rl.attention(q, k, v, **options), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_inf_and_nan_give_what_standard_attention_gives(backend, special, where) -> None:
    tensors = dict(zip("qkv", make(9, 11, dtype=torch.float32, heads=2), strict=True))
    tensors[where][0, 4, 1, 3] = special
    got = rl.attention(*tensors.values(), backend=backend)
    q, k, v = (t.transpose(1, 2) for t in tensors.values())
    want = torch.softmax(q @ k.transpose(-1, -2) * 16**-0.5, -1) @ v
    want = want.transpose(1, 2)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_give_finite_gradients(backend, dtype) -> None:
    q, k, v = make(64, 64, dtype=dtype)
    q, k, v = (t.mul(1e3).requires_grad_() for t in (q, k, v))
    out = rl.attention(q, k, v, causal=True, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_of_packed_tensors_is_untouched_by_garbage(backend) -> None:
    q, k, v = make(30, 30, batch=1, dtype=torch.float32)
    q, k, v = (t[0].clone() for t in (q, k, v))
    for t in (q, k, v):
        t[20:] = math.nan
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = rl.attention_varlen(
        q, k, v, cu, cu, 12, 12, causal=True, return_lse=True, backend=backend
    )
    assert out[20:].abs().max() == 0
    assert (lse[:, 20:] == -math.inf).all()
    dout = torch.ones_like(out)
    dout[20:] = math.nan
    for grad in torch.autograd.grad(out, (q, k, v), dout):
        assert grad[20:].abs().max() == 0
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_equals_each_alone(backend) -> None:
    cu = torch.tensor([0, 8, 8, 30], dtype=torch.int32)
    q, k, v = (t[0] for t in make(30, 30, batch=1))
    out = rl.attention_varlen(q, k, v, cu, cu, 22, 22, causal=True, backend=backend)
    for a, b in ((0, 8), (8, 30)):
        alone = rl.attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True, backend=backend)
        near(out[a:b], alone[0])
