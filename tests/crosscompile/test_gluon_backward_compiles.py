"""Every row for gluon_sm90's backward compiles with no GPU: hardly a spill, no serialised WGMMA, overlap."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from relampago.masks.rules import Band
from relampago.mods import softcap
from relampago.plan import Plan, Row, table
from relampago.problem import Arrays, Device, Problem, Saved, Sums, Wanted

triton = pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder, assembler_says, disassembled, innermost
from crosscompile.sample import first_of_each, pinned, spared
from crosscompile.test_gluon import OLD, SHARED, dims

from relampago.backends.gluon import backward_launch

SPILLS = 8 if OLD else 40  # bytes of a thread, of those before the loops or after them
CAPPED = (
    96 if OLD else 160
)  # with softcap and a window beyond d 64: a masked block needs its slope as well
TABLED = 40 if OLD else 104  # with tables, whose masks hold each row's run of keys
DRAWN = 128 if OLD else 160  # of tiles that are drawn, outside the loops
KEYS, QUERIES = table("sm90")["gluon_sm90.backward"], table("sm90")["gluon_sm90.backward_dq"]
MASKS = {"full": Band(), "causal": Band(0, None, 0), "window": Band(0, 100, 30)}


def query_row(row: Row) -> Row:
    """The row over queries that goes with one over keys."""
    return next(r for r in QUERIES if dims(r)[0] >= dims(row)[0])


def build(
    monkeypatch: pytest.MonkeyPatch, row: Row, mask: str, deterministic: bool = False,
    half: torch.dtype = torch.bfloat16, packed: bool = False, known: torch.Tensor | None = None, **more: Any,
) -> dict[str, Built]:  # fmt: skip
    """The kernels of a backward by name."""
    recorder = Recorder("sm90")
    monkeypatch.setattr(backward_launch, "launch", recorder)
    dim, dim_v = dims(row)
    shapes = [(1, 512, heads, d) for heads, d in ((4, dim), (2, dim), (2, dim_v))]
    q, k, v = (torch.zeros(s, dtype=half) for s in shapes)
    if packed:
        q, k, v = q[0], k[0], v[0]
        cu = torch.tensor([0, 100, 200], dtype=torch.int32)
        more |= {"cu_q": cu, "cu_k": cu}
    x = Arrays(q=q, k=k, v=v, scale=1.0, band=MASKS[mask], len_q=512, len_k=512, **more)
    out = torch.zeros((*q.shape[:-1], dim_v), dtype=half)
    lse = torch.zeros((4, 512) if packed else (1, 4, 512))
    saved = Saved(out, lse if known is None else known, known)
    wanted = Wanted(sinks=x.sinks is not None)
    plans = row.plan, query_row(row).plan
    backward_launch.backward(*plans, x, saved, out, None, wanted, deterministic)
    return {built.name: built for built in recorder.built}


def loops(sass: list[str]) -> list[list[str]]:
    """The innermost loops with products."""
    return [body for body in innermost(sass) if sum("HGMMA" in line for line in body) > 1]


def drawn_at_a_price(plan: Plan) -> bool:
    """Whether numbers that last from one tile of keys to the next spill: where S comes early, by newer ptxas always."""
    return plan.schedule == 2 and (plan.ahead == 3 or not OLD)


def check(built: dict[str, Built], row: Row, most: int = SPILLS) -> None:
    """What holds of every form."""
    for name, one in built.items():
        if name in ("bound", "reach"):
            assert one.spills == 0
            continue
        if name in ("prepare", "convert"):
            assert one.spills <= 64
            assert re.search(r"ld\.global\.\S*v4", one.asm["ptx"])
            continue
        assert one.shared <= SHARED
        assert one.spills <= max(most, DRAWN if drawn_at_a_price(row.plan) else 0)
        said = assembler_says(one)
        assert "C75" not in said, (
            said
        )  # C7510 to C7513: products are serialised; C7508: setmaxnreg is ignored
        bodies = loops(disassembled(one))
        assert len(bodies) >= 2  # one of each warpgroup
        for body in bodies:
            if OLD and most == SPILLS:
                assert not any("LDL" in line or "STL" in line for line in body)
            waits = [i for i, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
            last = max(w for w in waits if body[w].endswith("0x0"))
            exponentials = [i for i, line in enumerate(body) if "MUFU.EX2" in line]
            # the softmax runs while a product is under way; for dQ ptxas sees to that only if the row pins it
            if name != "by_queries" or query_row(row).plan.pin:
                assert sum(i < last for i in exponentials) * 2 >= len(exponentials)


ROWS = [pytest.param(row, id=str(i)) for i, row in enumerate(KEYS)]
FEW = first_of_each(ROWS, "block_k")  # of forms that take every row the same way


def reached(row: Row) -> str:
    """A mask with which a call finds the row."""
    return "causal" if dict(row.when).get("right") else "full"


@pytest.mark.parametrize("row", spared(ROWS, first_of_each(ROWS, "block_k", "schedule", "ahead")))
def test_rows_compile(monkeypatch, row) -> None:
    built = build(monkeypatch, row, reached(row))
    check(built, row)
    if dims(row)[0] == 256:
        check(build(monkeypatch, row, "causal"), row)
    if row.plan.fused:  # additions to dQ are four floats wide
        added = set(
            re.findall(r"(?:red|atom)\.global\.\S*add\.\S*f32", built["by_keys"].asm["ptx"])
        )
        assert added
        assert all("v4" in one for one in added)


@pytest.mark.parametrize("which", [pinned(1), 2, pinned(3)])
def test_tiles_drawn_from_a_counter(monkeypatch, which) -> None:
    """As many registers in the loops as where a block of threads takes one tile."""
    row = KEYS[which]
    drawn = replace(row, plan=replace(row.plan, schedule=2))
    built = build(monkeypatch, drawn, reached(row))
    for body in loops(disassembled(built["by_keys"])):
        assert not OLD or not any("LDL" in line or "STL" in line for line in body)
    check(built, drawn, DRAWN)


FUSED = [r for r in ROWS if r.values[0].plan.fused]


@pytest.mark.parametrize("row", spared(FUSED, ["0"]))
def test_sums_in_order(monkeypatch, row) -> None:
    """One kernel that adds to dQ four floats at a time, a few instructions a block longer than in no order."""
    ordered = replace(row, plan=replace(row.plan, ordered=1, schedule=2))
    for packed in (True, False):
        built = build(monkeypatch, ordered, reached(row), deterministic=True, packed=packed)
        assert set(built) == {"prepare", "by_keys", "convert"}
        check(built, ordered, 160)
        bodies = loops(disassembled(built["by_keys"]))
        for body in bodies:  # hardly one of the spills is there
            assert not OLD or sum("LDL" in line or "STL" in line for line in body) <= 4
    ptx = built["by_keys"].asm["ptx"]
    assert re.search(r"(ld|atom)\.global\.gpu\.acquire", ptx)
    assert re.search(r"(red|atom)\.global\.gpu\.release", ptx)
    if not OLD:
        return
    in_none = replace(row, plan=replace(row.plan, schedule=2))
    free = build(monkeypatch, in_none, reached(row))["by_keys"]
    assert sum(map(len, bodies)) - sum(map(len, loops(disassembled(free)))) <= 2 * 25


@pytest.mark.parametrize("row", spared(ROWS, FEW))
def test_other_forms(monkeypatch, row) -> None:
    mask = "window" if reached(row) == "causal" else "full"
    check(build(monkeypatch, row, mask, deterministic=True, packed=True), row)
    more = {"sinks": torch.zeros(4), "dtype": torch.float32}
    most = DRAWN if drawn_at_a_price(row.plan) else SPILLS  # two loads of them in the loop
    check(build(monkeypatch, row, mask, half=torch.float16, **more), row, most)


@pytest.mark.parametrize("row", spared(ROWS, FEW))
def test_gradients_that_are_added(monkeypatch, row) -> None:
    """To those of other shards, which are part of longer tensors; as many registers as where they are stored."""
    dim, dim_v = dims(row)
    shapes = ((1, 512, 4, dim), (1, 512, 2, dim), (1, 512, 2, dim_v))
    sums = Sums(*(torch.zeros(*s[:3], 2 * s[3])[..., : s[3]] for s in shapes))
    more = {"dtype": torch.float32, "sums": sums, "known": torch.zeros(1, 4, 512)}
    mask = reached(row)
    for deterministic in (False, True):
        built = build(monkeypatch, row, mask, deterministic, **more)
        assert built.pop("prepare").spills == 0  # reads neither out nor dO
        check(built, row)
        for name in {"by_keys", "by_products", "by_queries"} & set(built):
            found = re.findall(r"(?:red|atom)\.global\.\S*add\.\S*f32", built[name].asm["ptx"])
            assert any("v2" in one for one in found), found


HELD = [r for r in ROWS if r.values[0].plan.fused and r.values[0].plan.block_q == 64]


@pytest.mark.parametrize("row", spared(HELD, ["2"]))
def test_rows_that_are_held(monkeypatch, row) -> None:
    """One kernel, whose main loops are no longer than those of a backward that holds nothing."""
    dim, dim_v = dims(row)
    held = torch.zeros(1, 4, 1024 * dim)[..., 256 * dim : 768 * dim]
    facts = torch.zeros(1, 4, 1024)[..., 256:768]
    keys = torch.zeros(1, 512, 2, dim + dim_v).split([dim, dim_v], -1)
    # at d 64 causal's own row has blocks of 128, so that this one serves it too
    for mask in {reached(row), "causal" if dim == 64 else reached(row)}:
        more = {"dtype": torch.float32, "sums": Sums(held, *keys, anew=True), "known": facts}
        built = build(monkeypatch, row, mask, **more)
        assert list(built) == ["by_keys"]
        check(built, row)
        plain = build(monkeypatch, row, mask)["by_keys"]
        here, there = (sum(map(len, loops(disassembled(one)))) for one in (built["by_keys"], plain))
        assert here <= there or not OLD


def found_by(dim: int, **more: Any) -> Row:
    """The row that a causal call finds."""
    p = Problem(
        device=Device("cuda", "sm90"), direction="backward", batch=1, heads_q=4, heads_kv=2, dim=dim, dim_v=dim,
        dtype="bf16", len_q=512, len_k=512, right=True, **more,
    )  # fmt: skip
    row = next(r for r in KEYS if r.matches(p))
    return Row((("dim", dim), ("dim_v", dim)), row.plan, row.source)


@pytest.mark.parametrize("dim", [pinned(64), 128, pinned(256)])
def test_softcap(monkeypatch, dim) -> None:
    """Its slope takes registers which others' rows have no room for."""
    mods = (softcap(30.0).token,)
    row = found_by(dim, mods=mods)
    most = CAPPED if dim > 64 else SPILLS
    check(build(monkeypatch, row, "window", half=torch.float16, mods=mods), row, most)


