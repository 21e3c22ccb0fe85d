"""Flash decoding on tiny problems, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from budget import check

import relampago as rl
from relampago.api import Options, Packing, prepare
from relampago.backends.reference import attend
from relampago.backends.triton.decode import applies, decode
from relampago.backends.triton.forward import forward
from relampago.cache import KVCache, PagedKVCache
from relampago.flash_attn import flash_attn_with_kvcache
from relampago.op import arrays_of, problem_of
from relampago.plan import Plan
from relampago.quant import E4M3, emulation

B, G, H, D, E = 3, 2, 6, 16, 24
LENGTHS = (37, 0, 48)
PLAN = Plan(block_q=64, block_k=16)
PLAN_FORWARD = Plan(block_q=16, block_k=16)
OPTIONS = {
    "full": {"causal": False},
    "window": {"window": (9, 0)},
    "prefix": {"mask": rl.Prefix(30), "causal": False},
    "softcap-sinks": {"softcap": 3.0, "sinks": torch.linspace(-2, 2, H)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1, H)},
    "scale": {"scale": -0.3},
}


def filled(kind: str, dtype: torch.dtype, device: str, dim: int = D, dim_v: int = E):
    """A cache of this kind whose unfilled room is poisoned, and whose sequences have LENGTHS."""
    if kind == "cache":
        cache = KVCache(B, 53, G, dim, dim_v, dtype=dtype, device=device)
    else:
        page = int(kind.removeprefix("page"))
        pages, kinds = 150 // page + B, {"dtype": dtype, "device": device}
        cache = PagedKVCache(B, pages, page, G, dim, dim_v, most=64 // page, **kinds)
    g = torch.Generator().manual_seed(1)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    k, v = (torch.randn(B, 48, G, d, generator=g).to(device, dtype) for d in (dim, dim_v))
    counts = torch.tensor(LENGTHS, dtype=torch.int32)
    if isinstance(cache, PagedKVCache):
        cache.reserve(48)
        cache.page_table[0, -(-LENGTHS[0] // cache.page) :] = 10**6  # beyond the length: never read
        cache.page_table[1] = -5
        page = cache.page
        for b, n in enumerate(LENGTHS):
            for j in range(n):
                cache.k[cache.page_table[b, j // page], j % page] = k[b, j]
                cache.v[cache.page_table[b, j // page], j % page] = v[b, j]
    else:
        for b, n in enumerate(LENGTHS):
            cache.k[b, :n], cache.v[b, :n] = k[b, :n], v[b, :n]
    cache.lengths.copy_(counts)
    return cache


def placed(options: dict, device: str) -> dict:
    """Options with their tensors on a device."""
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in options.items()}


def arrays(kind: str, rows: int, dtype: torch.dtype, device: str, dims=(D, E), **options):
    """A call as the kernel gets it."""
    q = torch.randn(B, rows, H, dims[0], generator=torch.Generator().manual_seed(2)).to(
        device, dtype
    )
    options = {"causal": True, **options}
    options = placed(options, device)
    if kind == "dense":
        g = torch.Generator().manual_seed(3)
        k, v = (torch.randn(B, 48, G, d, generator=g).to(device, dtype) for d in dims)
        call = prepare(q, k, v, Options(**options))
    else:
        cache = filled(kind, dtype, device, *dims)
        call = prepare(q, cache.k, cache.v, Options(**options), cache=cache)
    assert applies(problem_of(call))
    return arrays_of(call)


def agree(x, dtype: torch.dtype, splits: int, plan: Plan = PLAN) -> None:
    got = dict(zip(("out", "lse"), decode(x, plan, splits=splits), strict=True))
    standard, oracle = (
        dict(zip(("out", "lse"), attend(x, kind), strict=True)) for kind in (dtype, torch.float64)
    )
    check("decode", got, standard, oracle, dtype)
    if x.lens_k is not None and x.sinks is None:
        assert (got["out"][1] == 0).all()
        assert (got["lse"][1] == -torch.inf).all()


@pytest.mark.parametrize("splits", [1, 5])  # 5: more than there are tiles of keys
@pytest.mark.parametrize(
    "kind", ["dense", "cache", "page32", "page7"]
)  # tiles in pages, pages in tiles
@pytest.mark.parametrize("rows", [1, 4])
def test_keys_wherever_they_lie(kind, rows, splits, device) -> None:
    agree(arrays(kind, rows, torch.float32, device), torch.float32, splits)


@pytest.mark.parametrize(("kind", "splits"), [("dense", 3), ("cache", 1), ("page7", 3)])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, kind, splits, device) -> None:
    for rows in (1, 3):
        agree(arrays(kind, rows, torch.float32, device, **OPTIONS[name]), torch.float32, splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half(dtype, splits, device) -> None:
    for kind in ("cache", "page16"):
        agree(arrays(kind, 2, dtype, device), dtype, splits)


def test_many_splits(device) -> None:
    """Most of them empty; all of a row's parts are read together."""
    agree(arrays("cache", 1, torch.float32, device), torch.float32, 40)


@pytest.mark.parametrize("dims", [(24, 16), (40, 72), (80, 48)])
def test_dims(dims, device) -> None:
    for splits in (1, 2):
        agree(arrays("page7", 1, torch.float32, device, dims), torch.float32, splits)


def test_more_rows_than_a_tile(device) -> None:
    """7 queries of 3 heads are 21 rows: two tiles of 16, the last one not full."""
    for kind, splits in (("cache", 1), ("page16", 2)):
        agree(
            arrays(kind, 7, torch.float32, device),
            torch.float32,
            splits,
            Plan(block_q=16, block_k=16),
        )


