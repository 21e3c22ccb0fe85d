"""FlashAttention-3's FP8 tensors in relampago.flash_attn: e4m3 products, e4m3 caches, descales, and who cannot."""

from __future__ import annotations

import pytest
import torch
from budget import check
from integrations.formula import both, seen
from integrations.test_flash_attn_kvcache import Cache

import relampago as rl
from relampago import flash_attn as fa
from relampago.flash_attn import fp8
from relampago.flash_attn import interface3 as fa3
from relampago.problem import Device
from relampago.quant import E4M3

B, H, G, D = 3, 4, 2, 16
HALF = torch.bfloat16
ROWS, KEYS = (7, 1, 5), (9, 20, 5)
NAMES = ("q_descale", "k_descale", "v_descale")


def drawn(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def descales() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.rand(B, G, generator=g) + 0.5 for name in NAMES}


def wide(t: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """(L, heads, D) of one sequence times its scales (G,)."""
    one = t.double()
    return one if scale is None else one * scale.double().repeat_interleave(t.shape[-2] // G)[:, None]  # fmt: skip


def cu(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


PACKED = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"causal": True, "window_size": (4, 0)}, {"causal": True, "window": (4, 0)}),
    "softcap-sinks": (
        {"softcap": 2.0, "s_aux": torch.ones(H)},
        {"softcap": 2.0, "sinks": torch.ones(H)},
    ),
}  # name: flash-attn's words, relampago's


@pytest.mark.parametrize("name", PACKED)
def test_packed(name) -> None:
    """Products of e4m3, as the emulation has them, which is as near to fp64 as the dense emulation."""
    words, options = PACKED[name]
    q, k, v = drawn(13, H, D), drawn(34, G, D), drawn(34, G, D)
    packing, scales = (cu(ROWS), cu(KEYS), max(ROWS), max(KEYS)), descales()
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, *packing, return_attn_probs=True, **words, **scales)  # fmt: skip
    assert out.dtype == HALF
    same = {**options, **scales, "return_lse": True}
    ours = rl.attention_varlen(q, k, v, *packing, **same)
    assert all(torch.equal(a, b) for a, b in zip((out, lse), ours, strict=True))
    standard = rl.attention_varlen(q, k, v, *packing, backend="reference", **same)
    exact = [
        torch.cat([wide(t[a:e], s) for a, e, s in zip(c[:-1], c[1:], scales[n], strict=True)])
        for t, c, n in zip((q, k, v), (cu(ROWS), cu(KEYS), cu(KEYS)), NAMES, strict=True)
    ]
    oracle = rl.attention_varlen(*exact, *packing, return_lse=True, **options)
    named = [dict(zip(("out", "lse"), found, strict=True)) for found in ((out, lse), standard, oracle)]  # fmt: skip
    check(name, *named, HALF)


def test_dense_and_packed_are_one_arithmetic() -> None:
    """Whatever is missing is 1; sequences that are used in part only are packed anew, e4m3 as they are."""
    q, k, v = drawn(2, 9, H, D), drawn(2, 9, G, D), drawn(2, 9, G, D)
    dense = fa3.flash_attn_func(q, k, v, causal=True)
    one = torch.ones(2, G)
    assert torch.equal(dense, rl.attention(q, k, v, causal=True, **dict.fromkeys(NAMES, one)))
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    whole = fa3.flash_attn_varlen_func(*flat, cu((9, 9)), cu((9, 9)), 9, 9, causal=True, k_descale=one)  # fmt: skip
    assert torch.equal(whole.view_as(dense), dense)
    used = torch.tensor([4, 9], dtype=torch.int32)
    some = fa3.flash_attn_varlen_func(
        *flat, cu((9, 9)), cu((9, 9)), 9, 9, seqused_q=used, seqused_k=used, causal=True
    ).view_as(dense)
    assert torch.equal(some[1], dense[1])
    assert torch.equal(some[0, :4], fa3.flash_attn_func(q[:1, :4], k[:1, :4], v[:1, :4], causal=True)[0])  # fmt: skip
    assert (some[0, 4:] == 0).all()


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    q, k, scales = drawn(B, 9, H, D), drawn(B, 9, G, D), descales()
    compiled = torch.compile(fa.flash_attn_func, fullgraph=True, backend="aot_eager")
    words = {"causal": True, **scales}
    assert torch.equal(compiled(q, k, k, **words), fa.flash_attn_func(q, k, k, **words))


def agree(label, out, lse, b, q, keys, values, scales, **mask) -> None:
    """One sequence against fp64, within the budget of bf16: a cache's numbers are exact."""
    of_q = scales["q_descale"][b] if q.dtype == E4M3 else None
    tensors = (wide(q, of_q), wide(keys, scales["k_descale"][b]), wide(values, scales["v_descale"][b]))  # fmt: skip
    results = both(*tensors, seen(len(q), len(keys), **mask), dtype=HALF)
    check(label, {"out": out, "lse": lse}, *results, HALF)