@pytest.mark.parametrize(("dim", "dim_v"), [pinned(96, 96), (192, 128)])
def test_padded_dims(monkeypatch, dim, dim_v) -> None:
    row = next(r for r in KEYS if dims(r)[0] >= dim and dims(r)[1] >= dim_v)  # causal's
    row = Row((("dim", dim), ("dim_v", dim_v)), row.plan, row.source)
    check(build(monkeypatch, row, "causal"), row)


@pytest.mark.parametrize(
    ("dim", "deterministic"), [(64, False), pinned(128, True), pinned(256, False)]
)
def test_document_tables(monkeypatch, dim, deterministic) -> None:
    row = found_by(dim, tables=True)
    table = torch.zeros(1, 512, dtype=torch.int32)
    monkeypatch.setitem(MASKS, "documents", Band(0, None, 0, None, table, table))
    check(build(monkeypatch, row, "documents", deterministic), row, TABLED)


def test_lengths_share_a_kernel(monkeypatch) -> None:
    """Numbers of a call are not compiled in, be they 1 or a multiple of 16."""
    recorder = Recorder("sm90")
    monkeypatch.setattr(backward_launch, "launch", recorder)
    kernels: dict[str, Any] = {}

    def spy(kernel: Any, grid: int, plan: Plan, *args: Any) -> None:
        kernels[kernel.fn.__name__] = kernel
        recorder(kernel, grid, plan, *args)

    monkeypatch.setattr(backward_launch, "launch", spy)
    counts = []
    for batch, length, heads in ((1, 256, 1), (2, 1152, 3), (3, 128, 16)):
        q = torch.zeros(batch, length, heads, 64, dtype=torch.bfloat16)
        x = Arrays(q=q, k=q, v=q, scale=1.0, band=Band(), len_q=length, len_k=length)
        saved = Saved(q, torch.zeros(batch, heads, length))
        plans = KEYS[0].plan, QUERIES[0].plan
        backward_launch.backward(*plans, x, saved, q, None, Wanted(), False)
        counts.append({name: len(k.device_caches["sm90"][0]) for name, k in kernels.items()})
    assert counts[0] == counts[1] == counts[2]
    assert all(counts[0].values())
