"""The fast fp32 product: where oneDNN computes full fp32 faster than the default BLAS, use it.

`torch.backends.mkldnn.matmul.fp32_precision = "bf16"` sends fp32 products to oneDNN. A CPU without AMX has no reduced
fp32 path, so it still computes in fp32, about twice as fast as MKL on AMD. The switch is global to the process: it is
set only while an attention call runs, restored after, taken only if a self-check on this machine finds full fp32
accuracy and a gain, and RELAMPAGO_CPU_FAST_FP32=0 turns it off.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_users = 0
_before = "none"


@contextlib.contextmanager
def fast_fp32(wanted: bool = True) -> Iterator[None]:
    """Inside, fp32 products take the faster of the two full-precision paths."""
    global _users, _before
    if not wanted or not available():
        yield
        return
    with _lock:
        if _users == 0:
            _before = current()
            _set("bf16")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _set(_before)


@functools.lru_cache(maxsize=1)
def available() -> bool:
    """Whether this machine's oneDNN path is exact in fp32 and faster; measured once, in some milliseconds."""
    if (
        os.environ.get("RELAMPAGO_CPU_FAST_FP32", "1") == "0"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    if not hasattr(torch.backends.mkldnn, "matmul") or torch.cpu._is_amx_tile_supported():
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = a[:, :64].double() @ b[:64].double()
    before = current()
    plain = _seconds(a, b)
    try:
        _set("bf16")
        error = ((a[:, :64] @ b[:64]).double() - exact).abs().max().item()
        fast = _seconds(a, b)
    finally:
        _set(before)
    return error < 1e-4 and fast < 0.9 * plain


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return best


def current() -> str:
    """How fp32 products are computed now, by torch's name."""
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def _set(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]
