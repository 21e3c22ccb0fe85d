"""Batch-invariant kernels, compiled with no GPU: they fit, and their variants do the same to a row."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from relampago.api import Options, Packing, prepare
from relampago.cache import KVCache, PagedKVCache
from relampago.op import arrays_of
from relampago.plan import Plan, Row, table
from relampago.problem import Device, Saved, Wanted

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder, asked, assembler_says
from crosscompile.rows import SHARED, check, rows_of, shape_of
from crosscompile.sample import first_of_each, pinned, spared

from relampago.backends.triton import arguments as A
from relampago.backends.triton import backward, invariant

ROWS = rows_of("invariant")
HOPPER = [row for row in ROWS if row.values[0] == "sm90"]


@dataclass
class Asked:
    """One call: 32 query heads, 8 kv heads."""

    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    rows: int = 512
    keys: str = "dense"  # or "packed", "strided", "cache", "page16", "page33"
    chunks: int = 1

    def arrays(self, **options: Any) -> Any:
        q = torch.zeros(1, self.rows, 32, self.dims[0], dtype=self.dtype)
        call = Options(**{"causal": True, **options})
        if self.keys in ("dense", "strided"):
            more = 0 if self.keys == "dense" else 1
            k, v = (torch.zeros(1, 4096, 8, d + more, dtype=self.dtype)[..., :d] for d in self.dims)
            return arrays_of(prepare(q, k, v, call))
        if self.keys == "packed":
            cu, most = torch.tensor([0, self.rows]).int(), self.rows
            k, v = (torch.zeros(self.rows, 8, d, dtype=self.dtype) for d in self.dims)
            return arrays_of(prepare(q[0], k, v, call, packing=Packing(cu, cu, most, most)))
        cache = KVCache(1, 4096, 8, *self.dims, dtype=self.dtype)
        if self.keys.startswith("page"):
            page = int(self.keys.removeprefix("page"))
            cache = PagedKVCache(1, 256, page, 8, *self.dims, dtype=self.dtype)
        return arrays_of(prepare(q, cache.k, cache.v, call, cache=cache))


def build(monkeypatch: pytest.MonkeyPatch, arch: str, plan: Plan, call: Asked, **options: Any):
    """The kernels of a call."""
    recorder = Recorder(arch)

    def launch(kernel: Any, grid: int, plan: Plan, chained: bool, *args: Any, fusion: bool) -> None:
        assert not fusion
        recorder(kernel, grid, plan, *args, fusion=fusion)

    kind = "cuda" if arch.startswith("sm") else "hip"
    device = Device(kind, arch, 132, SHARED[arch] * 1024)
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    monkeypatch.setattr(invariant, "launch", launch)
    invariant.invariant(call.arrays(**options), plan, chunks=call.chunks)
    return recorder.built


def layouts(built: Built) -> set[str]:
    """How threads share what rows are reduced from, and what products give."""
    text = built.asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = re.findall(r"\}\) : \(tensor<\w+xf32, (#\w+)>\)", text)
    found += re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<\w+xf32, (#\w+)>", text)
    return {named[name] for name in found}


def disassembled(built: Built) -> str:
    """SASS."""
    return asked(built.asm, "nvdisasm", "-c")


def instructions(built: Built) -> set[str]:
    """Of the tensor cores."""
    return set(re.findall(r"w?g?mma\.(?:mma_async\.)?sync\.aligned\.[\w.]+", built.asm["ptx"]))


@pytest.mark.parametrize(("arch", "row"), spared(ROWS, first_of_each(HOPPER, "block_q")))
def test_row_fits(arch: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    dim, dim_v, dtype = shape_of(row)
    calls = [Asked((dim, dim_v), dtype)]
    if arch == "sm90":
        calls.append(replace(calls[0], rows=1, keys="page16", chunks=9))
    for call in calls:
        built, *gathering = build(monkeypatch, arch, row.plan, call)
        assert all(other.spills == 0 for other in gathering)
        acc = row.plan.block_q * dim_v * 4 // (32 * row.plan.warps)  # bytes of a thread
        check(arch, row, built, 2 * acc)  # once a span, two of them are needed
        if arch == "sm90" and row.plan.block_q >= 64 and dtype != torch.float32:
            assert "wgmma.mma_async" in built.asm["ptx"]


@pytest.mark.parametrize(
    ("arch", "dim", "dtype"),
    [
        ("sm90", 128, torch.bfloat16),
        pinned("sm90", 256, torch.bfloat16),
        pinned("sm89", 128, torch.bfloat16),
        pinned("sm89", 64, torch.float32),
    ],
)
def test_variants_do_the_same_to_a_row(arch, dim, dtype, monkeypatch) -> None:
    """The same products by the same instructions, and sums in the same order, wherever the keys lie."""
    row = next(
        r for r in table(arch)["triton.invariant"]
        if shape_of(r) == (dim, dim, dtype) and "heads_kv_max" not in dict(r.when)
    )  # fmt: skip
    whole = Asked((dim, dim), dtype)
    first, *others = (
        build(monkeypatch, arch, row.plan, call)[0]
        for call in (
            whole,
            replace(whole, keys="packed"),
            replace(whole, keys="strided"),
            replace(whole, rows=1, keys="cache"),
            replace(whole, rows=1, keys="page16", chunks=9),
        )
    )
    assert len(layouts(first)) in (1, 2)  # scores and acc
    for other in others:
        assert instructions(other) == instructions(first)
        same = layouts(first)
        if layouts(other) != same:  # fewer warps, each with rows of its own
            assert arch == "sm90"
            assert all("warpsPerCTA = [8, 1]" in layout for layout in same)
            same = {s.replace("warpsPerCTA = [8, 1]", "warpsPerCTA = [4, 1]") for s in same}
        assert layouts(other) == same


@pytest.mark.pinned
@pytest.mark.parametrize("dim", [128, 256])
def test_hopper_spills_only_where_spans_are_folded(dim, monkeypatch) -> None:
    """From the first product of the loop without masks to its last, at most one register is."""
    row = next(r for r in table("sm90")["triton.invariant"] if shape_of(r)[0] == dim)
    built = build(monkeypatch, "sm90", row.plan, Asked((dim, dim)))[0]
    text = disassembled(built)
    met = re.findall(r"\b(?:HGMMA|LDL|STL)\b", text)
    products = [at for at, name in enumerate(met) if name == "HGMMA"]
    loop = met[
        products[0] : products[len(products) // 2 - 1]
    ]  # of that at the edges there are as many
    assert len(loop) - loop.count("HGMMA") <= 1


@pytest.mark.pinned
@pytest.mark.parametrize("call", [Asked(), Asked(rows=1, keys="cache", chunks=9)])
def test_hopper_products_follow_without_a_wait(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for each of S and acc in both loops, and a pipeline of three tiles in decoding as well."""
    row = next(r for r in table("sm90")["triton.invariant"] if shape_of(r)[0] == 128)
    built = build(monkeypatch, "sm90", row.plan, call)[0]
    assert "C7510" not in assembler_says(built)
    assert disassembled(built).count("WARPGROUP.DEPBAR") <= 4
    assert built.shared >= 3 * 128 * (128 + 128) * 2


@pytest.mark.parametrize("dim", [pinned(64), 256])  # 256: some by TMA where they lie dense
def test_gradients_do_the_same_to_a_row(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not: the same instructions, and what is summed lies among threads in the same way."""
    found = []
    for keys in ("dense", "packed"):
        recorder = Recorder("sm90")
        monkeypatch.setattr(backward, "launch", recorder)
        x = Asked((dim, dim), keys=keys).arrays()
        out, (by_keys, by_queries) = torch.zeros_like(x.q), (
            next(r.plan for r in table("sm90")[f"triton.{kernel}"] if shape_of(r)[0] == dim)
            for kernel in ("backward_dkdv", "backward_dq")
        )  # fmt: skip
        saved = Saved(out, torch.zeros(A.lse_shape(x)))
        backward.backward(x, by_keys, by_queries, saved, out, None, Wanted(), True, True)
        found.append(recorder.built)
    assert [built.name for built in found[0]] == [built.name for built in found[1]]
    for dense, packed in zip(*found, strict=True):
        assert instructions(dense) == instructions(packed)
        if dense.name != "prepare":  # sums by halves
            assert layouts(dense) == layouts(packed)
