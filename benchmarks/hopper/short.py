"""The host's time; packed sequences against the dense rate; few queries, beside Triton's decode and FA3's splits."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
import triton

import relampago as rl
from benchmarks.hopper.clock import Call, import_peers, milliseconds
from benchmarks.hopper.watched import Rows, say

FEW = (  # batch, queries, keys, heads, kv heads
    (1, 1, 8192, 32, 8), (1, 1, 32768, 32, 8), (8, 1, 32768, 32, 8), (1, 16, 32768, 32, 8),
    (1, 64, 16384, 32, 8), (1, 64, 65536, 16, 16), (1, 256, 16384, 16, 2), (4, 128, 8192, 16, 16),
    (1, 512, 16384, 16, 1), (16, 64, 2048, 32, 4),
)  # fmt: skip
PACKED_DIMS = (64, 128, 256)
KINDS = {"device": "cuda", "dtype": torch.bfloat16}


def _few_calls(
    b: int, lq: int, lk: int, heads: int, kv: int, dim: int, peers: dict[str, Any]
) -> dict[str, Call]:
    """Ours, Triton's and FA3's, without and with splits."""
    q = torch.randn(b, lq, heads, dim, **KINDS)
    k, v = (torch.randn(b, lk, kv, dim, **KINDS) for _ in range(2))
    calls: dict[str, Call] = {
        name or "chosen": functools.partial(rl.attention, q, k, v, causal=True, backend=name)
        for name in (None, "triton")
    }
    if "fa3" in peers:
        calls["fa3"] = functools.partial(peers["fa3"], q, k, v, causal=True)
        calls["fa3 splits"] = functools.partial(peers["fa3"], q, k, v, causal=True, num_splits=0)
    return calls


def few(until: float, peers: dict[str, Any]) -> None:
    """Microseconds, GB/s of keys and values, and TFLOP/s."""
    for dim in (64, 128):
        for b, lq, lk, heads, kv in FEW:
            for name, call in _few_calls(b, lq, lk, heads, kv, dim, peers).items():
                if time.time() > until:
                    return
                row = {"name": name, "shape": [b, lq, lk, heads, kv, dim]}
                try:
                    ms = milliseconds(call)
                    gbs = 4 * b * lk * kv * dim / ms * 1e-6
                    tflops = 4 * b * heads * lq * lk * dim / ms * 1e-9
                    say("few", us=ms * 1e3, gbs=gbs, tflops=tflops, **row)
                except Exception as fault:
                    say("note", why=f"{type(fault).__name__}: {str(fault)[-200:]}", **row)


def _packed_calls(dim: int, causal: bool) -> tuple[tuple[Call, float], tuple[Call, float]]:
    """64 sequences of 128 to 8k, and a dense problem of 4k with about as many FLOPs; each with its FLOPs."""
    chance = random.Random(3)
    lens = [int(128 * 64 ** chance.random()) for _ in range(64)]
    pairs, length, heads, most = sum(n * n for n in lens), 4096, 2048 // dim, max(lens)
    batch = max(1, round(pairs / length**2))
    cu = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(sum(lens), heads, dim, **KINDS) for _ in range(3))
    dense = [torch.randn(batch, length, heads, dim, **KINDS) for _ in range(3)]
    options = {"causal": causal, "backend": "gluon_sm90"}
    each = heads * 4 * dim * (0.5 if causal else 1.0)
    return (
        (lambda: rl.attention_varlen(q, k, v, cu, cu, most, most, **options), pairs * each),
        (lambda: rl.attention(*dense, **options), batch * length**2 * each),
    )


def packed(dim: int, causal: bool) -> None:
    """The two rates."""
    rate, dense = (flops / milliseconds(fn) * 1e-9 for fn, flops in _packed_calls(dim, causal))
    say("packed", dim=dim, causal=causal, tflops=rate, dense=dense, ratio=rate / dense)


def jobs() -> list[Call]:
    """All that `short` calls of ours, to be compiled ahead; each makes its tensors itself."""

    def each_few(dim: int, shape: tuple[int, ...]) -> Call:
        return lambda: [call() for call in _few_calls(*shape, dim, {}).values()]

    def each_packed(dim: int, causal: bool) -> Call:
        return lambda: [call() for call, _ in _packed_calls(dim, causal)]

    found = [each_few(dim, shape) for dim in (64, 128) for shape in FEW]
    return found + [each_packed(dim, causal) for dim in PACKED_DIMS for causal in (False, True)]


def host() -> None:
    """Microseconds of the CPU for a call whose kernel is short: ours, PyTorch's, and Triton's least."""
    q, k, v = (torch.randn(1, 128, 4, 64, **KINDS) for _ in range(3))
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    leaf = q.clone().requires_grad_()
    calls: dict[str, Call] = {
        "gluon_sm90": lambda: rl.attention(q, k, v, causal=True, backend="gluon_sm90"),
        "gluon_sm90 with gradient": lambda: rl.attention(leaf, k, v, causal=True),
        "triton": lambda: rl.attention(q, k, v, causal=True, backend="triton"),
        "sdpa": lambda: F.scaled_dot_product_attention(qt, kt, vt, is_causal=True),
        "an empty kernel": lambda: nothing[(1,)](q, 1),
    }
    for name, call in calls.items():
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - begun) * 1e4)
            torch.cuda.synchronize()
        say("host", name=name, us=min(times))


@triton.jit
def nothing(x, n):
    """Does nothing."""


def short(seconds: float, *names: str) -> None:
    """All three."""
    until = time.time() + seconds
    host()
    for dim in PACKED_DIMS:
        for causal in (False, True):
            packed(dim, causal)
    few(until, import_peers(names))


def report(rows: Rows) -> None:
    """A line per shape."""
    for row in rows:
        if row["kind"] == "packed":
            print(f"packed d{row['dim']} {'causal' if row['causal'] else 'full':6} {row['tflops']:5.0f} TFLOP/s, "
                  f"dense {row['dense']:5.0f}: {row['ratio']:.2f}")  # fmt: skip
        elif row["kind"] == "host":
            print(f"host {row['name']}: {row['us']:.1f} us a call")
        elif row["kind"] == "note":
            print(row)
    shapes = dict.fromkeys(tuple(row["shape"]) for row in rows if row["kind"] == "few")
    for shape in shapes:
        mine = [row for row in rows if row["kind"] == "few" and tuple(row["shape"]) == shape]
        cells = [
            f"{r['name']} {r['us']:.1f} us {r['gbs']:.0f} GB/s {r['tflops']:.0f} TF" for r in mine
        ]
        print(f"(B, Lq, Lk, H, G, D) {shape}: " + "; ".join(cells))
