"""relampago.flash_attn's dense and packed functions against the formula, and what they refuse."""

from __future__ import annotations

import inspect

import pytest
import torch
from budget import check
from integrations.formula import attend, both, seen

import relampago as rl
from relampago import flash_attn as fa
from relampago.flash_attn import interface3 as fa3
from relampago.flash_attn import rotary

B, H, G, D = 2, 4, 2, 16
HALF = torch.bfloat16
SLOPES = torch.linspace(0.05, 0.4, H)


def tensors(rows=9, keys=13, dtype=torch.float32, dim_v=D):
    g = torch.Generator().manual_seed(3)
    shapes = ((B, rows, H, D), (B, keys, G, D), (B, keys, G, dim_v))
    return tuple(torch.randn(s, generator=g).to(dtype) for s in shapes)


OPTIONS = {
    "plain": ({}, {}, {}),
    "causal": ({"causal": True}, {"causal": True}, {}),
    "scale": ({"softmax_scale": 0.3}, {}, {"scale": 0.3}),
    "window": ({"window_size": (3, 2)}, {"left": 3, "right": 2}, {}),
    "left": ({"window_size": (4, -1), "causal": True}, {"causal": True, "left": 4}, {}),
    "softcap": ({"softcap": 1.5, "causal": True}, {"causal": True}, {"softcap": 1.5}),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"causal": True}, {"alibi": SLOPES}),
    "chunk": ({"attention_chunk": 4, "causal": True}, {"causal": True, "chunk": 4}, {}),
    "chunk-both-ways": ({"attention_chunk": 5}, {"chunk": 5}, {}),
    "sinks": ({"s_aux": SLOPES * 3}, {}, {"sinks": SLOPES * 3}),
}  # name: (flash-attn's words, the mask's, the formula's)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(9, 13), (13, 9), (1, 13)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name, shape, dtype) -> None:
    words, mask, rest = OPTIONS[name]
    q, k, v = tensors(*shape, dtype)
    out, lse, nothing = fa.flash_attn_func(q, k, v, return_attn_probs=True, **words)
    assert nothing.numel() == 0
    assert torch.equal(out, fa.flash_attn_func(q, k, v, **words))
    check(name, {"out": out, "lse": lse}, *both(q, k, v, seen(*shape, **mask), dtype=dtype, **rest), dtype)  # fmt: skip


@pytest.mark.parametrize("name", ["causal", "softcap", "alibi", "chunk"])
def test_gradients(name) -> None:
    words, mask, rest = OPTIONS[name]
    leaves = [t.double().requires_grad_() for t in tensors()]
    g = torch.randn(B, 9, H, D, dtype=torch.float64)
    got = torch.autograd.grad(fa.flash_attn_func(*leaves, deterministic=True, **words), leaves, g)
    want = torch.autograd.grad(attend(*leaves, seen(9, 13, **mask), **rest)[0], leaves, g)
    torch.testing.assert_close(got, want)


def test_packed_forms_are_views_of_the_same() -> None:
    q, k, v = tensors(9, 9)
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2).requires_grad_()
    want = fa.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, kv, causal=True), want)
    got = fa.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(got, want)
    assert torch.autograd.grad(got.sum(), qkv)[0].shape == qkv.shape


CU_Q, CU_K = (torch.tensor(t, dtype=torch.int32) for t in ([0, 5, 5, 12, 13], [0, 8, 11, 18, 27]))


def packed(dtype=torch.float32):
    g = torch.Generator().manual_seed(4)
    return tuple(
        torch.randn(s, generator=g).to(dtype) for s in ((13, H, D), (27, G, D), (27, G, D))
    )


