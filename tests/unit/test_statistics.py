"""Statistics of the weights against the dense matrix in fp64, on every backend and every case of the catalogue."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from budget import check

import relampago as rl
from relampago import statistics
from relampago.api import Options, Packing, prepare
from relampago.backends import reference
from relampago.backends.gluon import KNOWS
from relampago.cases import CONTRACT, Case, find
from relampago.distributed.layouts import Layout
from relampago.distributed.pieces import cut
from relampago.distributed.sight import Sight
from relampago.op import arrays_of
from relampago.problem import STATISTICS
from relampago.statistics.call import PACKED, SHAPING

CASES = [case for case in CONTRACT if not {"dropout_p", "deterministic"} & set(case.options)]


def made(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple:
    """Queries, keys, values and the options that shape scores."""
    (q, k, v), options = case.make(dtype, device)
    return q, k, v, {name: value for name, value in options.items() if name in (*PACKED, *SHAPING)}


def lowered(q, k, options):
    """The arrays of a call, for the dense formula."""
    options = dict(options)
    packing = Packing(*(options.pop(n) for n in PACKED)) if PACKED[0] in options else None
    return arrays_of(prepare(q, k, k, Options(**options), packing=packing))


def dense(q, k, options, last: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All statistics from the N×N matrix, in a dtype."""
    x = lowered(q, k, options)
    lse, entropy, _ = reference.describe_rows(x, dtype)
    products = lowered(
        q, k, {**options, "bias": None, "score_mod": None, "softcap": None, "alibi_slopes": None}
    )
    top = reference.describe_rows(products, dtype).max_logits
    columns, few = (reference.sum_columns(x, lse, n, dtype) for n in (x.len_q, last))
    found = {"lse": lse, "entropy": entropy, "max_logits": top}
    return {**found, "columns": columns, "columns of the last": few}


def tiled(q, k, options, last: int, backend: str) -> dict[str, torch.Tensor]:
    """The same from the backend."""
    options = {**options, "backend": backend}
    found = statistics.rows(q, k, **options)
    columns = statistics.column_sums(q, k, **options)
    few = statistics.column_sums(q, k, last=last, **options)
    return {**found._asdict(), "columns": columns, "columns of the last": few}


FAMILIES = (("lse", "max_logits"), ("entropy",), ("columns", "columns of the last"))


def within_budget(label: str, got: dict, standard: dict, oracle: dict, dtype: torch.dtype) -> None:
    """A family shares its worst relative error, as in `check`: one number of max_logits is all chance."""
    for names in FAMILIES:
        if got.keys().isdisjoint(names):
            continue
        first = {"out": names[0], "lse": names[0], **{f"d{name}": name for name in names}}
        parts = ({key: t[name] for key, name in first.items()} for t in (got, standard, oracle))
        check(label, *parts, dtype)


def agree(backend: str, name: str, q, k, v, options, dtype: torch.dtype) -> tuple:
    """Assert that statistics and max logits keep the budget; out and LSE of the call that gives max logits."""
    got = tiled(q, k, options, 7, backend)
    assert set(got) == {name for names in FAMILIES for name in names}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {t.dtype for t in got.values()} == {wide}
    coarse = torch.float32 if dtype == torch.float64 else dtype
    oracle, standard = (dense(q, k, options, 7, d) for d in (torch.float64, coarse))
    within_budget(f"{backend} {name}", got, standard, oracle, dtype)
    function = rl.attention_varlen if PACKED[0] in options else rl.attention
    out, lse, top = function(
        q, k, v, **options, return_lse=True, backend=backend, return_max_logits=True
    )
    within_budget(f"{backend} {name}", {**got, "max_logits": top}, standard, oracle, dtype)
    return out, lse


FEW = ("packed-cross", "block-sparse", "bias-finfo-min", "user-mod")
ASKED = [
    *(("cpu", case, torch.float32) for case in CASES),
    *(("cpu", find(name), dtype) for name in FEW for dtype in (torch.bfloat16, torch.float64)),
    *(("reference", find(name), torch.float32) for name in FEW),
]


