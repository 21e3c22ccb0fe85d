"""What `relampago tune` tries: the plans of a kernel that could make sense on a machine, small tiles first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from relampago.plan import Plan
from relampago.problem import Problem

KERNELS = (
    "forward",
    "decode",
    "backward_dkdv",
    "backward_dq",
    "tangent",
    "tangent_dkdv",
    "tangent_dq",
)


def candidates(p: Problem, kernel: str) -> Iterator[Plan]:
    """Plans for the CPU engine (tiles only) or for Triton (tiles, warps, stages, TMA on sm90 and newer)."""
    if p.device.kind == "cpu":
        for block_q, block_k in itertools.product((256, 512, 1024), (512, 1024, 2048, 4096)):
            yield Plan(block_q=block_q, block_k=block_k)
        return
    if kernel.startswith("tangent"):
        yield from _along(max(p.dim, p.dim_v), kernel)
        return
    if kernel == "decode":
        yield from _decoding(p)
        return
    hopper = p.device.kind == "cuda" and int(p.device.arch.removeprefix("sm")) >= 90
    wide = max(p.dim, p.dim_v)
    tiles = (
        [(64, 64), (64, 128), (128, 64), (128, 128)]
        if wide <= 128
        else [(32, 64), (64, 32), (64, 64), (128, 32), (128, 64)]
    )
    if kernel == "backward_dkdv":
        tiles = (
            [(32, 64), (64, 64), (32, 128), (64, 128), (128, 128)]
            if wide <= 128
            else [(32, 64), (32, 128), (64, 64), (64, 128)]
        )
    fused = kernel == "backward_dkdv" and not p.deterministic and p.dim <= 256
    split = kernel == "backward_dkdv" and wide > 128
    for (block_q, block_k), warps, stages in itertools.product(tiles, (4, 8), (2, 3)):
        shape = {"block_q": block_q, "block_k": block_k, "warps": warps, "stages": stages}
        for tma in (0, 1) if hopper else (0,):
            yield Plan(**shape, tma=tma)
            if split:
                yield Plan(**shape, tma=tma, split=1)
        for tma in (0, 1, 2) if hopper else (0,):  # 2: dQ is added up by it as well
            if fused:
                yield Plan(**shape, tma=tma, fused=1)


def _decoding(p: Problem) -> Iterator[Plan]:
    """Plans of decoding. Tiles are cut to a kv head's rows: of those that come to the same, the widest serves most."""
    wide = max(p.dim, p.dim_v)
    rows = p.len_q * p.heads_q // max(1, p.heads_kv)
    widest = {min(block_q, max(16, rows)): block_q for block_q in (16, 32, 64)}
    keys = (32, 64, 128) if wide <= 128 else (16, 32, 64)
    for block_q, block_k, warps, stages in itertools.product(
        widest.values(), keys, (2, 4, 8), (2, 3, 4)
    ):
        yield Plan(block_q=block_q, block_k=block_k, warps=warps, stages=stages)


def _along(wide: int, kernel: str) -> Iterator[Plan]:
    """Plans of the derivatives' kernels: an owner's tile of 64 tokens or more to a warpgroup, and few of the others."""
    others = (16, 32, 64) if wide <= 128 else (16, 32)
    by_key = kernel == "tangent_dkdv"
    for (owned, warps), other in itertools.product(((64, 4), (128, 8)), others):
        block_q, block_k = (other, owned) if by_key else (owned, other)
        for stages, fused in itertools.product((1, 2), (1, 0) if by_key else (0,)):
            yield Plan(block_q=block_q, block_k=block_k, warps=warps, stages=stages, fused=fused)


def row(p: Problem, backend: str, kernel: str, plan: Plan, source: str) -> str:
    """A table row, ready to paste: it holds for this dtype, mask or layout of keys, and head dims up to this one."""
    when = f'dtype = "{p.dtype}", dim_max = {p.dim}, dim_v_max = {p.dim_v}'
    if kernel == "decode":
        when += f', layout_k = "{p.layout_k.value}"'
    else:
        when += f", right = {str(p.right).lower()}"
    if p.left:
        when += ", left = true"
    defaults = Plan(block_q=1, block_k=1)
    shown = {"block_q", "block_k"} | {n for n, v in plan.items() if v != getattr(defaults, n)}
    if backend == "triton":
        shown |= {"warps", "stages"}
    values = ", ".join(f"{name} = {value}" for name, value in plan.items() if name in shown)
    return (
        f'[[{backend}.{kernel}]]\nwhen = {{ {when} }}\nplan = {{ {values} }}\nfrom = "{source}"\n'
    )