def pieces(q, k, v, cu_q=CU_Q, cu_k=CU_K):
    for b in range(len(cu_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        yield rows, q[rows], k[keys], v[keys]


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name, paged) -> None:
    words, mask, rest = OPTIONS[name]
    q, k, v = packed()
    arguments, table = (q, k, v), None
    if paged:
        pages_k, pages_v, table = in_pages(k, v, CU_K, 4)
        arguments = (q, pages_k, pages_v)
    out, lse, _ = fa.flash_attn_varlen_func(
        *arguments, CU_Q, CU_K, 7, 9, return_attn_probs=True, block_table=table, **words
    )
    for rows, *one in pieces(q, k, v):
        if not len(one[0]):
            continue
        results = both(*one, seen(len(one[0]), len(one[1]), **mask), dtype=torch.float32, **rest)
        check(name, {"out": out[rows], "lse": lse[:, rows]}, *results, torch.float32)


def in_pages(k, v, cu, page):
    """The keys in pages that lie in no order, with whatever else in the rest of them."""
    lengths = cu.diff().tolist()
    most = -(-max(lengths) // page)
    order = torch.randperm(len(lengths) * most + 2, generator=torch.Generator().manual_seed(1))
    table = order[: len(lengths) * most].view(len(lengths), most).int()
    pages = [torch.full((len(order), page, *t.shape[1:]), torch.nan) for t in (k, v)]
    for b, n in enumerate(lengths):
        for j in range(n):
            for to, t in zip(pages, (k, v), strict=True):
                to[table[b, j // page], j % page] = t[int(cu[b]) + j]
    return *pages, table


def test_varlen_gradients_and_packed_forms() -> None:
    q, k, v = (t.double().requires_grad_() for t in packed())
    out = fa.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 7, 9, causal=True)
    want = torch.cat(
        [
            attend(*one, seen(len(one[0]), len(one[1]), causal=True))[0]
            for _, *one in pieces(q, k, v)
        ]
    )
    g = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g)
    )
    kv = torch.stack([k, v], 1)
    assert torch.equal(
        fa.flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 7, 9, causal=True), out
    )
    q = q.detach()
    qkv = torch.stack([q, q * 2, q + 1], 1)
    torch.testing.assert_close(
        fa.flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 7),
        fa.flash_attn_varlen_func(q, q * 2, q + 1, CU_Q, CU_Q, 7, 7),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_seqused(causal) -> None:
    q, k, v = (t.double().requires_grad_() for t in packed())
    used_q, used_k = (torch.tensor(t, dtype=torch.int32) for t in ([3, 0, 7, 1], [8, 2, 0, 4]))
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 7, 9, causal=causal, seqused_q=used_q, seqused_k=used_k, return_attn_probs=True
    )  # fmt: skip
    want = torch.zeros_like(out)
    for b, (rows, *one) in enumerate(pieces(q, k, v)):
        few = (one[0][: used_q[b]], *(t[: used_k[b]] for t in one[1:]))
        if len(few[0]) and len(few[1]):
            part, total = attend(*few, seen(len(few[0]), len(few[1]), causal=causal))
            want[rows.start : rows.start + len(part)] = part
            torch.testing.assert_close(lse[:, rows.start : rows.start + len(part)].double(), total)
    torch.testing.assert_close(out, want)
    got, expected = (torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, want))
    torch.testing.assert_close(got, expected)
    pages_k, pages_v, table = in_pages(k.detach(), v.detach(), CU_K, 4)
    paged = fa.flash_attn_varlen_func(
        q, pages_k.double(), pages_v.double(), CU_Q, CU_K, 7, 9, causal=causal, seqused_q=used_q,
        seqused_k=used_k, block_table=table,
    )  # fmt: skip
    torch.testing.assert_close(paged, out.detach())


def test_dropout_shows_what_it_dropped() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(9, 13, torch.float64))
    torch.manual_seed(1)
    out, _, s = fa.flash_attn_func(q, k, v, dropout_p=0.3, causal=True, return_attn_probs=True)
    torch.manual_seed(1)
    again, _, _ = fa.flash_attn_func(q, k, v, dropout_p=0.3, causal=True, return_attn_probs=True)
    assert torch.equal(out, again)
    mask = seen(9, 13, causal=True)
    p, _ = attend(q, k, torch.eye(13)[:, None].expand(B, -1, G, -1), mask)
    torch.testing.assert_close(s.abs(), p.transpose(1, 2))
    dropped = (s < 0).sum() / (p > 0).sum()
    assert 0.2 < dropped < 0.4
    want, _ = attend(q, k, v, mask, kept=(s > 0) / 0.7)
    torch.testing.assert_close(out, want)
    got, expected = (torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, want))
    torch.testing.assert_close(got, expected)


def test_packed_dropout_shows_what_it_dropped() -> None:
    q, k, v = packed(torch.float64)
    out, _, s = fa.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 7, 9, dropout_p=0.4, causal=True, return_attn_probs=True
    )
    assert s.shape == (4, H, 7, 9)
    for b, (rows, *one) in enumerate(pieces(q, k, v)):
        n, m = len(one[0]), len(one[1])
        mask = seen(n, m, causal=True)
        want, _ = attend(*one, mask, kept=(s[b, :, :n, :m] > 0) / 0.6)
        torch.testing.assert_close(out[rows], want)
        assert (s[b, :, n:] == 0).all()


def test_flash_attention_3_order() -> None:
    q, k, v = tensors(9, 9)
    want = fa.flash_attn_func(q, k, v, softmax_scale=0.2, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, 0.2, True), want)
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = torch.stack([out, out]), torch.stack([lse, lse]).transpose(-1, -2)
    merged, total = fa3.flash_attn_combine(*parts)
    torch.testing.assert_close(
        (merged, total), (out, lse.transpose(-1, -2) + torch.tensor(2.0).log())
    )
    heads = [t.repeat_interleave(2, 2) for t in (k, v)]
    assert torch.equal(
        fa3.flash_attn_qkvpacked_func(torch.cat([q, *heads], 2), causal=True, num_heads_q=H),
        fa3.flash_attn_func(q, *heads, causal=True),
    )
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    torch.testing.assert_close(
        fa3.flash_attn_varlen_func(*flat, cu, cu, 9, 9, causal=True).view_as(q),
        fa.flash_attn_func(q, k, v, causal=True),
    )
    torch.testing.assert_close(
        fa3.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=7, causal=True),
        fa.flash_attn_func(q[:, :1], k[:, :7], v[:, :7]),
    )


