"""Score mods: a function on each scaled score before the softmax, and its derivative.

A mod is written once, with operators and the functions of `math`, and serves every backend: torch tensors on the CPU,
tiles in a GPU kernel. It is called as

    fn(score, q, k, head, args, math) -> score

where q and k are positions among the keys (the last row stands at the last key), head is the query head, `args` is the
tuple of the mod's tensors, already indexed for the elements at hand, and `math` offers exp, log, tanh, abs, where,
minimum and maximum. `dfn`, with the same signature, is the derivative of fn by score, `ddfn` that of dfn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.errors import InvalidInput

AXES = ("head", "q", "k", "distance")


class Math(NamedTuple):
    """The functions a mod may use beyond operators; each language of kernels brings its own."""

    exp: Callable[..., Any]
    log: Callable[..., Any]
    tanh: Callable[..., Any]
    abs: Callable[..., Any]
    where: Callable[..., Any]
    minimum: Callable[..., Any]
    maximum: Callable[..., Any]


TORCH_MATH = Math(
    torch.exp, torch.log, torch.tanh, torch.abs, torch.where, torch.minimum, torch.maximum
)


class Rule(NamedTuple):
    """The tensor-free part of a mod: what a kernel compiles.

    `slots` has an entry per argument: the axis by which a tensor is indexed, or the number itself.
    """

    fn: Callable[..., Any]
    dfn: Callable[..., Any] | None
    slots: tuple[str | float, ...]
    ddfn: Callable[..., Any] | None = None


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A function on the scores, its derivative, and the tensors they read.

    Args:
        fn: `fn(score, q, k, head, args, math) -> score`; see the module's docstring.
        dfn: the derivative of fn by score, same signature. Without it a call that needs gradients is refused.
        args: numbers, and pairs (axis, tensor). The axis says by what the tensor's last dimension is indexed: "head"
            (H), "q" (Lq rows), "k" (Lk keys) or "distance" (2·R + 1 entries for k - q clipped to -R..R). Before it,
            tensors of axis "head" may have (B,), the others (H,) or (B, H). They get no gradient (bias= does).
        ddfn: the derivative of dfn by score, same signature. Without it second derivatives are refused.

    Example:
        >>> alibi = ScoreMod(lambda s, q, k, head, args, math: s + args[0] * (k - q),
        ...                  lambda s, q, k, head, args, math: 1.0, args=[("head", torch.ones(8))])
    """

    fn: Callable[..., Any]
    dfn: Callable[..., Any] | None = None
    args: Sequence[float | tuple[str, Tensor]] = ()
    ddfn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, function in (("fn", self.fn), ("dfn", self.dfn), ("ddfn", self.ddfn)):
            if not callable(function) and not (name != "fn" and function is None):
                raise InvalidInput(
                    f"ScoreMod {name} is a {type(function).__name__}; expected a function"
                )
        for value in self.args:
            if isinstance(value, int | float):
                continue
            axis, tensor = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
            if axis not in AXES or not isinstance(tensor, Tensor):
                raise InvalidInput(
                    f"ScoreMod args holds {value!r}; expected numbers and pairs (axis, tensor), axis one of {AXES}"
                )

    @property
    def slots(self) -> tuple[str | float, ...]:
        """Per argument: its axis, or the number itself."""
        return tuple(
            value[0] if isinstance(value, tuple) else constant(value) for value in self.args
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments."""
        return tuple(value[1] for value in self.args if isinstance(value, tuple))


# A custom op carries tensors and a string, so functions travel by token: the rule a token stands for lives here, for as
# long as the process. The same functions always get the same token, so a mod built anew at each call does not grow it.
_rules: dict[str, Rule] = {}
_tokens: dict[Rule, str] = {}
_numbers = itertools.count()


def register(mod: ScoreMod) -> str:
    """The token that stands for a mod's functions and numbers."""
    rule = Rule(mod.fn, mod.dfn, mod.slots, mod.ddfn)
    token = _tokens.get(rule)
    if token is None:
        name = getattr(mod.fn, "__name__", type(mod.fn).__name__)
        token = f"{name}#{next(_numbers)}"
        _tokens[rule] = token
        _rules[token] = rule
    return token


def rule_of(token: str) -> Rule:
    """The rule a token stands for."""
    return _rules[token]


def constant(x: float) -> float:
    """A plain float, also of a traced one: torch.compile(dynamic=True) makes floats symbolic, and hex() ends that."""
    return float.fromhex(float(x).hex())


def no_slope(tokens: tuple[str, ...]) -> str | None:
    """The refusal of a backward through mods without a derivative; None if all have one."""
    missing = [token.split("#")[0] for token in tokens if rule_of(token).dfn is None]
    return f"score mod {missing[0]} has no dfn, which the backward needs" if missing else None


def no_bend(tokens: tuple[str, ...]) -> str | None:
    """The refusal of second derivatives through mods that lack their own; None if all have it."""
    missing = [token.split("#")[0] for token in tokens if rule_of(token).ddfn is None]
    return f"score mod {missing[0]} has no ddfn, which second derivatives need" if missing else None


def gather(
    axis: str, value: Tensor, b: int, head: Tensor, q: Tensor, k: Tensor, row: Tensor
) -> Tensor:
    """An argument's values for the elements at hand (all index tensors broadcast against one another).

    Args:
        axis: one of AXES.
        value: the argument, in one of the shapes that `ScoreMod` allows.
        b: the sequence.
        head: query heads.
        q: positions of rows among the keys.
        k: keys.
        row: the rows' own numbers, for axis "q".
    """
    if axis == "head":
        return (value if value.ndim == 1 else value[b])[head]
    if value.ndim == 3:
        value = value[b]
    if axis == "distance":
        reach = value.shape[-1] // 2
        place = (k - q).clamp(-reach, reach) + reach
    else:
        place = row if axis == "q" else k
    return value[place] if value.ndim == 1 else value[head, place]


def softcap(cap: float) -> ScoreMod:
    """cap · tanh(score / cap), as in Gemma 2; bounds the scores to ±cap."""
    return ScoreMod(_softcap, _softcap_slope, args=[cap], ddfn=_softcap_bend)


def alibi(slopes: Tensor) -> ScoreMod:
    """ALiBi (arXiv 2108.12409): minus slope times the distance of key and row; slopes (H,) or (B, H)."""
    return ScoreMod(_alibi, _one, args=[("head", slopes)], ddfn=zero)


def relative_bias(table: Tensor) -> ScoreMod:
    """Add table[…, k - q + R], distances clipped to ±R; table (2·R + 1,), (H, 2·R + 1) or (B, H, 2·R + 1)."""
    return ScoreMod(_add, _one, args=[("distance", table)], ddfn=zero)


def _softcap(score, q, k, head, args, math):
    return args[0] * math.tanh(score / args[0])


def _softcap_slope(score, q, k, head, args, math):
    t = math.tanh(score / args[0])
    return 1.0 - t * t


def _softcap_bend(score, q, k, head, args, math):
    t = math.tanh(score / args[0])
    return -2.0 * t * (1.0 - t * t) / args[0]


def _alibi(score, q, k, head, args, math):
    return score - args[0] * math.abs(q - k)


def _add(score, q, k, head, args, math):
    return score + args[0]


def _one(score, q, k, head, args, math):
    return 1.0


def zero(score, q, k, head, args, math):
    """The second derivative of a mod that is linear in the score."""
    return 0.0
