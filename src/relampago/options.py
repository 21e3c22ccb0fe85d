"""The keyword arguments that all calls share, and what several of them amount to together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago import defaults, validate
from relampago.errors import InvalidInput
from relampago.masks.spec import All, Causal, Window
from relampago.mods import ScoreMod, alibi
from relampago.mods import softcap as softcap_mod


class Options(NamedTuple):
    """The keyword arguments that all calls share."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Any = None
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    deterministic: bool | None = None
    batch_invariant: bool | None = None
    backend: str | None = None
    precision: str | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class Packing(NamedTuple):
    """cu_seqlens (B + 1,) and the longest lengths; keys in a cache need neither."""

    cu_q: Tensor
    cu_k: Tensor | None
    max_q: int
    max_k: int = 0


def mask_of(o: Options) -> Any:
    """All that restricts who sees whom, as one mask."""
    mask = o.mask
    if o.causal:
        mask = Causal() if mask is None else All.of(Causal(), mask)
    if o.window is not None:
        window = Window(*o.window)
        mask = window if mask is None else All.of(window, mask)
    return mask


def mods_of(o: Options) -> tuple[ScoreMod, ...]:
    """All that changes scores, in the order in which it does."""
    given = o.score_mod
    own: tuple[Any, ...] = ()
    if given is not None:
        own = tuple(given) if isinstance(given, Sequence) else (given,)
    for mod in own:
        if not isinstance(mod, ScoreMod):
            raise InvalidInput(
                f"score_mod is a {type(mod).__name__}; expected a ScoreMod or a sequence of them"
            )
    capped = () if o.softcap is None else (softcap_mod(o.softcap),)
    sloped = () if o.alibi_slopes is None else (alibi(o.alibi_slopes),)
    return (*capped, *sloped, *own)


def seed_of(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """What fixes which weights are dropped, an int64 scalar on the device; drawn if None."""
    if seed is None:
        return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        validate.require(
            [("dropout_seed", ("is {} {}", tuple(seed.shape), seed.dtype), "an int64 scalar",
              seed.ndim == 0 and seed.dtype == torch.int64)]
        )  # fmt: skip
        return seed.to(device)
    whole = isinstance(seed, int) and -(2**63) <= seed < 2**63
    validate.require(
        [("dropout_seed", ("is {!r}", seed), "an int of 64 bits, a tensor or None", whole)]
    )
    return torch.full((), seed, dtype=torch.int64, device=device)


def plain(o: Options) -> tuple[Any, ...] | None:
    """What a warm call is known by, of its options: all that the result depends on.

    None where they hold tensors other than sinks, masks or functions, or what is refused.
    """
    window, dropped = o.window, o.dropout_p
    if (
        o.mask
        is o.alibi_slopes
        is o.score_mod
        is o.bias
        is o.dropout_seed
        is o.q_descale
        is o.k_descale
        is o.v_descale
        is None
        and (type(dropped) is float or type(dropped) is int)
        and dropped == 0
    ):
        if window is not None:
            if type(window) is not tuple:
                return None
            window = (window, *map(type, window))  # True is 1, and refused
        return (
            o.causal, window, o.scale, o.softcap, defaults.deterministic(o.deterministic),
            defaults.invariant(o.batch_invariant), o.backend, o.precision, *defaults.forced.now(),
        )  # fmt: skip
    return None