@pytest.mark.parametrize(
    ("backend", "case", "dtype"), ASKED, ids=[f"{b}-{c.name}-{str(d)[6:]}" for b, c, d in ASKED]
)
def test_every_case(backend: str, case: Case, dtype: torch.dtype) -> None:
    q, k, v, options = made(case, dtype)
    both = agree(backend, case.name, q, k, v, options, dtype)
    function = rl.attention_varlen if PACKED[0] in options else rl.attention
    plain = function(q, k, v, **options, return_lse=True, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(plain, both, strict=True))


CHOSEN = (
    "causal",
    "gqa",
    "documents",
    "block-sparse",
    "mask-function-per-head",
    "user-mod",
    "bias",
    "sinks",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_rows_are_rows_of_the_matrix(name: str, monkeypatch, device) -> None:
    monkeypatch.setattr(statistics.chosen, "CELLS", 700)  # so that there are several runs
    q, k, _, options = made(find(name), torch.float64, device)
    x = lowered(q, k, options)
    ones = [reference.Sequence(x, b, torch.float64) for b in range(x.batch)]
    scores = torch.stack([one.scores()[-1] for one in ones])
    p = torch.stack([one.weights(s, s) for one, s in zip(ones, scores, strict=True)])
    rows = torch.tensor([[-1, 3, 20, 3], [0, 11, -7, 29]], device=device)
    at = rows[:, None, :, None].remainder(q.shape[1]).expand(-1, q.shape[2], -1, k.shape[1])
    got = statistics.weights(q, k, rows, **options)
    torch.testing.assert_close(got, p.gather(2, at))
    weights, keys = statistics.top_keys(q, k, rows, 5, **options)
    want = p.gather(2, at).sort(-1, descending=True).values[..., :5]
    torch.testing.assert_close(weights, want)
    seen = keys >= 0
    torch.testing.assert_close(got.gather(-1, keys.clamp(min=0))[seen], weights[seen])
    assert bool((weights[~seen] == 0).all())
    shared = statistics.weights(q, k, [2, -1], **options)
    torch.testing.assert_close(shared[:, :, 1], p[:, :, -1])


def test_chosen_rows_of_packed_sequences(device) -> None:
    q, k, _, options = made(find("packed-cross"), torch.float64, device)
    rows = [44, 2, 6, 47]  # sequences 1, 0, 1 and 3, in no order; the last sees no key
    got = statistics.weights(q, k, rows, **options)
    weights, keys = statistics.top_keys(q, k, rows, 20, **options)
    cu_q, cu_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    for place, row in enumerate(rows):
        b = sum(row >= end for end in cu_q[1:])
        own, keys_b = q[None, cu_q[b] : cu_q[b + 1]], k[None, cu_k[b] : cu_k[b + 1]]
        n = keys_b.shape[1]
        want = statistics.weights(own, keys_b, [row - cu_q[b]], causal=True)[0, :, 0]
        torch.testing.assert_close(got[:, place, :n], want)
        assert bool((got[:, place, n:] == 0).all())
        assert bool((keys[:, place, n:] == -1).all())
        torch.testing.assert_close(weights[:, place, :n], want.sort(-1, descending=True).values)


OPTIONS = {"causal": {"causal": True}, "window": {"window": (13, 4)}, "softcap": {"softcap": 2.0}}


@pytest.mark.parametrize("name", OPTIONS)
def test_shards_of_the_keys_merge_to_the_whole(name: str) -> None:
    """Cut keys anywhere: rows merge, columns of shards stand side by side, top keys join."""
    q, k = torch.randn(2, 40, 4, 16), torch.randn(2, 60, 2, 16)
    options = OPTIONS[name]
    whole = statistics.rows(q, k, **options)
    cuts = ((0, 9), (9, 41), (41, 60))
    offsets = [20 - a for a, _ in cuts]
    shards = [k[:, a:b] for a, b in cuts]
    parts = [
        statistics.rows(q, s, offset=o, **options) for s, o in zip(shards, offsets, strict=True)
    ]
    merged = statistics.merge(*parts)
    for got, want in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, want)
    twice = statistics.merge(statistics.merge(*parts[:2]), parts[2])
    for got, want in zip(twice, whole, strict=True):
        torch.testing.assert_close(got, want)
    columns = [
        statistics.column_sums(q, s, lse=merged.lse, offset=o, **options)
        for s, o in zip(shards, offsets, strict=True)
    ]
    torch.testing.assert_close(torch.cat(columns, -1), statistics.column_sums(q, k, **options))
    tops = [
        statistics.top_keys(q, s, [5, 39], 6, lse=merged.lse, offset=o, **options)
        for s, o in zip(shards, offsets, strict=True)
    ]
    every = torch.cat([weights for weights, _ in tops], -1).topk(6, -1).values
    torch.testing.assert_close(every, statistics.top_keys(q, k, [5, 39], 6, **options)[0])


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_a_rings_blocks_merge_to_the_whole(kind: str) -> None:
    """Each rank's rows against each rank's keys, cut as the ring cuts them: max and sums join."""
    length, size = 61, 3
    q, k = torch.randn(1, length, 2, 8), torch.randn(1, length, 2, 8)
    layout, sight = Layout(kind, length, size), Sight.of(length, causal=True, window=(25, None))
    places = [layout.positions(rank) for rank in range(size)]
    whole = statistics.rows(q, k, causal=True, window=(25, None))
    top = torch.full((1, 2), -torch.inf)
    columns = torch.zeros(1, 2, length)
    for mine in places:
        lse = whole.lse[:, :, mine]
        nothing = statistics.rows(q[:, mine], k[:, :0])
        parts = [nothing]
        for theirs in places:
            for piece in cut(mine, theirs, sight):
                rows, keys = mine[piece.rows], theirs[piece.keys]
                options = piece.options(q.device)
                found = statistics.rows(q[:, rows], k[:, keys], **options)
                wide = [t.clone() for t in nothing]
                for t, part in zip(wide[:2], found[:2], strict=True):
                    t[:, :, piece.rows] = part
                parts.append(statistics.RowStatistics(*wide[:2], found.max_logits))
                part = lse[:, :, piece.rows]
                columns[:, :, keys] += statistics.column_sums(
                    q[:, rows], k[:, keys], lse=part, **options
                )
        merged = statistics.merge(*parts)
        torch.testing.assert_close(merged.entropy, whole.entropy[:, :, mine])
        torch.testing.assert_close(merged.lse, lse)
        top = torch.maximum(top, merged.max_logits)
    torch.testing.assert_close(top, whole.max_logits)
    torch.testing.assert_close(
        columns, statistics.column_sums(q, k, causal=True, window=(25, None))
    )


