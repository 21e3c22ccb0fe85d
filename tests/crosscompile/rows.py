"""The rows of the tuning tables as parameters of a test, and what is asked of each: it fits its architecture.

Kernels that are the same are compiled once, where there is least shared memory: those of equal plans, dtypes and head
dims on architectures with the same instructions for products. For fp32 these are all of NVIDIA's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from crosscompile.offline import Built

from relampago.backends.triton import FALLBACK
from relampago.plan import Row, table

SHARED = {
    "sm89": 99, "sm120": 99, "sm80": 163, "sm90": 227, "sm100": 227, "gfx942": 64, "gfx950": 160
}  # fmt: skip
TABLES = tuple(arch for arch in SHARED if arch not in FALLBACK)
PRODUCTS = {"sm80": "mma", "sm89": "mma", "sm90": "wgmma", "sm100": "tcgen05"}
ALIKE = (128, 256)  # head dims of the rows that are compiled for those who borrow a table, too
OLD = triton.__version__.startswith("3.6")
# Bytes of a thread: of a row that is sized, and of one that has won on a card in spite of what it spills. In fp32 each
# thread holds rows of both operands of a product; beyond 256 columns, with their tangents, no tile has room.
SPILLS, MEASURED_SPILLS, FP32_SPILLS, WIDE_FP32_SPILLS = 64, 256, 352, 2816
WIDE_AMD_SPILLS = 7168  # on AMD, where all else holds as well, and half precision spills nothing


def shape_of(row: Row, most: int = 576) -> tuple[int, int, torch.dtype]:
    """The largest head dims that a row serves, and a dtype of it."""
    when = dict(row.when)
    dim, dim_v = when.get("dim_max", 576), when.get("dim_v_max", 512)
    return min(dim, most), min(dim_v, most), torch.bfloat16 if "dtype" in when else torch.float32


def served(arch: str, kernel: str, row: Row) -> bool:
    """Whether `why_not` lets any call of a row through: on sm89 some gradients in fp32 find too little memory."""
    dim, _, dtype = shape_of(row)
    least = {"backward_dkdv": 512, "backward_dq": 512, "tangent_dkdv": 128, "tangent_dq": 128}
    small = arch in ("sm89", "sm120") and dtype == torch.float32
    return not (small and dim > least.get(kernel, 576))


def rows_of(kernel: str, most: int = 576) -> list[Any]:
    """A kernel's rows as parameters of a test, architecture and row, each kernel once; most: head dim of any."""
    found, seen = [], set()
    for arch in SHARED:
        borrowed = arch not in TABLES
        for i, row in enumerate(table(FALLBACK.get(arch, arch))[f"triton.{kernel}"]):
            dim, dim_v, dtype = shape_of(row, most)
            half = dtype == torch.bfloat16
            fp8 = "fp8" in dict(row.when)  # see test_fp8_compiles.py
            if fp8 or not served(arch, kernel, row) or (borrowed and not (half and dim in ALIKE)):
                continue
            products = PRODUCTS.get(arch, arch) if half or arch.startswith("gfx") else "fma"
            made = products, dim, dim_v, dtype, row.plan
            if made not in seen:
                found.append(pytest.param(arch, row, id=f"{arch}-{i}"))
            seen.add(made)
    return found


def check(arch: str, row: Row, built: Built, more: int = 0) -> None:
    """A kernel finds the shared memory and registers that it needs, and hardly spills; `more`: bytes by design."""
    assert built.shared <= SHARED[arch] * 1024
    amd = arch.startswith("gfx")
    warps = row.plan.warps
    if amd:  # each of 4 SIMDs has 512 registers for a lane, which its waves share
        assert built.registers <= 512 // max(1, warps // 4)
    else:
        assert -(-built.registers // 8) * 8 * 32 * warps <= 65536
    if amd or OLD:
        spilt = built.spills * (4 if amd else 1)
        assert spilt <= allowed(amd, row, built.name.endswith("_along")) + more


def allowed(amd: bool, row: Row, moving: bool) -> int:
    """Bytes of a thread that may be spilled; moving: each operand has its tangent beside it."""
    dim, _, dtype = shape_of(row)
    if dtype == torch.float32:
        wide = WIDE_AMD_SPILLS if amd else WIDE_FP32_SPILLS
        return FP32_SPILLS if dim * (1 + moving) <= 256 else wide
    if amd:
        return 0
    return MEASURED_SPILLS if measured(row) else SPILLS


def measured(row: Row) -> bool:
    """Whether it has won on a card."""
    return "not measured" not in row.source
