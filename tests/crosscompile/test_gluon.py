"""Every row of sm90.toml for gluon_sm90 compiles with no GPU: no spills, no serialised WGMMA, the softmax under PV."""

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
from relampago.plan import Plan, Row, table
from relampago.problem import Arrays, Device, Problem

triton = pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from crosscompile.offline import Built, Recorder, assembler_says, disassembled, innermost
from crosscompile.sample import first_of_each, pinned, spared

from relampago.backends.gluon import compiles_well, launch, sizes
from relampago.backends.gluon.named import TURNS

SHARED = 227 * 1024
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
TABLE_SPILLS = 40  # of three warpgroups, whose masks also hold each row's run of keys
NEWEST_SPILLS = {192: 400, 128: 96}  # bytes of a thread, by block_q: ptxas 13 is less lucky than 12
NEWEST_PARTIAL = {
    False: 120,
    True: 216,
}  # and fp32 results at 256, by whether they go on from others
NEWEST_SPLIT = 120  # and splits at 256, with an address more
TABLE = [row for row in table("sm90")["gluon_sm90.forward"] if compiles_well(row.plan)]
ROWS = [pytest.param(row, id=str(i)) for i, row in enumerate(TABLE)]
MASKS = {
    "full": (512, 512, Band()),
    "ragged": (500, 500, Band()),
    "causal": (512, 512, Band(0, None, 0)),
    "causal-unaligned": (500, 600, Band(100, None, 0)),
    "window": (512, 512, Band(0, 100, 0)),
    "prefix": (512, 512, Band(0, None, 0, 70)),
}


def dims(row: Row) -> tuple[int, int]:
    """The largest head dims that a row is for."""
    when = dict(row.when)
    return when.get("dim_max", when.get("dim", 256)), when.get("dim_v_max", when.get("dim_v", 256))


CHAIN_SPILLS = 32 if OLD else 64  # bytes: a tile's numbers while the next tile's are there too
TOP_SPILLS = 16  # and a head's largest score, from 192 on
FOLDING = 480  # bytes: a tile of O is read, by its addresses, while the first scores are there


def reaches(row: Row, mask: str) -> bool:
    """Whether the row is what a call with this mask finds, of some length."""
    band, (dim, dim_v), when = MASKS[mask][2], dims(row), dict(row.when)
    long = Problem(
        device=Device("cuda", "sm90"), batch=1, heads_q=2, heads_kv=2, dim=dim, dim_v=dim_v, dtype="bf16",
        len_q=when.get("len_q_max", when.get("len_q_min", 8192)), len_k=512, left=band.left is not None,
        right=band.right is not None, prefix=band.prefix is not None,
    )  # fmt: skip
    calls = [long, *(replace(long, batch=b, len_q=n) for b in (1, 4) for n in (2048, 4096, 16384))]
    return any(next(r for r in TABLE if r.matches(p)) is row for p in calls)


def arrays(
    row: Row, mask: str, dtype: torch.dtype = torch.bfloat16, packed: bool = False
) -> Arrays:
    len_q, len_k, band = MASKS[mask]
    dim, dim_v = dims(row)
    q, k, v = (
        torch.zeros(1, n, 2, d, dtype=dtype)
        for n, d in ((len_q, dim), (len_k, dim), (len_k, dim_v))
    )
    more: dict[str, Any] = {}
    if packed:
        q, k, v = q[0], k[0], v[0]
        cu = torch.tensor([0, 100, 200], dtype=torch.int32)
        more = {"cu_q": cu, "cu_k": cu}
    return Arrays(q=q, k=k, v=v, scale=1.0, band=band, len_q=len_q, len_k=len_k, **more)


def build(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, x: Arrays, multiprocessors: int = 8
) -> Built:
    """The forward's kernel, and not that which combines splits."""
    recorder = Recorder("sm90")
    monkeypatch.setattr(launch, "launch", recorder)
    launch.forward(plan, x, multiprocessors)
    first, *rest = recorder.built
    assert all(built.name == "combine" and built.spills == 0 for built in rest)
    return first