@pytest.mark.parametrize("dtype", [HALF, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("appends", [False, True], ids=["read", "append"])
@pytest.mark.parametrize("kind", ["room", "index", "page8", "leftpad"])
def test_a_cache_in_e4m3(kind, appends, dtype) -> None:
    cache, scales = Cache(kind, E4M3), descales()
    q, k, v = drawn(B, 3, H, D, dtype=dtype), drawn(B, 3, G, D), drawn(B, 3, G, D)
    fresh = {"k": k, "v": v} if appends else {}
    out, lse = fa.flash_attn_with_kvcache(
        q, cache.k, cache.v, **fresh, **cache.words, causal=True, return_softmax_lse=True, **scales
    )
    assert out.dtype == HALF
    for b, n in enumerate(cache.lengths):
        keys, values = cache.holds(b, n + 3 if appends else n)
        if appends:
            assert torch.equal(keys[-3:].float(), k[b].float())
            assert torch.equal(values[-3:].float(), v[b].float())
        if len(keys):
            agree(kind, out[b], lse[b], b, q[b], keys, values, scales, causal=True)
        else:
            assert (out[b] == 0).all()


@pytest.mark.parametrize("dtype", [HALF, E4M3], ids=["bf16", "e4m3"])
def test_pages_in_e4m3(dtype) -> None:
    """Packed queries against pages, by both names."""
    cache, scales = Cache("page8", E4M3), descales()
    q, lengths = drawn(13, H, D, dtype=dtype), cache.words["cache_seqlens"]
    words = {"causal": True, "window_size": (6, -1), **scales}
    table, ends = cache.words["block_table"], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    out, lse, _ = fa.flash_attn_varlen_func(
        q, cache.k, cache.v, cu(ROWS), ends.int(), 7, 32, block_table=table, return_attn_probs=True, **words
    )  # fmt: skip
    again = fa3.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu(ROWS), max_seqlen_q=7, **words
    )  # fmt: skip
    assert torch.equal(out, again)
    for b, n in enumerate(cache.lengths):
        rows = slice(*cu(ROWS)[b : b + 2].tolist())
        keys, values = cache.holds(b, n)
        if len(keys):
            agree("pages", out[rows], lse[:, rows], b, q[rows], keys, values, scales, causal=True, left=6)  # fmt: skip


def test_keys_stay_e4m3_where_the_machine_has_it(monkeypatch) -> None:
    """On Hopper products and caches, on Ada caches, on Ampere neither: there all becomes bf16, and nothing is lost."""
    q, k = drawn(B, 1, H, D), drawn(B, 8, G, D)
    given = tuple(descales().values())
    for arch, multiplies, stays in (("sm90", True, True), ("sm89", False, True), ("sm80", False, False)):  # fmt: skip
        monkeypatch.setattr(fp8, "machine", lambda _, arch=arch: Device("cuda", arch))
        assert (fp8.products(q, k, k, given, B, True) is not None) == multiplies
        assert fp8.products(q, k, k, given, B, False) is None
        found = fp8.readable(q, k, k, None, given, cached=True)
        assert found.q.dtype == HALF
        assert (found.k.dtype == E4M3, found.of_out is None) == (stays, stays)
        if stays:
            assert torch.equal(found.k_scale, given[0] * given[1])
            assert torch.equal(found.q.float(), q.float())


def called(**changed):
    """A call with a cache, of which one thing is changed."""
    cache = Cache("page8", E4M3)
    words = {**cache.words, **descales(), **changed}
    return fa.flash_attn_with_kvcache(words.pop("q", drawn(B, 1, H, D)), cache.k, cache.v, **words)


def packed(**changed):
    q, k = drawn(13, H, D), drawn(34, G, D)
    return fa.flash_attn_varlen_func(q, k, k, cu(ROWS), cu(KEYS), 7, 20, **{**descales(), **changed})  # fmt: skip


BAD = {
    "heads": (lambda: called(k_descale=torch.ones(B, H)), r"k_descale is \(3, 4\) .*expected \(3, 2\) torch.float32"),
    "no batch": (lambda: called(v_descale=torch.ones(G)), r"v_descale is \(2,\) .*expected \(3, 2\)"),
    "dtype": (lambda: packed(q_descale=torch.ones(B, G).double()), "q_descale is .* torch.float64 on cpu; expected"),
    "number": (lambda: packed(v_descale=0.5), r"v_descale is 0.5; expected a tensor \(3, 2\)"),
    "batch": (lambda: packed(k_descale=torch.ones(B + 1, G)), r"k_descale is \(4, 2\)"),
    "new keys": (lambda: called(k=drawn(B, 1, G, D, dtype=HALF), v=drawn(B, 1, G, D, dtype=HALF)),
                 "k is .* torch.bfloat16; expected .* torch.float8_e4m3fn"),
    "rotary": (lambda: called(k=drawn(B, 1, G, D), v=drawn(B, 1, G, D), rotary_cos=torch.ones(32, 8),
                              rotary_sin=torch.ones(32, 8)), "q is torch.float8_e4m3fn; expected bf16 or wider"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_refusals(call, message) -> None:
    with pytest.raises(fa.Refused, match=message):
        call()
