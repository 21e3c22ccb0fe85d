"""Small launches of each kind of kernel, for tools that watch a process: python launches.py NAME.

Inputs come from the CPU, so that a tool which slows every kernel down sees few of torch's own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd import forward_ad

import relampago as rl
from relampago import quant, statistics
from relampago.cache import PagedKVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV = 4, 2


def tensors(length: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """q, k and v of one sequence."""
    shapes = [(1, length, h, dim) for h in (HEADS, KV, KV)]
    return [torch.randn(s).to(DEVICE, dtype).requires_grad_() for s in shapes]


def both(backend: str, dim: int, length: int = 150) -> tuple[Any, ...]:
    """Forward and backward, causal, of a length that fills no tile."""
    inputs = tensors(length, dim)
    out = rl.attention(*inputs, causal=True, backend=backend)
    return (out, *torch.autograd.grad(out, inputs, out.detach()))


def packed(backend: str) -> tuple[Any, ...]:
    """Forward and backward of packed sequences, one of them empty."""
    ends = torch.tensor([0, 70, 70, 150], dtype=torch.int32).to(DEVICE)
    inputs = [t[0] for t in tensors(150, 64)]
    out = rl.attention_varlen(*inputs, ends, ends, 80, 80, window=(30, 5), backend=backend)
    return (out, *torch.autograd.grad(out, inputs, out.detach()))


def decode(dtype: torch.dtype) -> torch.Tensor:
    """A token against pages, split over keys."""
    ones = torch.ones(KV).to(DEVICE) if dtype == quant.E4M3 else None
    cache = PagedKVCache(2, 64, 16, KV, 64, dtype=dtype, device=DEVICE, k_scale=ones, v_scale=ones)
    keys = [torch.randn(2, 300, KV, 64).to(DEVICE, torch.bfloat16) for _ in range(2)]
    cache.append(*keys, torch.tensor([300, 37], dtype=torch.int32).to(DEVICE))
    q = torch.randn(2, 1, HEADS, 64).to(DEVICE, torch.bfloat16)
    return rl.attention_decode(q, cache, backend="triton")


def fp8() -> torch.Tensor:
    """Fused casts and products of e4m3."""
    backend = "gluon_sm90" if DEVICE == "cuda" else "cpu"
    with torch.no_grad():
        return rl.attention(*tensors(150, 128), causal=True, precision="fp8", backend=backend)


def shards(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two shards merged in place, into rows of a longer result."""
    q, k, v = (t.detach() for t in tensors(150, 64))
    longer = torch.zeros(1, 170, HEADS, 64).to(DEVICE)
    into = longer[:, 3:153], torch.full((1, HEADS, 150), -torch.inf).to(DEVICE)
    for a, b in ((90, 150), (0, 90)):
        rl.partial(q, k[:, a:b], v[:, a:b], causal=True, offset=-a, into=into, backend=backend)
    return into


def measures() -> tuple[Any, ...]:
    """Row statistics, column sums and a tangent."""
    q, k, v = (t.detach() for t in tensors(150, 64))
    options = {"causal": True, "backend": "triton"}
    found = (*statistics.rows(q, k, **options), statistics.column_sums(q, k, **options))
    with forward_ad.dual_level():
        out = rl.attention(forward_ad.make_dual(q, q), k, v, **options)
        return (*found, *forward_ad.unpack_dual(out))


@triton.jit
def _beyond(x, y) -> None:
    tl.store(y, tl.load(x + 4096))


def beyond() -> torch.Tensor:
    """A read behind an allocation: what the tool must find."""
    x, y = torch.zeros(1).to(DEVICE), torch.zeros(1).to(DEVICE)
    _beyond[(1,)](x, y)
    return y


@triton.jit
def _raced(x, y) -> None:
    at = tl.arange(0, 128)
    got = tl.inline_asm_elementwise(
        """
        {
            .shared .align 4 .b32 room[128];
            .reg .b32 base, mine, other;
            mov.u32 base, room;
            mad.lo.u32 mine, $2, 4, base;
            xor.b32 other, $2, 64;
            mad.lo.u32 other, other, 4, base;
            st.volatile.shared.b32 [mine], $1;
            ld.volatile.shared.b32 $0, [other];
        }
        """,
        "=r,r,r", [tl.load(x + at), at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(y + at, got)


def raced() -> torch.Tensor:
    """Another warp's number, read without waiting for it: what the tool must find."""
    x, y = (torch.zeros(128, dtype=torch.int32).to(DEVICE) for _ in range(2))
    _raced[(1,)](x, y)
    return y


FAULTY = {"beyond": beyond, "raced": raced}
LAUNCHES = {
    "triton": lambda: both("triton", 64),
    "triton-packed": lambda: packed("triton"),
    "triton-shards": lambda: shards("triton"),
    "decode": lambda: decode(torch.bfloat16),
    "decode-e4m3": lambda: decode(quant.E4M3),
    "measures": measures,
    "gluon-64": lambda: both("gluon_sm90", 64),
    "gluon-128": lambda: both("gluon_sm90", 128),
    "gluon-packed": lambda: packed("gluon_sm90"),
    "gluon-shards": lambda: shards("gluon_sm90"),
    "fp8": fp8,
}


def launch(name: str) -> None:
    """Run one, and read all that it returns."""
    torch.manual_seed(0)
    found = {**LAUNCHES, **FAULTY}[name]()
    for t in found if isinstance(found, tuple) else (found,):
        assert t.cpu().isfinite().all(), name


if __name__ == "__main__":
    launch(sys.argv[1])
