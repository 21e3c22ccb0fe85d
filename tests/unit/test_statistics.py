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
from relampago.cases import CONTRACT, Case, find
from relampago.distributed.layouts import Layout
from relampago.distributed.pieces import cut
from relampago.distributed.sight import Sight
from relampago.op import arrays_of
from relampago.statistics.call import PACKED, SHAPING

CASES = [case for case in CONTRACT if not {"dropout_p", "deterministic"} & set(case.options)]


def made(case: Case, dtype: torch.dtype) -> tuple:
    """Queries, keys, values and the options that shape scores."""
    (q, k, v), options = case.make(dtype)
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
    products = lowered(q, k, {**options, "bias": None, "score_mod": None, "softcap": None, "alibi_slopes": None})
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
    assert got.keys() == oracle.keys()
    for names in FAMILIES:
        first = {"out": names[0], "lse": names[0], **{f"d{name}": name for name in names}}
        parts = ({key: t[name] for key, name in first.items()} for t in (got, standard, oracle))
        check(label, *parts, dtype)


FEW = ("causal", "packed-cross", "block-sparse", "bias-finfo-min", "user-mod", "sinks-window", "large-values")
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
    got = tiled(q, k, options, 7, backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {t.dtype for t in got.values()} == {wide}
    coarse = torch.float32 if dtype == torch.float64 else dtype
    oracle, standard = (dense(q, k, options, 7, d) for d in (torch.float64, coarse))
    within_budget(f"{backend} {case.name}", got, standard, oracle, dtype)
    function = rl.attention_varlen if PACKED[0] in options else rl.attention
    options = {**options, "return_lse": True, "backend": backend}
    plain = function(q, k, v, **options)
    *both, top = function(q, k, v, **options, return_max_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, both, strict=True))
    within_budget(f"{backend} {case.name}", {**got, "max_logits": top}, standard, oracle, dtype)
