"""Layouts, reach and cutting: laws by brute force over positions; load balance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.problems import LENGTH, MASKS
from relampago.distributed.layouts import KINDS, Layout
from relampago.distributed.pieces import cut, hull, reach
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.schedule import build
from relampago.distributed.sight import Sight
from relampago.errors import InvalidInput

STARTS = (0, 1, 2, 30, 64)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 200), st.integers(1, 40), st.booleans())
def test_every_token_lies_on_one_rank_and_ranks_ascend(kind, length, size, packed) -> None:
    starts = tuple(s for s in STARTS if s < length) if packed and length else None
    layout = Layout(kind, length, size, starts)
    every = [layout.positions(r) for r in range(size)]
    assert torch.equal(torch.cat(every).sort().values, torch.arange(length))
    assert all(bool((p.diff() > 0).all()) for p in every)
    assert sum(layout.counts) == length
    documents = 1 if starts is None or not kind.startswith("documents") else len(starts)
    assert max(layout.counts) - min(layout.counts) <= 1 + documents


def test_known_layouts() -> None:
    assert Layout("zigzag", 16, 4).positions(1).tolist() == [2, 3, 12, 13]
    assert Layout("striped", 7, 3).positions(1).tolist() == [1, 4]
    assert Layout("contiguous", 8, 4).positions(3).tolist() == [6, 7]
    packed = Layout("documents_zigzag", 24, 2, (0, 8))
    assert packed.positions(0).tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]


def dense(sight: Sight, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    start, end = sight.runs(q)
    return (k >= start[..., None]) & (k < end[..., None])


def sights():
    for name, options in MASKS.items():
        plain = {n: o for n, o in options.items() if n in ("causal", "window", "mask")}
        yield name, Sight.of(LENGTH, **plain)


@pytest.mark.parametrize(("name", "sight"), list(sights()), ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_sight_is_what_the_rules_show(name, sight) -> None:
    from relampago.api import Options, prepare
    from relampago.backends.reference import attend
    from relampago.op import arrays_of

    plain = {n: o for n, o in MASKS[name].items() if n in ("causal", "window", "mask")}
    zero = torch.zeros(2, LENGTH, 1, 1, dtype=torch.float64)
    eye = torch.eye(LENGTH, dtype=torch.float64)[None, :, None].expand(2, -1, -1, -1)
    out, _ = attend(arrays_of(prepare(zero, zero, eye, Options(**plain))), torch.float64)
    place = torch.arange(LENGTH)
    assert torch.equal((out[:, :, 0] > 0), dense(sight, place, place).expand(2, -1, -1))


@pytest.mark.parametrize(("name", "sight"), list(sights()), ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous"])
def test_pieces_show_exactly_what_is_seen(kind, name, sight) -> None:
    """Each visible pair in one piece, as `partial` would mask it; and within the reach of the rank."""
    layout = Layout(kind, LENGTH, 3)
    for a in range(3):
        for b in range(3):
            q, k = layout.positions(a), layout.positions(b)
            want = dense(sight, q, k)
            got = torch.zeros_like(want, dtype=torch.int64)
            for piece in cut(q, k, sight):
                i = torch.arange(piece.rows.stop - piece.rows.start)[:, None]
                j = torch.arange(piece.keys.stop - piece.keys.start)[None]
                seen = torch.ones(1, i.shape[0], j.shape[1], dtype=torch.bool)
                if piece.table is not None:
                    start, end = piece.table
                    seen = (j >= start[..., None]) & (j < end[..., None])
                if piece.causal:
                    seen = seen & (j <= i + piece.offset)
                if piece.left is not None:
                    seen = seen & (j >= i + piece.offset - piece.left)
                got[:, piece.rows, piece.keys] += seen
                assert piece.pairs == pytest.approx(seen.sum().item() / seen.shape[0])
            assert torch.equal(got, want.long())
            slice_ = hull(reach(q, sight), k)
            if want.any():
                assert slice_ is not None
                columns = want.any(0).any(0).nonzero().flatten()
                assert slice_[0] <= columns.min()
                assert columns.max() < slice_[1]


def test_common_pieces_are_bands_without_tables() -> None:
    """Causal on any layout, windows on blocks of one run: kernels then skip tiles by numbers alone."""
    for kind in ("zigzag", "striped", "contiguous"):
        layout = Layout(kind, 96, 4)
        for a in range(4):
            for b in range(4):
                pieces = cut(layout.positions(a), layout.positions(b), Sight.of(96, causal=True))
                assert all(p.table is None for p in pieces)
                assert len(pieces) <= 1


@pytest.mark.parametrize(("kind", "most"), [("zigzag", 1.005), ("striped", 1.01)])
@pytest.mark.parametrize("size", [2, 8, 32])
def test_causal_load_is_balanced(kind, most, size) -> None:
    sight = Sight.of(64 * size * 2, causal=True)
    layout = Layout(kind, 64 * size * 2, size)
    tables = [build("ring", layout, 1, r, sight) for r in range(size)]
    loads = [t.pairs for t in tables]
    assert max(loads) / (sum(loads) / size) <= most
    steps = [[sum(p.pairs for w in s.work for p in w.pieces) for s in t.slots] for t in tables]
    lockstep = sum(max(column) for column in zip(*steps, strict=True))
    assert lockstep / (sum(loads) / size) <= 1.02


def test_contiguous_is_as_bad_as_the_literature_says() -> None:
    loads = [
        build("ring", Layout("contiguous", 1024, 8), 1, r, Sight.of(1024, causal=True)).pairs
        for r in range(8)
    ]
    assert max(loads) / (sum(loads) / 8) == pytest.approx(15 / 8, rel=0.01)


def test_labels_and_position_ids_know_documents() -> None:
    plan = ContextParallelPlan(3, 10, documents=(0, 4), layout="striped")
    tokens = torch.arange(100, 110)[None]
    parts = [plan.shard_labels(tokens, rank=r) for r in range(3)]
    whole = torch.empty(10, dtype=torch.int64)
    ids = torch.empty(10, dtype=torch.int64)
    for r, part in enumerate(parts):
        whole[plan.positions(r)] = part[0]
        ids[plan.positions(r)] = plan.position_ids(r)
    assert whole.tolist() == [101, 102, 103, -100, 105, 106, 107, 108, 109, -100]
    assert ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mesh": 4, "length": 8, "strategy": "star"}, "strategy is 'star'"),
        ({"mesh": 4, "length": 8, "layout": "spiral"}, "layout is 'spiral'"),
        ({"mesh": 0, "length": 8}, "mesh has shape"),
        ({"mesh": 4, "length": -1}, "length is -1"),
        ({"mesh": 4, "length": 8, "strategy": "usp"}, "two dimensions"),
        ({"mesh": (2, 2), "length": 8, "strategy": "ring"}, "one dimension"),
        ({"mesh": 4, "length": 8, "documents": (0, 9)}, "documents is"),
        ({"mesh": 4, "length": 8, "timeout": 0}, "timeout is 0"),
        ({"mesh": "four", "length": 8}, "mesh is a str"),
    ],
)  # fmt: skip
def test_bad_plans(given, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        ContextParallelPlan(**given)
