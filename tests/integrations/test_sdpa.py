"""The SDPA drop-in against PyTorch's own function: shapes that broadcast, masks, gradients, refusals."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import relampago as rl
from relampago import answer
from relampago.integrations import sdpa
from relampago.integrations.sdpa.switch import TORCHS

ours = sdpa.scaled_dot_product_attention


def make(*shapes, dtype=torch.float64):
    g = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return tuple(torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes)


def same(tensors, **options) -> None:
    """Output and gradients, of the float mask too; in fp64, so that only roundings differ."""
    leaves = [*tensors]
    mask = options.get("attn_mask")
    if isinstance(mask, torch.Tensor) and mask.requires_grad:
        leaves.append(mask)
    with sdpa_kernel(SDPBackend.MATH):
        want = TORCHS(*tensors, **options)
        g = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
        slopes = torch.autograd.grad(want, leaves, g)
    got = ours(*tensors, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, g), slopes)


Q, K = (2, 4, 7, 8), (2, 4, 9, 8)
SHAPES = {
    "plain": (Q, K, K),
    "values": (Q, K, (2, 4, 9, 5)),
    "one": ((2, 4, 1, 8), K, K),
    "three": ((4, 7, 8), (4, 9, 8), (4, 9, 8)),
    "two": ((7, 8), (9, 8), (9, 8)),
    "five": ((3, 2, 4, 7, 8), (3, 2, 4, 9, 8), (3, 2, 4, 9, 8)),
    "broadcast batch": ((1, 4, 7, 8), K, K),
    "broadcast five": ((3, 1, 4, 7, 8), (2, 4, 9, 8), (1, 2, 4, 9, 8)),
    "one kv head": (Q, (2, 1, 9, 8), (2, 1, 9, 8)),
    "one query head": ((2, 1, 7, 8), K, K),
    "no keys": (Q, (2, 4, 0, 8), (2, 4, 0, 8)),
    "no rows": ((2, 4, 0, 8), K, K),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_shapes(name, causal) -> None:
    same(make(*SHAPES[name]), is_causal=causal)


@pytest.mark.parametrize("rows", [3, 9, 14])
def test_causal_is_aligned_to_the_top_left(rows) -> None:
    same(make((2, 4, rows, 8), K, K), is_causal=True, scale=0.7)


def test_like_calls_are_warm_and_keep_their_alignment(monkeypatch) -> None:
    anew = []
    prepare = answer.prepare
    monkeypatch.setattr(
        answer, "prepare", lambda *a, **o: anew.append(o["offset"]) or prepare(*a, **o)
    )
    tensors = make((2, 4, 3, 11), (2, 4, 6, 11), (2, 4, 6, 11))
    rows = [t.transpose(1, 2) for t in tensors]
    for _ in range(3):
        same(tensors, is_causal=True)
        with sdpa_kernel(SDPBackend.MATH):
            want = TORCHS(*tensors, attn_mask=torch.ones(3, 6, dtype=torch.bool).tril(3))
        torch.testing.assert_close(rl.attention(*rows, causal=True).transpose(1, 2), want)
    assert anew == [0, None]


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 4), (4, 1)], ids=str)
def test_enable_gqa(heads) -> None:
    k, v = ((2, n, 9, 8) for n in heads)
    same(make(Q, k, v), enable_gqa=True)


MASKS = ((7, 9), (1, 9), (4, 7, 9), (2, 1, 7, 9), (2, 1, 1, 9), (1, 4, 7, 1), (2, 4, 7, 9))


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "inf"])
def test_masks(shape, kind) -> None:
    g = torch.Generator().manual_seed(2)
    mask = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0, :] = False  # a row that sees nothing
    elif kind == "inf":
        mask = mask.masked_fill(mask < -0.5, -torch.inf)
    else:
        mask.requires_grad_()
    same(make(Q, K, K), attn_mask=mask)


def test_masks_of_other_ranks() -> None:
    three, five = (SHAPES[name] for name in ("three", "five"))
    mask = torch.rand(7, 9) > 0.3
    same(make(*three), attn_mask=torch.rand(4, 7, 9) > 0.3)
    same(make(*three), attn_mask=mask)
    for shape in ((7, 9), (2, 4, 7, 9), (3, 1, 4, 7, 9), (1, 1, 1, 7, 9)):
        same(make(*five), attn_mask=torch.rand(shape) > 0.3)


@pytest.mark.parametrize("make_mask", [causal_upper_left, causal_lower_right])
def test_causal_bias_objects(make_mask) -> None:
    q, k, v = make(Q, K, K)
    with torch.no_grad():
        mask = make_mask(7, 9)
        want = TORCHS(q, k, v, attn_mask=mask._materialize())
        torch.testing.assert_close(ours(q, k, v, attn_mask=mask), want)


def test_dropout() -> None:
    q, k, v = make((1, 2, 40, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    one = torch.eye(40, dtype=torch.float64).expand(1, 2, 40, 40)
    p, kept = ours(q, k, one), ours(q, k, one, dropout_p=0.25)
    dropped = kept == 0
    assert 0.2 < dropped.double().mean() < 0.3
    torch.testing.assert_close(kept[~dropped], (p / 0.75)[~dropped])
    torch.manual_seed(4)
    first = ours(q, k, v, dropout_p=0.5)
    torch.manual_seed(4)
    assert torch.equal(first, ours(q, k, v, dropout_p=0.5))
    nothing = ours(q, k, v, dropout_p=1.0)
    assert (nothing == 0).all()
    assert (torch.autograd.grad(nothing.sum(), q)[0] == 0).all()


@pytest.mark.parametrize("name", ["key", "attn_mask"])
def test_autocast_casts_before_dtypes_are_compared(name) -> None:
    tensors = {n: torch.randn(2, 4, 12, 16) for n in ("query", "key", "value")}
    tensors["attn_mask"] = torch.rand(12, 12)
    tensors[name] = tensors[name].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = ours(**tensors), TORCHS(**tensors)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_autocast_and_half() -> None:
    q, k, v = (t.detach().float() for t in make(Q, K, K))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(q, k, v).dtype == TORCHS(q, k, v).dtype == torch.bfloat16
    half = [t.bfloat16() for t in (q, k, v)]
    mask = torch.randn(7, 9)
    for m in (mask, mask.bfloat16()):
        assert ours(*half, attn_mask=m).dtype == torch.bfloat16


def jagged(lengths, heads, dim, layout=torch.jagged):
    g = torch.Generator().manual_seed(heads + dim)
    parts = [torch.randn(n, heads, dim, generator=g) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=layout), parts


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_jagged_nested_tensors(causal) -> None:
    t, parts = jagged([3, 7, 1], 4, 8)
    t.requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in (t, t * 2, t + 1))
    out = ours(q, k, v, is_causal=causal)
    assert out.is_nested
    assert out.shape[:2] == q.shape[:2]
    for got, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        q, k, v = (x.transpose(0, 1)[None].double() for x in (part, part * 2, part + 1))
        want = TORCHS(q, k, v, is_causal=causal)[0].transpose(0, 1)
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    out.transpose(1, 2).values().sum().backward()
    assert t.grad is not None
    assert t.grad.is_nested


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_cross_attention_and_strided() -> None:
    (a, parts), (b, others) = jagged([3, 7, 1], 4, 8), jagged([5, 2, 4], 2, 8)
    out = ours(a.transpose(1, 2), b.transpose(1, 2), b.transpose(1, 2))
    for got, q, k in zip(out.transpose(1, 2).unbind(), parts, others, strict=True):
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
        want = TORCHS(q, k, k, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    strided = torch.nested.nested_tensor([p.transpose(0, 1) for p in parts])
    for got, want in zip(ours(strided, strided, strided).unbind(), parts, strict=True):
        q = want.transpose(0, 1)
        torch.testing.assert_close(got, TORCHS(q, q, q), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="key has other lengths"):
        ours(a.transpose(1, 2), b.transpose(1, 2), b.transpose(1, 2), is_causal=True)
    with pytest.raises(RuntimeError, match="key is dense"):
        ours(a.transpose(1, 2), parts[0], parts[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": (2, 4, 9, 6)}, "key has head dim 6; expected 8"),
        ({"value": (2, 4, 8, 8)}, "value has length 8; expected 9"),
        ({"key": (2, 2, 9, 8), "value": (2, 2, 9, 8)}, r"sizes .* broadcast .* \(or enable_gqa=True\)"),
        ({"key": (3, 4, 9, 8)}, "key or value has sizes"),
        ({"query": (8,)}, "query has 1 dimensions"),
        ({"attn_mask": torch.ones(7, 8)}, r"attn_mask has shape \(7, 8\)"),
        ({"attn_mask": torch.ones(3, 1, 7, 9)}, "attn_mask has shape"),
        ({"attn_mask": torch.ones(7, 9, dtype=torch.int32)}, "attn_mask has dtype torch.int32"),
        ({"attn_mask": torch.ones(7, 9), "is_causal": True}, "expected None with is_causal=True"),
        ({"dropout_p": 1.5}, "dropout_p is 1.5"),
        ({"enable_gqa": True, "key": (2, 3, 9, 8)}, "key has 3 heads; expected a divisor"),
    ],
)  # fmt: skip
def test_what_torch_refuses_is_refused(change, words) -> None:
    arguments = {"query": Q, "key": K, "value": K, **change}
    arguments = {n: torch.randn(s) if isinstance(s, tuple) else s for n, s in arguments.items()}
    for function, match in ((TORCHS, None), (ours, words)):
        with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match=match):
            function(**arguments)
    with pytest.raises(RuntimeError, match="key has dtype"):
        ours(torch.randn(Q), torch.randn(K).double(), torch.randn(K))


def test_signature() -> None:
    names = (
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False"
    )
    found = inspect.signature(ours).parameters.values()
    text = " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found)
    assert text == names
    assert F.scaled_dot_product_attention is TORCHS
