"""What all calls but a cache's end in: the short way if a like call has gone the long one (`warm`), else that."""

from __future__ import annotations

import torch
from torch import Tensor

from relampago import warm
from relampago.derivatives import run
from relampago.lower import prepare
from relampago.options import Options, Packing, plain


def answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    packing: Packing | None = None,
    offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and LSE.

    Args:
        q: as `attention` and `attention_varlen` have it.
        k: likewise.
        v: likewise.
        options: the keyword arguments.
        packing: of packed sequences.
        offset: which key stands at row 0's position; Lk - Lq if None, which aligns causal to the bottom right.
    """
    said = None if torch.compiler.is_compiling() else plain(options)
    if said is not None:
        given = (q, k, v, options.sinks, None, None)
        said = (*said, offset)
        if packing is not None:
            cu_q, cu_k, *longest = packing
            given = (*given[:4], cu_q, cu_k)
            said = (*said, *longest, *map(type, longest))
        key = warm.key_of(given, said)
        if key is not None:
            return warm.run(
                key, given, lambda: prepare(q, k, v, options, packing=packing, offset=offset)
            )
    return run(*prepare(q, k, v, options, packing=packing, offset=offset))
