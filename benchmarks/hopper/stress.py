"""Endurance: launches of random shapes, as fast as can be; a hang ends the job, a result that changes is reported."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import torch

import relampago as rl
from benchmarks.hopper.watched import Rows, say

EACH = 10  # launches of a shape, without a wait between
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def _shape(chance: random.Random) -> dict[str, Any]:
    """One problem: long ones are rare, short and ragged ones are not."""
    group = chance.choice((1, 1, 2, 4, 8))
    long = chance.random() < 0.1
    least = 8 // group + 1  # fewer rows are left to decoding kernels
    lq = chance.choice((least, chance.randint(least, 64), chance.randint(65, 3000)))
    return {
        "dims": chance.choice(DIMS), "batch": chance.randint(1, 4), "kv": chance.choice((1, 2, 4)), "group": group,
        "lq": lq, "lk": chance.randint(4000, 20000) if long else chance.randint(1, 3000),
        "causal": chance.random() < 0.6, "packed": chance.random() < 0.25, "half": chance.random() < 0.2,
        "window": (chance.randint(0, 700), 0) if chance.random() < 0.15 else None, "back": chance.random() < 0.25,
    }  # fmt: skip


def _call(s: dict[str, Any], chance: random.Random) -> Any:
    dim, dim_v = s["dims"]
    heads, kv = s["kv"] * s["group"], s["kv"]
    options = {"causal": s["causal"], "window": s["window"], "backend": "gluon_sm90"}
    dtype = torch.float16 if s["half"] else torch.bfloat16
    kinds = {"device": "cuda", "dtype": dtype, "requires_grad": s["back"]}
    if not s["packed"]:
        q = torch.randn(s["batch"], s["lq"], heads, dim, **kinds)
        k, v = (torch.randn(s["batch"], s["lk"], kv, d, **kinds) for d in (dim, dim_v))
        return _both(lambda: rl.attention(q, k, v, **options), (q, k, v), s["back"])
    lens = [chance.randint(0, s["lq"]) for _ in range(7)] + [s["lq"]]
    cu = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    q = torch.randn(sum(lens), heads, dim, **kinds)
    k, v = (torch.randn(sum(lens), kv, d, **kinds) for d in (dim, dim_v))
    most = max(lens)
    forward = functools.partial(rl.attention_varlen, q, k, v, cu, cu, most, most, **options)
    return _both(forward, (q, k, v), s["back"])


def _both(forward: Any, leaves: tuple[torch.Tensor, ...], back: bool) -> Any:
    """What to call for out, or for dK and dV as well: dQ's sums come in any order."""
    if not back:
        return lambda: (forward(),)

    def call() -> tuple[torch.Tensor, ...]:
        out = forward()
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))[1:]

    return call


def stress(part: int, launches: int, seconds: float) -> None:
    """As many launches as are asked for, or as the time allows; each shape's first and last result must agree."""
    chance, until, done = random.Random(part), time.time() + seconds, 0
    while done < launches and time.time() < until:
        s = _shape(chance)
        say("start", shape=s, done=done)
        call = _call(s, chance)
        first = call()
        for _ in range(EACH - 1):
            last = call()
        done += EACH
        same = all(
            torch.equal(a, b) and b.isfinite().all() for a, b in zip(first, last, strict=True)
        )  # waits
        if not same:
            say("stress", ok=False, shape=s)
    say("stress", ok=True, launches=done)


def report(rows: Rows) -> None:
    """Launches in all, and what went wrong."""
    ended = [row for row in rows if row["kind"] == "stress"]
    bad = [row for row in rows if row["kind"] == "lost" or not row.get("ok", True)]
    print(f"{sum(row.get('launches', 0) for row in ended)} launches, {len(bad)} faults")
    for row in bad:
        print("  BAD", row)
