"""Out over several shards of the keys, in the order of `held`: where the forward folds it, and how it leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from relampago.backends.gluon.backward_launch import PLAIN, Extra, Strides
from relampago.backends.gluon.boxes import STEP, cut, steps_fit
from relampago.backends.gluon.launch import launch
from relampago.backends.gluon.sizes import ROWS, Sides
from relampago.backends.gluon.sm90_gradients import Size
from relampago.backends.gluon.sm90_rows import convert
from relampago.problem import Arrays, HeldOut

FILLED = 4  # tiles for each multiprocessor: below, keys are better split, which nothing held can be


def hold_out(x: Arrays, multiprocessors: int) -> HeldOut | None:
    """Room for O and LSE of x's rows, with nothing in it; None where O is better left in rows."""
    batch, length, heads, _ = x.q.shape
    width, rest = cut(x.v.shape[-1])
    step = STEP // x.q.element_size()
    fits = all(steps_fit(t.shape, t.stride(), step) for t in (x.q, x.k, x.v))
    few = -(-length // 128) * heads * batch < FILLED * multiprocessors
    if rest or few or not fits or x.q.data_ptr() % STEP or x.cu_q is not None:
        return None
    room = -(-length // ROWS) * ROWS
    out, lse = (
        torch.empty(batch, heads, room * n, dtype=torch.float32, device=x.q.device)
        for n in (width, 1)
    )
    return HeldOut(out, lse, ROWS)


def release_out(x: Arrays, held: HeldOut, dtype: torch.dtype) -> Tensor:
    """Out (B, L, H, E) in a dtype."""
    batch, length, heads, _ = x.q.shape
    dim_v, (width, _) = x.v.shape[-1], cut(x.v.shape[-1])
    out = torch.empty(batch, length, heads, dim_v, dtype=dtype, device=x.q.device)
    tiles, room = -(-length // ROWS), held.lse.shape[-1]
    size = Size(length, 0, heads, 1, tiles, batch * heads, 1, room, dim_v, dim_v, 0)
    launch(
        convert, tiles * heads * batch, PLAIN, held.out, out, Strides(*out.stride()[:3]), 1.0, *size,
        *Sides(0, None, None, None), Extra(None, None, None), ROWS, width, width, dim_v, False,
    )  # fmt: skip
    return out
