"""Triton's interpreter, made exact: bf16 and NaN as hardware has them, and products that do not depend on their layout.

As shipped (3.6 to 3.9) it multiplies bf16 as raw integers, cuts instead of rounding, keeps NaN in a maximum that drops
it on a GPU, and lets BLAS sum K·Qᵀ in another order than Q·Kᵀ, which no GPU does.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def wide(x) -> np.ndarray:
    """The values of a tile, as fp64."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if x.dtype.scalar == tl.float8e4nv:
        return torch.from_numpy(x.data).view(torch.float8_e4m3fn).double().numpy()
    return x.data.astype(np.float64)


def rounded(x: np.ndarray) -> np.ndarray:
    """fp32 as the bits of the nearest bf16, ties to even."""
    bits = x.view(np.uint32)
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return np.where(np.isnan(x), 0x7FC0, (bits + up) >> 16).astype(np.uint16)


def eighth(x: np.ndarray) -> np.ndarray:
    """fp32 as the bits of the nearest e4m3, ties to even."""
    return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def patch() -> None:
    """Change the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(wide(a), wide(b)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source in (tl.bfloat16, tl.float8e4nv) and target == tl.float32:
            return interpreter.TensorHandle(wide(src).astype(np.float32), target)
        if source == tl.float32 and target == tl.bfloat16:
            return interpreter.TensorHandle(rounded(src.data), target)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        """What is narrower than 16 bits."""
        target = dst_type.scalar
        if target == tl.float8e4nv:
            return interpreter.TensorHandle(eighth(wide(src).astype(np.float32)), target)
        return (
            interpreter.TensorHandle(wide(src).astype(np.float32), tl.float32)
            if target == tl.float32
            else cast_impl(
                self, interpreter.TensorHandle(wide(src).astype(np.float32), tl.float32), dst_type
            )
        )

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        tensor = interpreter.tl.tensor
        tensor.__index__ = lambda self: int(self.handle.data.reshape(()).item())