def test_dense_masks_and_biases(device) -> None:
    g = torch.Generator().manual_seed(4)
    bias = torch.randn(1, H, 1, 48, generator=g)
    mask = torch.rand(B, 1, 3, 48, generator=g) < 0.5
    asked = ((1, {"bias": bias}), (2, {"mask": mask}), (2, {"bias": bias, "causal": False}))
    for splits, options in asked:
        agree(arrays("dense", 3, torch.float32, device, **options), torch.float32, splits)


def test_documents(device) -> None:
    starts = torch.tensor([0, 20, 46], device=device)
    for splits in (1, 2):
        x = arrays("dense", 3, torch.float32, device, mask=rl.Document(starts))
        agree(x, torch.float32, splits)


def test_a_bias_of_the_least_number_keeps_its_weights(device) -> None:
    """LSE cannot carry the log of the sum beside finfo.min; the parts' maxima and sums can."""
    bias = torch.full((1, 1, 1, 48), torch.finfo(torch.float32).min)
    x = arrays("dense", 1, torch.float32, device, bias=bias)
    for splits in (1, 3):
        agree(x, torch.float32, splits)


def test_the_last_tile_is_masked_only_where_needed(device) -> None:
    """48 keys of a dense tensor in tiles of 16: nothing is masked, and nothing differs."""
    x = arrays("dense", 1, torch.float32, device)
    for block_k in (16, 32):
        agree(x, torch.float32, 1, Plan(block_q=16, block_k=block_k))


def test_views_of_a_fused_tensor(device) -> None:
    """Any strides: (B, heads, length, dim) seen as (B, length, heads, dim), and a slice of fused k and v."""
    x = arrays("dense", 2, torch.float32, device)
    fused = torch.cat([x.k, x.v], -1)
    x.q = x.q.transpose(1, 2).contiguous().transpose(1, 2)
    x.k, x.v = fused[..., :D], fused[..., D:]
    agree(x, torch.float32, 2)


@pytest.mark.parametrize("kind", ["cache", "page7"])
@pytest.mark.parametrize("name", ["window", "softcap-sinks"])
def test_packed_queries(kind, name, device) -> None:
    """Rows of several sequences in one tensor, as an engine has them: the forward kernel reads the cache."""
    cache = filled(kind, torch.float32, device)
    counts = (20, 0, 1)
    q = torch.randn(sum(counts), H, D, generator=torch.Generator().manual_seed(6)).to(device)
    cu = torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32)
    packing = Packing(cu, None, max(counts))
    options = Options(causal=True, **placed(OPTIONS[name], device))
    call = prepare(q, cache.k, cache.v, options, packing=packing, cache=cache)
    x = arrays_of(call)
    got = dict(zip(("out", "lse"), forward(x, PLAN_FORWARD), strict=True))
    standard, oracle = (
        dict(zip(("out", "lse"), attend(x, kind), strict=True))
        for kind in (torch.float32, torch.float64)
    )
    check("packed", got, standard, oracle, torch.float32)


@pytest.mark.parametrize("rows", [3, 20], ids=["decode", "forward"])
def test_chunks_in_the_drop_in(rows, device) -> None:
    """flash_attn's attention_chunk is a score mod: both kernels compile it, with a start per sequence and row."""
    cache = filled("page7", torch.float32, device)
    q = torch.randn(B, rows, H, D, generator=torch.Generator().manual_seed(6)).to(device)
    arguments = (q, cache.k, cache.v)
    words = {"cache_seqlens": cache.lengths, "block_table": cache.page_table, "causal": True}
    words.update(attention_chunk=8, return_softmax_lse=True)
    wide = tuple(t.double() for t in arguments)
    asked = (("triton", arguments), ("reference", arguments), ("reference", wide))
    found = (
        dict(zip(("out", "lse"), under(name, flash_attn_with_kvcache, *t, **words), strict=True))
        for name, t in asked
    )
    check("chunks", *found, torch.float32)


def under(backend, function, *args, **kwargs):
    with rl.using(backend=backend, plan=PLAN_FORWARD):
        return function(*args, **kwargs)


@pytest.mark.parametrize(("kind", "splits", "rows"), [
    ("cache", 1, 2), ("cache", 2, 2), ("page16", 1, 2), ("page16", 2, 1), ("page7", 1, 1), ("page7", 2, 2),
    ("cache", 1, 4), ("page16", 2, 3), ("page7", 2, 3), ("cache", None, 2), ("page7", None, 2), ("packed", None, 2),
])  # fmt: skip
def test_keys_in_e4m3(kind, splits, rows, device) -> None:
    """Scales per sequence and head; without splits by the forward kernel, as prompts are.

    bf16 queries of any size are multiplied as fp16. Two rows of three heads fit the tile of `decode_fp8.py`.
    """
    place = "page7" if kind == "packed" else kind
    x = arrays(place, rows, torch.float16, device, softcap=3.0 if place == "page7" else None)
    if kind == "cache":
        x = replace(x, q=x.q.bfloat16() * 2.0**20, scale=x.scale * 2.0**-20)
    scales = torch.linspace(0.1, 0.5, B * G, device=device).view(B, G, 1)
    x = replace(x, k=x.k.to(E4M3), v=x.v.to(E4M3), k_scale=scales, v_scale=2 * scales)
    if kind == "packed":
        cu = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device)
        x = replace(x, q=x.q.flatten(0, 1), cu_q=cu)
    found = forward(x, PLAN_FORWARD) if splits is None else decode(x, PLAN, splits=splits)
    got = dict(zip(("out", "lse"), found, strict=True))
    standard, oracle = (
        dict(zip(("out", "lse"), emulation.run(x, partial(attend, dtype=dtype)), strict=True))
        for dtype in (x.q.dtype, torch.float64)
    )
    check("decode", got, standard, oracle, x.q.dtype)
