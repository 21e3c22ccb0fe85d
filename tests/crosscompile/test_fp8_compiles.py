"""FP8 on Hopper compiles with no GPU: no spills, no shuffles between the products, the casts, decoding from e4m3."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from relampago.masks.rules import Band
from relampago.mods import softcap
from relampago.plan import Plan, table
from relampago.problem import Arrays, Device, Facts, describe
from relampago.quant import E4M3

triton = pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder, assembler_says, disassembled, innermost
from crosscompile.rows import SPILLS
from crosscompile.sample import pinned
from crosscompile.test_gluon import NEWEST_SPILLS, OLD, SHARED

from relampago.backends.gluon import fp8_launch, launch
from relampago.backends.triton import Triton, decode, forward
from relampago.quant import kernels

TABLE = table("sm90")["gluon_sm90.forward_fp8"]
BYTES = next(row.plan for row in table("sm90")["triton.decode"] if "fp8" in dict(row.when))
WIDE_SPILLS = 128  # bytes of a thread at head dim 256: acc alone takes 128 of its registers
CHAIN_SPILLS = 40 if OLD else 192  # outside the main loops, by 12.8; windows are the worst
BANDS = {"full": Band(), "causal": Band(0, None, 0), "window": Band(0, 100, 0)}


def arrays(
    dim: int, length: int = 512, band: str = "full", packed: bool = False, **more: Any
) -> Arrays:
    q = torch.zeros(1, length, 2, dim).to(E4M3)
    if packed:
        q, cu = q[0], torch.tensor([0, 100, 200], dtype=torch.int32)
        more = {"cu_q": cu, "cu_k": cu, **more}
    scale = torch.ones(2 if packed else 1, 2, 4)
    return Arrays(
        q=q, k=q, v=q, scale=1.0, band=BANDS[band], len_q=length, len_k=length, precision="fp8", q_scale=scale,
        k_scale=scale, v_scale=scale, dtype=torch.bfloat16, **more,
    )  # fmt: skip


def build(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, x: Arrays, multiprocessors: int = 8
) -> Built:
    recorder = Recorder("sm90")
    monkeypatch.setattr(launch, "launch", recorder)
    monkeypatch.setattr(kernels, "launch", lambda *_: None)
    fp8_launch.setting_of.cache_clear()
    fp8_launch.forward(plan, x, multiprocessors)
    fp8_launch.setting_of.cache_clear()
    return recorder.built[0]


def loops(sass: list[str]) -> list[list[str]]:
    """Those with FP8 products."""
    return [body for body in innermost(sass) if sum("QGMMA" in line for line in body) > 1]


def check(built: Built, plan: Plan, dim: int) -> None:
    allowed = CHAIN_SPILLS * plan.chain + (WIDE_SPILLS if dim > 128 else 0)
    assert built.spills <= allowed + (0 if OLD else NEWEST_SPILLS[plan.block_q])
    assert built.shared <= SHARED
    said = assembler_says(built)
    assert "C75" not in said, said
    found = loops(disassembled(built))
    assert len(found) == plan.block_q // 64
    for body in found:
        calls = Counter(re.sub(r"^@!?U?P\d+ ", "", line).split()[0].split(".")[0] for line in body)
        assert (
            calls["SHFL"] <= 4
        )  # a row's maximum, over its four threads: weights stay where they are
        assert calls["PRMT"] <= 8  # weights in e4m3 are carried four to a register
        assert calls["HGMMA"] == 0
        assert calls["MUFU"] >= plan.block_k // 2


@pytest.mark.parametrize(
    ("which", "band"), [(0, "full"), pinned(1, "causal"), (1, "window"), (2, "causal"), (3, "full")]
)
def test_rows_compile(monkeypatch, which, band) -> None:
    row = TABLE[which]
    dim = dict(row.when).get("dim_max", 256)
    check(build(monkeypatch, row.plan, arrays(dim, band=band)), row.plan, dim)


@pytest.mark.pinned  # the rows are chained too
@pytest.mark.parametrize("band", ["full", "causal"])
def test_tiles_that_follow_without_a_gap(monkeypatch, band) -> None:
    plan = replace(TABLE[1].plan, chain=1)
    built = build(monkeypatch, plan, arrays(128, band=band))
    check(built, plan, 128)
    for body in loops(disassembled(built)):
        assert not OLD or not any("LDL" in line or "STL" in line for line in body)


@pytest.mark.parametrize("form", ["packed", "split", "tables"])
def test_other_forms(monkeypatch, form) -> None:
    plan = TABLE[1].plan
    more: dict[str, Any] = {}
    if form == "packed":
        more = {"sinks": torch.zeros(2), "mods": (softcap(30.0).token,)}
    x = arrays(128, packed=form == "packed", band="causal", **more)
    if form == "tables":
        runs = torch.zeros(1, 512, dtype=torch.int32)
        x.band = Band(0, None, 0, None, runs, runs)
    built = build(monkeypatch, plan, x, 132 if form == "split" else 2)
    assert "C75" not in assembler_says(built)
    allowed = CHAIN_SPILLS * plan.chain
    assert built.spills <= allowed + (0 if OLD else NEWEST_SPILLS[plan.block_q])


@pytest.mark.parametrize("dim", [96, pinned(256)])
def test_casts(monkeypatch, dim) -> None:
    built: list[Built] = []

    def record(kernel: Any, grid: Any, warps: int, *args: Any) -> None:
        recorder = Recorder("sm90")
        recorder(kernel, 1, Plan(block_q=1, block_k=1, warps=warps, stages=2), *args)
        built.extend(recorder.built)

    monkeypatch.setattr(kernels, "launch", record)
    x = torch.zeros(1, 512, 2, dim, dtype=torch.bfloat16)
    kernels.rows_in_e4m3(x, None, 512)
    kernels.columns_in_e4m3(x, None, 512)
    kernels.columns_in_e4m3(
        x[0].to(E4M3), torch.tensor([0, 9], dtype=torch.int32), 9, torch.ones(1, 2, 1)
    )
    assert [one.name for one in built] == ["cast_rows", "cast_columns", "cast_columns"]
    assert all(one.spills == 0 for one in built)


def cache_of(rows: int, page: int) -> Arrays:
    """Four query heads to a kv head, over keys in e4m3 in pages, or contiguous if page is 0."""
    k = torch.zeros(8 if page else 2, page or 512, 2, 128).to(E4M3)
    pages = torch.zeros(2, 4, dtype=torch.int32) if page else None
    scale = torch.ones(2, 2, 1)
    return Arrays(
        q=torch.zeros(2, rows, 8, 128, dtype=torch.bfloat16), k=k, v=k, scale=1.0, band=Band(0, None, 0),
        len_q=rows, len_k=256, lens_k=torch.zeros(2, dtype=torch.int32), page_table=pages, k_scale=scale,
        v_scale=scale,
    )  # fmt: skip


def decoded(monkeypatch: pytest.MonkeyPatch, arch: str, x: Arrays, plan: Plan) -> Built:
    """The kernel over keys that a call launches."""
    recorder = Recorder(arch)
    monkeypatch.setattr(
        decode,
        "launch",
        lambda kernel, grid, plan, chained, *args: recorder(kernel, grid, plan, *args),
    )
    decode.decode(x, plan, splits=2, chained=False)
    return recorder.built[0]


@pytest.mark.parametrize("arch", [pinned("sm89"), "sm90", "gfx950"])
def test_attending_to_e4m3_in_pages(monkeypatch, arch) -> None:
    """Decoding, and a prompt into the same cache by the forward kernel."""
    kind = "hip" if arch == "gfx950" else "cuda"
    monkeypatch.setattr(Device, "of", lambda _: Device(kind, arch))
    for rows in (1, 3):  # 3 rows of 4 heads do not fit the tile of `decode_fp8.py`
        x = cache_of(rows, 64)
        built = decoded(monkeypatch, arch, x, BYTES)
        few = rows == 1 and kind == "cuda"
        assert built.name == ("attend_bytes" if few else "attend_part")
        assert built.spills == 0
    x.q, x.len_q = torch.zeros(300, 8, 128, dtype=torch.bfloat16), 200
    x.cu_q = torch.tensor([0, 200, 300], dtype=torch.int32)
    problem = describe(x, Facts(right=0), device=Device(kind, arch))
    recorder = Recorder(arch)
    monkeypatch.setattr(forward, "launch", recorder)
    forward.forward(x, Triton().plan(problem))
    assert recorder.built[0].spills <= SPILLS


@pytest.mark.pinned  # the newest Triton takes Hopper's own products for four warps, and moves their operands
@pytest.mark.parametrize(("page", "warps"), [(64, 4), (0, 4), (64, 2)])
def test_few_instructions_for_a_tile_of_e4m3(monkeypatch, page, warps) -> None:
    """Loads run ahead, nothing is loaded byte by byte or stored once more, and a conversion makes two numbers."""
    plan = Plan(block_q=64, block_k=64, warps=warps, stages=4)
    built = decoded(monkeypatch, "sm90", cache_of(1, page), plan)
    body = max(
        innermost(disassembled(built)), key=lambda body: sum("HMMA" in line for line in body)
    )
    calls = Counter(re.sub(r"^@!?U?P\d+ ", "", line).split()[0] for line in body)
    kinds: Counter[str] = Counter()
    for name, n in calls.items():
        kinds[name.split(".")[0]] += n
    most = 4 * 64 * 128 * 2 // (64 * 4) // warps  # words of a thread that hold two numbers each
    assert calls["F2FP.F16.E4M3.UNPACK_B"] == most
    assert calls["LDS.U8"] == 0
    assert calls["STS.128"] == 0
    assert kinds["PRMT"] <= most // 4 + 8
    assert kinds["LDGSTS"] == 4 * 8 // warps
    assert warps * len(body) <= 1300  # 2372 with rows as the long side of products
    assert built.spills == 0
    assert built.registers * 32 * warps * 4 <= 65536
