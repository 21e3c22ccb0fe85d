"""Where Gluon differs between Triton 3.6 and later: the only place that asks."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):  # renamed in 3.9, where the old names raise
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

if hasattr(gluon, "aggregate"):
    aggregate = gluon.aggregate
else:
    aggregate = triton.language.core._aggregate
