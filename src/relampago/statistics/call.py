"""How a statistic is asked for: queries and keys, as in `attention` or packed, and what shapes the scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relampago import validate
from relampago.errors import InvalidInput
from relampago.lower import Call, prepare
from relampago.options import Options, Packing

PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SHAPING = (
    "causal", "window", "mask", "scale", "softcap", "alibi_slopes", "score_mod", "bias", "sinks",
    "backend",
)  # fmt: skip


def lower(
    q: Tensor, k: Tensor, options: dict[str, Any], *, offset: int | None, lse: Tensor | None = None
) -> Call:
    """A validated call. There are no values: one column of the keys stands for them.

    Args:
        q: (B, Lq, H, D), or packed (Tq, H, D).
        k: (B, Lk, G, D) or (Tk, G, D).
        options: those of SHAPING, and of PACKED if packed.
        offset: as in `partial`.
        lse: of the whole, if these keys are a part of it.
    """
    odd = sorted(set(options) - {*SHAPING, *PACKED})
    if odd:
        raise InvalidInput(f"{odd[0]} is no option of a statistic; expected {', '.join(SHAPING)}")
    given = [name for name in PACKED if options.get(name) is not None]
    packing = None
    if given:
        missing = [name for name in PACKED if name not in given]
        if missing:
            raise InvalidInput(f"{missing[0]} is missing; expected all of {', '.join(PACKED)}")
        packing = Packing(*(options[name] for name in PACKED))
        if offset is not None:
            raise InvalidInput(f"offset is {offset}; expected None with packed sequences")
    shaping = Options(
        **{name: value for name, value in options.items() if name in SHAPING}, precision="full"
    )
    v = k[..., :1] if isinstance(k, Tensor) and k.ndim else k
    call = prepare(q, k, v, shaping, packing=packing, offset=offset, shard=lse is not None)
    if lse is not None:
        rows = (q.shape[1], q.shape[0]) if packing else (q.shape[0], q.shape[2], q.shape[1])
        validate.require(
            [("lse", ("is a {}", type(lse).__name__), "a tensor", isinstance(lse, Tensor))]
        )
        validate.require(
            [
                ("lse", ("has shape {}", tuple(lse.shape)), rows, tuple(lse.shape) == rows),
                ("lse", ("is on {}", lse.device), ("{}, as q", q.device), lse.device == q.device),
            ]
        )
    return call