def test_entropy_keeps_its_digits_where_scores_are_huge() -> None:
    """Sixteen equal scores of 3e7: LSE - Σ p s would be rounding; the entropy is log 16."""
    q, k = torch.full((1, 3, 1, 4), 2e7), torch.ones(1, 16, 1, 4)
    got = statistics.rows(q, k, scale=0.4, backend="cpu")
    torch.testing.assert_close(got.entropy, torch.full((1, 1, 3), 16.0).log())


def test_a_users_lse_and_its_refusal() -> None:
    q, k = torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 16)
    _, lse = rl.attention(q, k, k, causal=True, return_lse=True)
    got = statistics.column_sums(q, k, lse=lse, causal=True)
    torch.testing.assert_close(got, statistics.column_sums(q, k, causal=True))
    torch.testing.assert_close(got.sum(-1), torch.full((1, 2), 30.0))
    for bad, text in (
        ({"lse": lse[:, :1]}, "lse has shape"),
        ({"last": 0}, "last is 0"),
        ({"dropout_p": 0.1}, "dropout_p is no option"),
        ({"max_seqlen_q": 3}, "cu_seqlens_q is missing"),
    ):
        with pytest.raises(rl.InvalidInput, match=text):
            statistics.column_sums(q, k, **bad)
    for rows, text in (
        ([30], "rows reaches"),
        ([0.5], "rows has dtype"),
        ([[1], [2]], "rows has shape"),
    ):
        with pytest.raises(rl.InvalidInput, match=text):
            statistics.weights(q, k, rows)
    with pytest.raises(rl.InvalidInput, match="n is 0"):
        statistics.top_keys(q, k, [0], 0)
    with pytest.raises(rl.InvalidInput, match="parts is empty"):
        statistics.merge()
    with pytest.raises(rl.InvalidInput, match=r"parts\[1\]: lse has shape"):
        statistics.merge(statistics.rows(q, k), statistics.rows(q[:, :3], k))


