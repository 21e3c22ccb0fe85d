"""Partial results that kernels merge in place, and their backward, against the whole: the bricks of ring attention."""

from __future__ import annotations

import pytest
import torch
from budget import check
from gpu.card import KERNELS, LENGTHS, PRESENT, sized
from oracle import dense, run

import relampago as rl
from relampago.cases import Case
from relampago.distributed import ContextParallelPlan, Simulation


class Sharded(torch.autograd.Function):
    """Attention by shards of the keys, in an order of their own; one has no keys, and rows may see none of another."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        n, batch, rows, heads = k.shape[1], *q.shape[:3]
        ctx.cuts = ((2 * n // 3, n), (0, n // 5), (n // 2, n // 2), (n // 5, 2 * n // 3))
        longer = torch.full((batch, rows + 40, heads, v.shape[3]), 7.0, device=q.device)
        longer_lse = torch.full((batch, heads, rows + 40), 7.0, device=q.device)
        out, lse = longer[:, 3 : rows + 3], longer_lse[:, :, 3 : rows + 3]
        out.zero_(), lse.fill_(-torch.inf)
        for a, b in ctx.cuts:
            found = rl.partial(
                q, k[:, a:b], v[:, a:b], offset=n - rows - a, into=(out, lse), **options
            )
            assert found[0] is out
            assert found[1] is lse
        for t in (longer.transpose(1, 2), longer_lse):
            assert bool((t[:, :, :3] == 7).all())
            assert bool((t[:, :, rows + 3 :] == 7).all())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        n = k.shape[1]
        dq, dk, dv = (torch.zeros(t.shape, device=q.device) for t in (q, k, v))
        for a, b in ctx.cuts:
            keys = dk[:, a:b], dv[:, a:b]
            anew = a == 0  # these are returned, all others are added to what stands there
            found = rl.partial_backward(
                dout.to(q.dtype), q, k[:, a:b], v[:, a:b], out, lse, dlse=dlse,
                offset=n - q.shape[1] - a, into=(dq, None, None) if anew else (dq, *keys), **ctx.options,
            )  # fmt: skip
            assert found[0] is dq
            if anew:
                keys[0].copy_(found[1])
                keys[1].copy_(found[2])
        return dq, dk, dv, None


def judge(case: Case, backend: str, device: str) -> None:
    """Out, LSE and gradients of the shards' merged whole."""
    dtype = torch.bfloat16
    tensors, options = case.make(dtype, device)
    got = run(lambda t, o: Sharded.apply(*t, {**o, "backend": backend}), tensors, options, dtype)
    standard = run(lambda t, o: dense(t, o, dtype), tensors, options, dtype)
    oracle = run(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    check(f"{backend} {case.name}", got, standard, oracle, dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", KERNELS)
def test_lengths(backend: str, length: int, device: str) -> None:
    judge(sized(length, causal=True), backend, device)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (40, 300)}], ids=["causal", "window"]
)
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("backend", KERNELS)
def test_head_dims(backend: str, dim: int, options, device: str) -> None:
    judge(sized(LENGTHS[len(LENGTHS) // 2], dim, **options), backend, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [1024, 700] if PRESENT else [40])
@pytest.mark.parametrize("dim", [64, 128, 256] if PRESENT else [32])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_ring(
    backend: str, dim: int, length: int, deterministic: bool, device, monkeypatch
) -> None:
    """Virtual ranks, whose rows Hopper's kernels hold where their halves begin with a block: at 1024, not at 700."""
    if backend == "gluon_sm90":
        monkeypatch.setattr("relampago.backends.gluon.held_launch.FILLED", 0)
    ring = Simulation(ContextParallelPlan(4, length, strategy="ring"))

    def call(tensors, options):
        more = {**options, "deterministic": deterministic, "backend": backend}
        return ring.attention(*tensors[:3], return_lse=True, **more)

    dtype = torch.bfloat16
    tensors, options = sized(length, dim, causal=True).make(dtype, device)
    got = run(call, tensors, options, dtype)
    standard = run(lambda t, o: dense(t, o, dtype), tensors, options, dtype)
    oracle = run(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    check(f"{backend} ring {length} d{dim}", got, standard, oracle, dtype)


@pytest.mark.parametrize("backend", KERNELS)
def test_few_rows_and_many_keys(backend: str, device: str) -> None:
    """Cut over keys as well, whose parts are put together before they are merged."""
    case = Case(name="split", len_q=24, len_k=3 * LENGTHS[-1], kv_heads=2, dim=64)
    judge(case, backend, device)
