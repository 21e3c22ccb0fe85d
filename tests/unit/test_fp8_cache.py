"""Decoding from keys and values in e4m3: casts on append, scales per head, refusals."""

from __future__ import annotations

import pytest
import torch
from budget import check

import relampago as rl
from relampago import quant
from relampago.cache import CacheView, KVCache, PagedKVCache
from relampago.problem import Device

G, H, D, E = 2, 6, 32, 40
K_SCALE, V_SCALE = torch.tensor([0.02, 0.05]), torch.tensor([0.01, 0.5])
SCALES = {"k_scale": K_SCALE, "v_scale": V_SCALE}


def filled(
    kind: type, counts: tuple[int, ...], device: str = "cpu"
) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """A cache of three sequences, and what was appended."""
    scales = {name: t.to(device) for name, t in SCALES.items()}
    options = {"dtype": quant.E4M3, "device": device, **scales}
    most, page = max(counts), 16
    cache = (
        KVCache(3, most + 10, G, D, E, **options)
        if kind is KVCache
        else PagedKVCache(3, 3 * (most // page + 3), page, G, D, E, **options)
    )
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, most, G, d, generator=g).bfloat16().to(device) for d in (D, E))
    cache.append(k, v, torch.tensor(counts, dtype=torch.int32, device=device))
    return cache, k, v


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_decode(kind, packed, backend) -> None:
    decode(kind, (37, 1, 50), packed, backend)


def decode(kind, counts: tuple[int, ...], packed: bool, backend: str, device: str = "cpu") -> None:
    """A token each, appended and attended to, against attention to what the cast values stand for."""
    cache, k, v = filled(kind, counts, device)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(3, 1, H, D, generator=g).bfloat16().to(device)
    new = [torch.randn(3, 1, G, d, generator=g).bfloat16().to(device) for d in (D, E)]
    scales = [t.to(device).double()[:, None] for t in (K_SCALE, V_SCALE)]
    more = {}
    if packed:
        ends = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
        q, more = q[:, 0], {"cu_seqlens_q": ends, "max_seqlen_q": 1}
    out, lse = rl.attention_decode(q, cache, *new, return_lse=True, backend=backend, **more)
    assert out.dtype == torch.bfloat16
    for b, n in enumerate(counts):
        keys, values = (
            torch.cat([t[b, :n], one[b]]).double() for t, one in zip((k, v), new, strict=True)
        )
        cast = [
            (t / s).clamp(-448, 448).to(quant.E4M3).double() * s
            for t, s in zip((keys, values), scales, strict=True)
        ]
        query = q[b][None] if not packed else q[b][None, None]
        oracle, standard = (
            dict(zip(("out", "lse"), rl.attention(query.to(t), cast[0][None].to(t), cast[1][None].to(t),
                                                  return_lse=True, backend="reference"), strict=True))
            for t in (torch.float64, torch.bfloat16)
        )  # fmt: skip
        rows = {
            "out": out[b].reshape(oracle["out"].shape),
            "lse": (lse[:, b] if packed else lse[b]).reshape(1, H, 1),
        }
        check(f"sequence {b}", rows, standard, oracle, torch.bfloat16)


def test_fork_and_gather() -> None:
    cache, _, _ = filled(PagedKVCache, (37, 0, 0))
    assert isinstance(cache, PagedKVCache)
    cache.fork(0, [2])
    for ours, theirs in zip(cache.gather(0), cache.gather(2), strict=True):
        assert ours.dtype == quant.E4M3
        assert torch.equal(ours.float(), theirs.float())


def test_what_saturates_is_counted() -> None:
    cache = KVCache(1, 8, G, D, dtype=quant.E4M3, k_scale=torch.ones(G), v_scale=torch.ones(G))
    k = torch.zeros(1, 2, G, D)
    k[0, 0, 0, :3] = torch.tensor([1e4, -470.0, 460.0])
    cache.append(k, torch.full_like(k, 2.0))
    assert cache.saturated is not None
    assert int(cache.saturated) == 2
    assert cache.k.float()[0, 0, 0, :3].tolist() == [448.0, -448.0, 448.0]
    before = cache.k.float().clone()
    with pytest.raises(rl.InvalidInput, match="the room is 8"):
        cache.append(k.expand(1, 2, G, D).repeat(1, 5, 1, 1), k.repeat(1, 5, 1, 1))
    assert int(cache.saturated) == 2
    assert torch.equal(cache.k.float(), before)


def view(**changed):
    k = torch.zeros(2, 8, G, D).to(quant.E4M3)
    return CacheView(k, k, torch.tensor([3, 8], dtype=torch.int32), **{**SCALES, **changed})


BAD = {
    "missing": (lambda: KVCache(1, 8, G, D, dtype=quant.E4M3, v_scale=V_SCALE),
                r"k_scale is None; expected \(2,\) torch.float32 cpu, as keys are torch.float8_e4m3fn"),
    "misshapen": (lambda: view(v_scale=torch.ones(3)), r"v_scale is \(3,\) torch.float32 cpu; expected \(2,\)"),
    "dtype": (lambda: view(k_scale=K_SCALE.double()), r"k_scale is \(2,\) torch.float64"),
    "number": (lambda: view(k_scale=0.1), "k_scale is 0.1; expected"),
    "needless": (lambda: PagedKVCache(1, 2, 16, G, D, **SCALES), "k_scale is .*; expected None, as keys are torch.bf"),
    "precision": (lambda: rl.attention_decode(torch.zeros(2, 1, H, D), view(), precision="fp8"),
                  "options hold precision or scales; expected a cache of float8_e4m3fn"),
    "queries": (lambda: rl.attention_decode(torch.zeros(2, 1, H, D).to(quant.E4M3), view()),
                "q has dtype torch.float8_e4m3fn; expected fp16"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_input(make, message) -> None:
    with pytest.raises(rl.InvalidInput, match=message):
        make()


@pytest.mark.parametrize(("arch", "runs"), [("sm80", False), ("sm89", True), ("sm90", True)])
def test_machines_without_the_format_are_named(arch, runs) -> None:
    pytest.importorskip("triton")
    from relampago.api import Options, prepare
    from relampago.op import problem_of
    from relampago.select import by_name

    cache = view()
    call = prepare(
        torch.zeros(2, 1, H, D).bfloat16(), cache.k, cache.v, Options(**cache.descales), cache=cache
    )
    reason = by_name("triton").why_not(problem_of(call, Device("cuda", arch, 132, 227 * 1024)))
    assert (reason is None) == runs
    assert runs or reason == "FP8 keys in a cache need sm89, gfx950 or newer, got sm80"