def main_loops(sass: list[str]) -> list[list[str]]:
    """The innermost loops with products of two kinds in flight: waits for all but one, then for all."""
    return [body for body in innermost(sass) if sum("HGMMA" in line for line in body) > 1]


def exponentials_under_pv(body: list[str]) -> tuple[int, int]:
    """(between the wait for S and that for PV, in all) of a main loop."""
    waits = [i for i, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 2
    assert body[waits[0]].endswith(("0x1", "0x2", "0x4"))  # O's parts, by halves of the keys or not
    return tuple(sum("MUFU.EX2" in line for line in part) for part in (body[slice(*waits)], body))


def check(built: Built, plan: Plan, spills: int = 0, outside: int = 0) -> None:
    """What holds of every variant; `spills` are bytes of a thread that may be, `outside` those outside main loops."""
    assert built.shared <= SHARED
    loose = not OLD
    outside += CHAIN_SPILLS * plan.chain
    assert built.spills <= (NEWEST_SPILLS[plan.block_q] if loose else 0) + spills + outside
    said = assembler_says(built)
    assert "C75" not in said, said  # C7512: products are serialised; C7508: setmaxnreg is ignored
    ptx = built.asm["ptx"]
    named = {int(n) for n in re.findall(r"(?:barrier|bar)\.sync\s+(\d+)", ptx)}
    assert max(named) < TURNS.value  # Triton's own barriers and ours are not the same
    budget = sorted(
        {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    )
    consumers, producer = launch.REGISTERS[plan.block_q // sizes.ROWS]
    assert {consumers, producer} <= set(budget)
    sass = disassembled(built)
    loops = main_loops(sass)
    assert len(loops) == plan.block_q // sizes.ROWS
    for body in loops:
        under, total = exponentials_under_pv(body)
        assert total >= plan.block_k // 2  # 64 rows of block_k scores by 128 threads
        if plan.pin:  # all weights, half of them, or the maxima alone, and what sums shrink by
            assert under >= (2 if plan.pin == 8 else total // plan.pin)
        calls = Counter(line.split()[0] for line in body)
        assert not any(call.startswith(("LDL", "STL")) for call in calls) or loose or spills


def of_mask(plan: Plan, mask: str) -> int:
    """Bytes that a mask of more than the diagonal may spill, outside of the loops, where values come by halves."""
    return 32 if plan.halves and mask not in ("full", "causal") else 0


def leads(row: Row) -> bool:
    """Whether it is the first one for its head dims, or for them under a mask: those after it differ in few things."""
    right = dict(row.when).get("right")
    return row is next(
        r for r in TABLE if dims(r) == dims(row) and dict(r.when).get("right") == right
    )


LEADING = [pytest.param(row, id=str(i)) for i, row in enumerate(TABLE) if leads(row)]
EACH = list({dims(p.values[0]): p for p in LEADING}.values())  # of forms that take every row alike
FEW = first_of_each(EACH[::-1], "block_q")
CAUSAL = [p for p in LEADING if dict(p.values[0].when).get("right")]
PAIRS = [
    pytest.param(row, mask, id=f"{i}-{mask}")
    for i, row in enumerate(TABLE)
    for mask in (MASKS if leads(row) else ("full", "causal"))
    if reaches(row, mask)
]
SIZED = [p for p in PAIRS if p.values[1] in ("full", "causal")]  # rows were not for newer ptxas


@pytest.mark.parametrize(("row", "mask"), spared(PAIRS, first_of_each(SIZED)))
def test_rows_compile(monkeypatch, row, mask) -> None:
    check(
        build(monkeypatch, row.plan, arrays(row, mask)), row.plan, outside=of_mask(row.plan, mask)
    )


@pytest.mark.parametrize("row", spared(CAUSAL, CAUSAL[:1]))
def test_first_mask_waits_for_its_scores(monkeypatch, row) -> None:
    """Decided before, it would be kept in bits: some 240 instructions before S is there, and as many more after it."""
    sass = disassembled(build(monkeypatch, row.plan, arrays(row, "causal")))
    first = next(i for i, line in enumerate(sass) if "HGMMA" in line)
    assert next(i for i, line in enumerate(sass[first:]) if "WARPGROUP.DEPBAR" in line) < 150


@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), pinned(1, 500), pinned(500, 1)])
def test_lengths_of_one(monkeypatch, len_q, len_k) -> None:
    """Triton takes a 1 for a constant."""
    monkeypatch.setitem(MASKS, "ones", (len_q, len_k, Band(len_k - len_q, None, 0)))
    built = build(monkeypatch, TABLE[1].plan, arrays(TABLE[1], "ones"))
    assert "C75" not in assembler_says(built)


@pytest.mark.parametrize("row", spared(EACH, FEW))
def test_other_forms(monkeypatch, row) -> None:
    mask = next(name for name in ("causal", "full") if reaches(row, name))
    check(build(monkeypatch, row.plan, arrays(row, mask, torch.float16, packed=True)), row.plan)
    more = {"sinks": torch.zeros(2), "mods": (softcap(30.0).token,)}
    check(build(monkeypatch, row.plan, replace(arrays(row, mask), **more)), row.plan)


@pytest.mark.parametrize("row", spared(EACH, FEW))
def test_largest_scores(monkeypatch, row) -> None:
    mask = next(name for name in ("causal", "full") if reaches(row, name))
    x = replace(arrays(row, mask), max_logits=torch.zeros(1, 2))
    check(build(monkeypatch, row.plan, x), row.plan, outside=TOP_SPILLS)


@pytest.mark.parametrize(
    ("dim", "dim_v", "mask"),
    [(96, 96, "full"), (128, 128, "causal"), pinned(128, 128, "full"), pinned(192, 128, "full")],
)
def test_queries_in_registers(monkeypatch, dim, dim_v, mask) -> None:
    """Where two warpgroups have the registers for them: no product of the main loop reads two tiles."""
    row = next(r for r in TABLE if dims(r) == (dim, dim_v) and reaches(r, mask))
    plan = replace(row.plan, hold=1, chain=row.plan.chain if dim < 192 else 0)
    built = build(monkeypatch, plan, arrays(row, mask))
    check(built, plan)
    for body in main_loops(disassembled(built)):
        products = [line for line in body if "HGMMA" in line]
        assert all(re.search(r", R\d+, gdesc", line) for line in products)


@pytest.mark.parametrize(
    ("schedule", "pingpong"),
    [(0, 0), pinned(1, 0), pinned(2, 0), pinned(0, 1), (1, 1), pinned(2, 1)],
)
def test_every_schedule(monkeypatch, schedule, pingpong) -> None:
    row = next(r for r in TABLE if dims(r)[0] == 128)
    plan = replace(row.plan, schedule=schedule, pingpong=pingpong, pin=pingpong)
    check(build(monkeypatch, plan, arrays(row, "causal")), plan)


@pytest.mark.parametrize(
    ("dim", "causal"), [pinned(64, True), (96, False), pinned(128, True), (256, True)]
)
def test_lazy_rescaling_is_a_branch(monkeypatch, dim, causal) -> None:
    """Around as many products as O has elements in a thread, and no product of the tensor cores is serialised."""
    row = next(r for r in TABLE if dims(r)[0] >= dim and reaches(r, "causal" if causal else "full"))
    row = Row((("dim", dim), ("dim_v", dim)), row.plan, row.source)
    plan = replace(row.plan, lazy=1)
    built = build(monkeypatch, plan, arrays(row, "causal" if causal else "full"))
    check(built, plan)
    for body in main_loops(disassembled(built)):
        votes = [i for i, line in enumerate(body) if "VOTE" in line]
        assert len(votes) == (2 if dim == 96 else dim // 64)  # of 32 elements, or fewer
        for vote in votes:
            jump = next(
                i for i, line in enumerate(body[vote:]) if " BRA" in f" {line}" and "@" in line
            )
            after = body[vote + jump + 1 : vote + jump + 9]
            products = [re.findall(r"\bR\d+\b", line) for line in after if "FMUL" in line]
            assert len(products) >= 4
            assert all(at == what != by for at, what, by in products)  # by a factor, not by itself
            assert len({by for *_, by in products}) <= 2  # a thread has two rows


@pytest.mark.parametrize(
    ("dim", "dim_v", "mask"),
    [
        (64, 64, "causal"), pinned(96, 96, "full"), (128, 128, "causal"), pinned(128, 128, "ragged"),
        pinned(192, 192, "full"), pinned(192, 128, "causal"), (256, 256, "causal"),
    ],
)  # fmt: skip
def test_tiles_that_follow_without_a_gap(monkeypatch, dim, dim_v, mask) -> None:
    """The next tile's scores and the last product of this one are under way together: one is waited for, not both."""
    row = next(r for r in TABLE if dims(r) == (dim, dim_v) and reaches(r, mask))
    plan = replace(row.plan, chain=1, schedule=2)
    if plan.halves:  # which have no room for it
        plan = replace(plan, halves=0, block_k=64)
    built = build(monkeypatch, plan, arrays(row, mask))
    check(built, plan)
    waits = [line for line in disassembled(built) if "WARPGROUP.DEPBAR" in line]
    assert sum(not line.endswith("0x0") for line in waits) == 2 * plan.block_q // sizes.ROWS


@pytest.mark.skipif(not OLD, reason="newer ptxas runs out of registers and serialises products")
@pytest.mark.parametrize(
    ("mask", "more"),
    [("causal", {}), pinned("full", {"pingpong": 1}), pinned("causal", {"pin": 1}), pinned("ragged", {})],
)  # fmt: skip
def test_values_by_halves(monkeypatch, mask, more) -> None:
    """Blocks of 128 keys at d 192, whose values come by 64: fewer instructions a key, no spills in the loop."""
    row = next(r for r in TABLE if dims(r) == (192, 192) and reaches(r, mask))
    plan = replace(row.plan, block_k=128, stages=2, halves=1, lazy=1, pin=0)
    plan = replace(plan, **more)
    check(build(monkeypatch, plan, arrays(row, mask)), plan, outside=of_mask(plan, mask))


def found_by(dim: int, dim_v: int, **more: Any) -> Plan:
    """What the table has for a call."""
    p = Problem(
        device=Device("cuda", "sm90"), batch=1, heads_q=8, heads_kv=1, dim=dim, dim_v=dim_v, dtype="bf16",
        len_q=more.get("len_q", 4096), len_k=4096, right=True, tables=more.get("tables", False),
    )  # fmt: skip
    return next(row.plan for row in TABLE if row.matches(p))


SHORT = {
    "packed heads": (100, 512, 8, {}),
    "one row": (1, 4096, 132, {}),
    "split": (64, 8192, 132, {}),
    "split window": (64, 8192, 132, {"left": 3000}),
}


@pytest.mark.parametrize(
    ("name", "dim", "dim_v"),
    [
        pinned("packed heads", 64, 64), ("packed heads", 128, 128), pinned("one row", 96, 96),
        pinned("one row", 128, 128),
        ("split", 256, 256), ("split window", 64, 64), pinned("split window", 192, 128),
    ],
)  # fmt: skip
def test_short_queries(monkeypatch, name, dim, dim_v) -> None:
    len_q, len_k, multiprocessors, more = SHORT[name]
    q = torch.zeros(1, len_q, 8, dim, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, len_k, 1, d, dtype=torch.bfloat16) for d in (dim, dim_v))
    band = Band(len_k - len_q, more.get("left"), 0)
    x = Arrays(q=q, k=k, v=v, scale=1.0, band=band, len_q=len_q, len_k=len_k)
    plan = found_by(dim, dim_v, len_q=len_q)
    spills = 0 if OLD or dim < 256 else NEWEST_SPLIT
    check(build(monkeypatch, plan, x, multiprocessors), plan, spills)


@pytest.mark.parametrize(
    ("dim", "dim_v", "causal"),
    [(64, 64, True), pinned(128, 128, False), pinned(192, 128, True)],
)
def test_document_tables(monkeypatch, dim, dim_v, causal) -> None:
    q, k, v = (torch.zeros(1, 512, 2, d, dtype=torch.bfloat16) for d in (dim, dim, dim_v))
    table = torch.zeros(1, 512, dtype=torch.int32)
    band = Band(0, None, 0 if causal else None, None, table, table)
    x = Arrays(q=q, k=k, v=v, scale=1.0, band=band, len_q=512, len_k=512)
    plan = found_by(dim, dim_v, tables=True)
    check(build(monkeypatch, plan, x), plan, TABLE_SPILLS)


NEAR = [r for r in ROWS if any(reaches(r.values[0], name) for name in ("causal", "full"))]


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("row", spared(NEAR[::4], first_of_each(NEAR[::4][::-1], "block_q")))
def test_partial_results(monkeypatch, row, folds) -> None:
    mask = next(name for name in ("causal", "full") if reaches(row, name))
    x = replace(arrays(row, mask), dtype=torch.float32)
    if folds:
        b, n, h, _ = x.q.shape
        x.into = torch.zeros(b, n + 64, h, x.v.shape[3])[:, :n], torch.zeros(b, h, n + 64)[..., :n]
    newest = 0 if OLD or dims(row)[0] < 256 else NEWEST_PARTIAL[folds]
    check(build(monkeypatch, row.plan, x), row.plan, newest, FOLDING if folds else 0)


ROWS_HELD = [r for r in ROWS[1::4] if dims(r.values[0])[1] in (64, 128, 256)]
HOLDS = [
    pytest.param(r.values[0], anew, id=f"{r.id}-{'anew' if anew else 'more'}")
    for r, anew in [*((r, False) for r in ROWS_HELD), (ROWS_HELD[0], True)]
]


@pytest.mark.parametrize(("row", "anew"), spared(HOLDS, first_of_each(HOLDS[::-1], "block_q")))
def test_rows_that_are_held(monkeypatch, row, anew) -> None:
    """A tile of O is one address, and 16 bytes of it a thread's instruction: no spills but those of masks."""
    mask = next(name for name in ("causal", "full") if reaches(row, name))
    x = replace(arrays(row, mask), dtype=torch.float32, anew=anew)
    b, n, h, e = (*x.q.shape[:3], x.v.shape[3])
    x.into = torch.zeros(b, h, 2 * n * e)[..., n * e :], torch.zeros(b, h, 2 * n)[..., n:]
    built = build(monkeypatch, row.plan, x)
    newest = 0 if OLD or dims(row)[0] < 256 else NEWEST_PARTIAL[not anew]
    check(built, row.plan, newest)
    ptx = built.asm["ptx"]
    assert (
        len(re.findall(r"st\.global\S*\.v4", ptx)) >= e // 8
    )  # of 64 · e floats, by each warpgroup
    assert anew or len(re.findall(r"ld\.global\S*\.v4", ptx)) >= e // 8


@pytest.mark.parametrize(
    ("dim", "dim_v"), [pinned(80, 80), pinned(192, 128), (40, 72), (160, 160), pinned(64, 128)]
)
def test_padded_dims(monkeypatch, dim, dim_v) -> None:
    row = next(r for r in TABLE if dims(r)[0] >= dim and dims(r)[1] >= dim_v)
    row = Row((("dim", dim), ("dim_v", dim_v)), row.plan, row.source)
    check(build(monkeypatch, row.plan, arrays(row, "causal")), row.plan)
