"""ONE suite: every backend on every case of the catalogue. A refusal is asserted with its words, never skipped."""

from __future__ import annotations

import pytest
import torch
from budget import check
from oracle import dense, run

import relampago as rl
from relampago.api import Options, Packing, prepare
from relampago.backends import BACKENDS
from relampago.cases import CONTRACT, Case
from relampago.op import problem_of
from relampago.problem import Wanted

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def call(tensors, options):
    """The public call that a case amounts to."""
    if "cu_seqlens_q" in options:
        return rl.attention_varlen(*tensors, **options, return_lse=True)
    return rl.attention(*tensors, **options, return_lse=True)


def refusals(backend, tensors, options) -> tuple[str | None, str | None]:
    """Why the backend cannot run the case forward, and backward; None if it can."""
    options = dict(options)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = Packing(*(options.pop(n) for n in names)) if "cu_seqlens_q" in options else None
    lowered = prepare(*tensors, Options(**options), packing=packing)
    forward = problem_of(lowered)
    backward = problem_of(lowered, wanted=Wanted(bias="bias" in options, sinks="sinks" in options))
    return backend.why_not(forward), backend.why_not(backward)


def forward_only(named, tensors, options) -> dict[str, torch.Tensor]:
    """Out and LSE of a backend that leaves the backward to another."""
    with torch.no_grad():
        out, lse = named(tensors, options)
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CONTRACT, ids=lambda c: c.name)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_contract(backend, case: Case, dtype: torch.dtype, device: str) -> None:
    tensors, options = case.make(dtype, device)
    no_forward, no_backward = refusals(backend, tensors, options)

    def named(t, o):
        return call(t, {**o, "backend": backend.name})

    if no_forward or no_backward:
        with pytest.raises(rl.Unsupported) as caught:
            run(named, tensors, options, dtype)
        assert (no_forward or no_backward) in str(caught.value)
    if no_forward:
        return
    kept = [t.clone() for t in tensors]
    got = (
        forward_only(named, tensors, options)
        if no_backward
        else run(named, tensors, options, dtype)
    )
    coarse = torch.float32 if dtype == torch.float64 else dtype
    standard = run(lambda t, o: dense(t, o, coarse), tensors, options, coarse)
    oracle = run(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    oracle = {name: oracle[name] for name in got}
    for name in oracle:
        wide = name in ("lse", "dbias", "dsinks") and dtype != torch.float64
        assert got[name].dtype == (torch.float32 if wide else dtype)
    check(f"{backend.name} {case.name}", got, standard, oracle, dtype)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True)), (
        "inputs were written to"
    )
