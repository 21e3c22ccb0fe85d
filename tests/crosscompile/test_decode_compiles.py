"""Every row of flash decoding compiles for its architecture, with no GPU: it fits, hardly spills, stays pipelined."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from relampago.api import Options, prepare
from relampago.cache import KVCache, PagedKVCache
from relampago.op import arrays_of
from relampago.plan import Plan, Row

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder, asked
from crosscompile.rows import check, rows_of, shape_of
from crosscompile.sample import first_of_each, pinned, spared

from relampago.backends.triton import decode

ROWS = rows_of("decode")
HOPPER = [row for row in ROWS if row.values[0] == "sm90"]


def build(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    plan: Plan,
    *,
    dims: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (32, 8),
    rows: int = 1,
    page: int = 16,
    splits: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> list[Built]:
    """The kernels of a call with keys in pages, or in a contiguous cache if page is 0."""
    recorder = Recorder(arch)
    monkeypatch.setattr(
        decode,
        "launch",
        lambda kernel, grid, plan, chained, *args: recorder(kernel, grid, plan, *args),
    )
    if page:
        cache = PagedKVCache(2, 1024 // page, page, heads[1], *dims, dtype=dtype)
    else:
        cache = KVCache(2, 512, heads[1], *dims, dtype=dtype)
    q = torch.zeros(2, rows, heads[0], dims[0], dtype=dtype)
    call = prepare(q, cache.k, cache.v, Options(causal=True, **options), cache=cache)
    chained = arch.startswith("sm") and int(arch[2:]) >= 90
    decode.decode(arrays_of(call), plan, splits=splits, chained=chained)
    return recorder.built


def called(line: str) -> str:
    """The instruction of a line of SASS; "" if there is none."""
    found = re.search(r"^\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", line)
    return found[1] if found else ""


@pytest.mark.parametrize(("arch", "row"), spared(ROWS, first_of_each(HOPPER, "block_q", "block_k")))
def test_row_fits(arch: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    dim, dim_v, dtype = shape_of(row)
    for rows in (1, 16):  # 4 rows of a tile, and as many as the row may serve
        split, _ = build(monkeypatch, arch, row.plan, dims=(dim, dim_v), rows=rows, dtype=dtype)
        check(arch, row, split)


@pytest.mark.parametrize("page", [0, 64, 16, 7])
def test_loads_are_wide_and_ahead(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values come in 16-byte copies wherever they lie, and start three tiles ahead."""
    plan = Plan(block_q=16, block_k=64, warps=4, stages=4)
    split, combine = build(monkeypatch, "sm90", plan, page=page)
    ptx = split.asm["ptx"]
    assert ptx.count("cp.async.cg.shared.global") == 4 * 16
    assert "cp.async.wait_group \t4" in ptx
    assert split.shared > 3 * 64 * 256 * 2
    assert split.spills == 0
    assert "ld.global.v4" in combine.asm["ptx"]
    for built in (split, combine):
        assert built.asm["ptx"].count("griddepcontrol.wait") == 1
    before = split.asm["ptx"].partition("griddepcontrol.wait")[0]
    assert before.count("prefetch.global.L2") == 1  # the length or a part of the row of pages
    assert "ld.global" not in before


@pytest.mark.parametrize("splits", [2, 16, 60, 256])
def test_parts_are_loaded_together(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way to the L2 cache: nothing is computed between the loads where a warp holds all."""
    plan = Plan(block_q=16, block_k=64, warps=4, stages=4)
    built = build(monkeypatch, "sm90", plan, splits=splits)[1]
    width, whole, warps = decode.combining(splits, 128)
    calls = [name for name in map(called, asked(built.asm, "nvdisasm", "-c").splitlines()) if name]
    assert calls.count("LDG.E.128") == width * whole // (4 * 32 * warps)
    assert built.spills == 0
    assert (warps == 1) == (splits <= 64)
    if warps == 1:
        last = max(i for i, name in enumerate(calls) if name.startswith("LDG"))
        assert not any(name.startswith(("SHFL", "BAR", "STS")) for name in calls[:last])
        assert (
            sum(name.startswith("BAR") for name in calls) <= 1
        )  # where weights change their layout


@pytest.mark.pinned
def test_divisions_come_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which part is whose is known when the predecessor ends: ptxas would move the wait before that."""
    split, combine = build(monkeypatch, "sm90", Plan(block_q=16, block_k=64, warps=4, stages=4))
    for built in (split, combine):
        calls = [n for n in map(called, asked(built.asm, "nvdisasm", "-c").splitlines()) if n]
        before = calls[: calls.index("ACQBULK")]
        assert sum(name.startswith("MUFU.RCP") for name in before) >= 2


@pytest.mark.parametrize("arch", [pinned("sm80"), pinned("gfx942")])
def test_no_dependent_launch_before_hopper(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(block_q=16, block_k=32, warps=4, stages=2)
    for built in build(monkeypatch, arch, plan):
        assert "griddepcontrol" not in built.asm.get("ptx", "")


def test_options_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(block_q=64, block_k=64, warps=4, stages=3)
    options = {
        "softcap": 30.0, "sinks": torch.zeros(32), "alibi_slopes": torch.ones(32), "window": (99, 0)
    }  # fmt: skip
    for splits in (1, 3):
        build(monkeypatch, "sm90", plan, rows=3, splits=splits, **options)