def test_max_logits_in_pytorch() -> None:
    """Gradients of out and LSE as without it; torch.compile; opcheck; refused by name under torch.func."""
    q, k, v = (torch.randn(2, 24, 2, 16, requires_grad=True) for _ in range(3))

    def loss(more: bool):
        out, lse, *_ = rl.attention(q, k, v, causal=True, return_lse=True, return_max_logits=more)
        return torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))

    assert all(torch.equal(a, b) for a, b in zip(loss(False), loss(True), strict=True))
    _, top = rl.attention(q, k, v, return_max_logits=True)
    assert not top.requires_grad
    compiled = torch.compile(
        lambda q: rl.attention(q, k, v, causal=True, return_max_logits=True),
        fullgraph=True,
        backend="aot_eager",
    )
    for got, want in zip(
        compiled(q), rl.attention(q, k, v, causal=True, return_max_logits=True), strict=True
    ):
        torch.testing.assert_close(got, want)
    call = tuple(prepare(q, k, v, Options(causal=True)))
    torch.library.opcheck(torch.ops.relampago.forward_max.default, call)
    still = tuple(prepare(*(t.detach() for t in (q, k, v)), Options(causal=True)))
    torch.library.opcheck(torch.ops.relampago.row_statistics.default, (24, *still))
    lse = torch.zeros(2, 2, 24)
    torch.library.opcheck(torch.ops.relampago.column_sums.default, (lse, 9, *still))
    with pytest.raises(rl.Unsupported, match="return_max_logits inside a transform"):
        torch.func.vmap(lambda q: rl.attention(q, q, q, return_max_logits=True))(
            torch.randn(3, 1, 4, 2, 8)
        )


def test_a_backend_that_does_not_know_a_statistic_says_so() -> None:
    q = torch.randn(1, 8, 2, 64, dtype=torch.bfloat16)
    assert KNOWS & {*STATISTICS} == {"max logits"}
    with pytest.raises(rl.Unsupported, match="gluon_sm90"):
        statistics.rows(q, q, backend="gluon_sm90")


MEMORY = """
import torch
from relampago import statistics
from relampago.cli.memory import growth
torch.manual_seed(0)
q, k = (torch.randn(1, {n}, 2, 32) for _ in range(2))
small = torch.randn(1, 64, 2, 32)
def step(q, k):
    options = dict(causal=True, backend="{backend}")
    kept = statistics.rows(q, k, **options), statistics.column_sums(q, k, **options)
    return kept, statistics.top_keys(q, k, [5, -1], 9, causal=True)
print(growth(lambda: step(small, small), lambda: step(q, k)))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="measured as Linux measures it"
)
def test_no_n_by_n_array() -> None:
    def growth(n: int, backend: str) -> int:
        code = MEMORY.format(n=n, backend=backend)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
        )
        return int(done.stdout)

    n, few = 4096, 2048
    matrix = 2 * n * n * 4  # the scores of 2 heads in fp32: 134 MB
    assert growth(n, "cpu") < matrix / 3
    assert growth(few, "reference") > 2 * few * few * 4  # so the measurement would see one