def test_values_in_the_scores() -> None:
    q, k, v = (t.double() for t in tensors(9, 13))
    qv = torch.randn(B, 9, H, D, dtype=torch.float64)
    got = fa.flash_attn_func(q, k, v, qv=qv, causal=True)
    want, _ = attend(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, seen(9, 13, causal=True))
    torch.testing.assert_close(got, want)


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(9, 9)
    compiled = torch.compile(
        lambda q, k, v: fa.flash_attn_func(
            q * 2, k, v, causal=True, window_size=(4, 0), softcap=5.0
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    want = fa.flash_attn_func(q * 2, k, v, causal=True, window_size=(4, 0), softcap=5.0)
    torch.testing.assert_close(compiled(q, k, v), want)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: fa.flash_attn_func(q, k[..., :8], v), "k has another head dim"),
        (lambda q, k, v: fa.flash_attn_func(q[0], k, v), "q has 3 and k 4 dimensions"),
        (lambda q, k, v: fa.flash_attn_func(q, k.half(), v), "k has dtype torch.float16"),
        (lambda q, k, v: fa.flash_attn_func(q, k[:, :, :1].repeat(1, 1, 3, 1), v), "v has another number of heads"),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, window_size=3), "window_size is 3; expected a pair"),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, dropout_p=1.5), "dropout_p is 1.5"),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(3)), "alibi_slopes has shape"),
        (lambda q, k, v: fa.flash_attn_qkvpacked_func(q[:, :, None]), "qkv has shape"),
        (lambda q, k, v: fa.flash_attn_varlen_func(q[0], k[0], v[0], CU_Q.long(), CU_K, 7, 9), "cu_seqlens_q has"),
        (lambda q, k, v: fa.flash_attn_varlen_func(q[0], k[0], v[0], CU_Q, CU_K, 7, 9), "cu_seqlens_q ends at 13"),
    ],
)  # fmt: skip
def test_refusals_are_runtime_errors(call, words) -> None:
    for kind in (RuntimeError, rl.InvalidInput, fa.Refused):
        with pytest.raises(kind, match=words):
            call(*tensors())
    with pytest.raises(TypeError):
        fa.flash_attn_func(*tensors(), nonsense=1)


SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}  # flash-attn 2.8.4, flash_attn_interface.py, as written there


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name) -> None:
    given = inspect.signature(getattr(fa, name)).parameters.values()
    positional = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    text = " ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional
    )
    assert text == SIGNATURES[name]


@pytest.mark.parametrize("change", [
    ({"q": None}, "q is a NoneType; expected a tensor"), ({"v": None}, "v is a NoneType"),
    ({"k": [1.0]}, "k is a list; expected a tensor"), ({"window_size": ("a", 1)}, "window_size is"),
    ({"softcap": "x"}, "softcap is 'x'"), ({"attention_chunk": "x"}, "attention_chunk is 'x'"),
    ({"qv": torch.zeros(2, 5, 4, 16)}, r"qv is \(2, 5, 4, 16\) on cpu; expected \(2, 8, 4, 16\)"),
    ({"qv": 3}, "qv is a int; expected a tensor"),
], ids=lambda change: next(iter(change[0])))  # fmt: skip
def test_what_is_no_tensor_or_number(change) -> None:
    given, words = change
    tensors = {name: torch.zeros(2, 8, 4, 16) for name in "qkv"}
    with pytest.raises(fa.Refused, match=words):
        fa.flash_attn_func(**{**tensors, **given})


@pytest.mark.parametrize("cu", [None, [0, 8]], ids=str)
def test_cu_seqlens_are_tensors(cu) -> None:
    q = torch.zeros(8, 4, 16)
    with pytest.raises(fa.Refused, match=r"cu_seqlens_q is a .*; expected a tensor"):
        fa.flash_attn_varlen_func(q, q, q, cu, cu, 8, 8)


def test_rotary_offsets() -> None:
    x, table = torch.zeros(2, 8, 4, 16), torch.ones(8, 8)
    for offsets in (1.5, torch.zeros(3, dtype=torch.int32), torch.zeros(2)):
        with pytest.raises(fa.Refused, match="seqlen_offsets is"):
            rotary.apply_rotary_emb(x, table, table, seqlen_offsets=offsets)
