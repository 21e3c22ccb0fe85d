"""The ring as it was measured on 2 December: results in rows, gradients returned and added by passes of torch.

`ring-one-gpu.json` of that day read 1.167 forward and 1.140 backward. What differed: O was read and written in rows,
four bytes a thread's instruction; and each step's backward read an O of zeros, set sums of dQ to 0, put them in order,
and returned three gradients, which were then added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import relampago as rl
from relampago.backends import gluon
from relampago.distributed import exchange
from relampago.shards import Rows, delta_of


class Returned(Rows):
    """Rows whose gradients are returned by each shard, and added here."""

    def __init__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        dlse: Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.dout, self.q, self.lse, self.options = dout, q, lse, options
        options.pop("delta", None)
        self.less = -delta_of(out, dout, dlse, lse.dtype)
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def add(
        self, rows: slice, k: Tensor, v: Tensor, *, into: Any, anew: bool, **options: Any
    ) -> Any:
        """One shard."""
        zeros = self.dout.new_zeros(()).expand(self.dout.shape)[:, rows]
        dq, *keys = rl.partial_backward(
            self.dout[:, rows], self.q[:, rows], k, v, zeros, self.lse[:, :, rows],
            dlse=self.less[:, :, rows], **self.options, **options,
        )  # fmt: skip
        self.dq[:, rows] += dq
        for total, grad in zip(into, keys, strict=True):
            if anew:
                total.zero_()
            total += grad
        return into

    def finish(self) -> Tensor:
        """dQ of all rows."""
        return self.dq.to(self.q.dtype)


@contextlib.contextmanager
def before(card: bool) -> Iterator[None]:
    """Inside, rings work as they did; without a card there are no kernels to change."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(exchange, "Rows", Returned))
        if card:
            from relampago.backends.gluon import launch

            target = launch.Target.of

            def in_rows(*args: Any) -> Any:
                return target(*args)._replace(whole=None)

            stack.enter_context(mock.patch.object(gluon.GluonSm90, "hold_out", return_value=None))
            stack.enter_context(mock.patch.object(launch.Target, "of", in_rows))
        yield
