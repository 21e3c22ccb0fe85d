"""Score mods: a function on each scaled score before the softmax, and its derivative.

A mod is written once, with operators and the functions of `math`, and serves every backend: torch tensors on the CPU,
tiles in a GPU kernel. It is called as

    fn(score, q, k, head, args, math) -> score

where q and k are positions among the keys (the last row stands at the last key), head is the query head, `args` is the
tuple of the mod's tensors, already indexed for the elements at hand, and `math` offers exp, log, tanh, abs, where,
minimum and maximum. `dfn`, with the same signature, is the derivative of fn by score, `ddfn` that of dfn; those in
`dargs` are derivatives of fn by the arguments, which then get gradients: a learned table needs no N×N bias.
"""

from __future__ import annotations

import itertools
import math as _math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago.errors import InvalidInput

AXES = ("head", "q", "k", "distance")
BETWEEN = "between"  # a slot by distance between places of their own, which are its next tensor


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
    dargs: tuple[Callable[..., Any] | None, ...]
    ddfn: Callable[..., Any] | None = None


# A custom op carries tensors and a string, so functions travel by token: the rule a token stands for lives here, for as
# long as the process. The same functions always get the same token, so a mod built anew at each call does not grow it.
_rules: dict[str, Rule] = {}
_tokens: dict[Rule, str] = {}
_numbers = itertools.count()


def _token(
    fn: Callable[..., Any],
    dfn: Callable[..., Any] | None,
    slots: tuple[str | float, ...],
    dargs: tuple[Callable[..., Any] | None, ...],
    ddfn: Callable[..., Any] | None,
    traced: bool,
) -> str:
    """The token that stands for a mod's functions and numbers."""
    if traced and any(_holds(f) for f in (fn, dfn, ddfn, *dargs)):
        raise InvalidInput(
            "ScoreMod is made inside torch.compile of a function with a closure or defaults, whose values a graph "
            "does not watch; expected one made outside, or its values in args"
        )
    rule = Rule(fn, dfn, slots, dargs, ddfn)
    token = _tokens.get(rule)
    if token is None:
        token = f"{getattr(fn, '__name__', type(fn).__name__)}#{next(_numbers)}"
        _rules[token] = rule
        token = _tokens.setdefault(rule, token)  # another thread may have been first
    return token


# Run while a graph is traced, not in it: what a graph writes to a dict is there only after its ops, which look it up.
# The mark is all that torch.compiler.assume_constant_result does, but that would import the whole of Dynamo first.
_token._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _holds(f: Callable[..., Any] | None) -> bool:
    """Whether functions of the same code may differ: torch.compile knows a function by its code."""
    return any(getattr(f, name, None) for name in ("__closure__", "__defaults__", "__kwdefaults__"))


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A function on the scores, its derivative, and the tensors they read.

    Args:
        fn: `fn(score, q, k, head, args, math) -> score`; see the module's docstring.
        dfn: the derivative of fn by score, same signature. Without it a call that needs gradients is refused.
        args: numbers, and pairs (axis, tensor). The axis says by what the tensor's last dimension is indexed: "head"
            (H), "q" (Lq rows), "k" (Lk keys) or "distance" (2·R + 1 entries for k - q clipped to -R..R). Before it,
            tensors of axis "head" may have (B,), the others (H,) or (B, H). ("distance", tensor, places) measures
            distance between places[k] and places[q] instead: ints (Lk,) or (B, Lk), by position among the keys.
        dargs: per argument the derivative of fn by it, same signature, or None; () for none. A tensor that has one
            gets its gradient, summed over all elements that read an entry.
        ddfn: the derivative of dfn by score, same signature. Without it second derivatives are refused.

    Made inside torch.compile, its functions may have neither closure nor defaults: a graph would not see them change.

    Example:
        >>> alibi = ScoreMod(lambda s, q, k, head, args, math: s + args[0] * (k - q),
        ...                  lambda s, q, k, head, args, math: 1.0, args=[("head", torch.ones(8))])
    """

    fn: Callable[..., Any]
    dfn: Callable[..., Any] | None = None
    args: Sequence[float | tuple[str, Tensor] | tuple[str, Tensor, Tensor]] = ()
    dargs: Sequence[Callable[..., Any] | None] = ()
    ddfn: Callable[..., Any] | None = None
    token: str = field(init=False, repr=False)  # stands for functions and numbers, in this process

    def __post_init__(self) -> None:
        named = [
            ("fn", self.fn),
            ("dfn", self.dfn),
            ("ddfn", self.ddfn),
            *(("dargs", d) for d in self.dargs),
        ]
        for name, function in named:
            if not callable(function) and not (name != "fn" and function is None):
                raise InvalidInput(
                    f"ScoreMod {name} is a {type(function).__name__}; expected a function"
                )
        if self.dargs and len(self.dargs) != len(self.args):
            raise InvalidInput(
                f"ScoreMod dargs has {len(self.dargs)} entries; expected {len(self.args)}, one per argument, or none"
            )
        for value in self.args:
            if not isinstance(value, int | float) and not _is_pair(value):
                raise InvalidInput(
                    f"ScoreMod args holds {value!r}; expected numbers and pairs (axis, tensor), axis one of {AXES}"
                )
        dargs = tuple(self.dargs) or (None,) * len(self.args)
        token = _token(
            self.fn, self.dfn, self.slots, dargs, self.ddfn, torch.compiler.is_compiling()
        )
        object.__setattr__(self, "token", token)

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew where it is unpickled: another process has other tokens."""
        return ScoreMod, (self.fn, self.dfn, self.args, self.dargs, self.ddfn)

    @property
    def slots(self) -> tuple[str | float, ...]:
        """Per argument: its axis, BETWEEN, or the number itself."""
        return tuple(
            constant(value)
            if not isinstance(value, tuple)
            else BETWEEN
            if len(value) == 3
            else value[0]
            for value in self.args
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in order."""
        return tuple(t for value in self.args if isinstance(value, tuple) for t in value[1:])


def _is_pair(value: Any) -> bool:
    """Whether an argument is (axis, tensor) or ("distance", tensor, places)."""
    if not isinstance(value, tuple) or len(value) not in (2, 3) or value[0] not in AXES:
        return False
    return all(isinstance(t, Tensor) for t in value[1:]) and (
        len(value) == 2 or value[0] == "distance"
    )


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


def with_sequences(tokens: Sequence[str], tensors: Sequence[Tensor]) -> list[bool]:
    """Which of the mods' tensors have a dimension for sequences, before all others."""
    ranks: list[int] = []
    for token in tokens:
        for slot in rule_of(token).slots:
            if isinstance(slot, str):
                ranks += [2] if slot == "head" else [3, 2] if slot == BETWEEN else [3]
    return [t.ndim == rank for t, rank in zip(tensors, ranks, strict=True)]


class Argument(NamedTuple):
    """A tensor argument of a mod, for the elements at hand."""

    axis: str
    number: int  # among the call's mod_args
    tensor: Tensor
    index: tuple[
        Any, ...
    ]  # tensor[index] are its values: index tensors that broadcast against one another


def bind(
    rules: Sequence[Rule],
    tensors: Sequence[Tensor],
    b: int,
    head: Tensor,
    q: Tensor,
    k: Tensor,
    row: Tensor,
) -> Iterator[tuple[Rule, list[Any]]]:
    """Each rule with its arguments, numbers and `Argument`s (all index tensors broadcast against one another).

    Args:
        rules: the mods, in order.
        tensors: the call's mod_args.
        b: the sequence.
        head: query heads.
        q: positions of rows among the keys.
        k: keys.
        row: the rows' own numbers, for axis "q".
    """
    numbers = iter(range(len(tensors)))
    for rule in rules:
        found: list[Any] = []
        for slot in rule.slots:
            if not isinstance(slot, str):
                found.append(slot)
                continue
            n = next(numbers)
            places = tensors[next(numbers)] if slot == BETWEEN else None
            index = _index(slot, tensors[n], places, b, head, q, k, row)
            found.append(Argument(slot, n, tensors[n], index))
        yield rule, found


def values(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What a mod's function takes for its arguments."""
    return tuple(a.tensor[a.index] if isinstance(a, Argument) else a for a in arguments)


def scores_of(found: Any, like: Tensor) -> Tensor:
    """What a mod's function returned, which is to be scores like those that it was given."""
    if not isinstance(found, Tensor) or found.shape != like.shape:
        raise InvalidInput(
            f"score_mod: the function returned {_shown(found)}; expected a score for each, {tuple(like.shape)}"
        )
    return found


def _index(
    axis: str,
    tensor: Tensor,
    places: Tensor | None,
    b: int,
    head: Tensor,
    q: Tensor,
    k: Tensor,
    row: Tensor,
) -> tuple[Any, ...]:
    if axis == "head":
        return (head,) if tensor.ndim == 1 else (b, head)
    if axis in ("distance", BETWEEN):
        if places is not None:
            places = (places[b] if places.ndim == 2 else places).long()
            q, k = places[q.clamp(0, places.shape[0] - 1)], places[k]
        reach = tensor.shape[-1] // 2
        at = (k - q).clamp(-reach, reach) + reach
    else:
        at = row if axis == "q" else k
    return ((at,), (head, at), (b, head, at))[tensor.ndim - 1]


def softcap(cap: float) -> ScoreMod:
    """cap · tanh(score / cap), as in Gemma 2; bounds the scores to ±cap."""
    return ScoreMod(_softcap, _softcap_slope, args=[cap], ddfn=_softcap_bend)


def alibi(slopes: Tensor) -> ScoreMod:
    """ALiBi (arXiv 2108.12409): minus slope times the distance of key and row; slopes (H,) or (B, H)."""
    return ScoreMod(_alibi, _one, [("head", slopes)], [_alibi_by_slope], ddfn=zero)


def relative_bias(table: Tensor, places: Tensor | None = None) -> ScoreMod:
    """Add table[…, k - q + R], distances clipped to ±R. The table gets its gradient.

    Args:
        table: (2·R + 1,), (H, 2·R + 1) or (B, H, 2·R + 1).
        places: ints (Lk,) or (B, Lk): distances are places[k] - places[q] instead of k - q.
    """
    arg = ("distance", table) if places is None else ("distance", table, places)
    return ScoreMod(_add, _one, [arg], [_one], ddfn=zero)


def t5_bias(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """T5's bucketed relative bias (arXiv 1910.10683, section 2.1). The table gets its gradient.

    Near distances have a bucket each, farther ones share theirs by the logarithm; beyond max_distance all share one.

    Args:
        table: (buckets, H), as T5's relative_attention_bias.weight.
        bidirectional: half of the buckets for keys after the row (an encoder); False: none (a decoder).
        max_distance: from where on the last bucket is used.
    """
    if (
        not isinstance(table, Tensor)
        or table.ndim != 2
        or table.shape[0] < (4 if bidirectional else 2)
    ):
        raise InvalidInput(f"table is {_shown(table)}; expected a tensor (buckets, H)")
    buckets = table.shape[0] // (2 if bidirectional else 1)
    exact = buckets // 2
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance <= exact:
        raise InvalidInput(f"max_distance is {max_distance!r}; expected an int above {exact}")
    distance = torch.arange(-max_distance, max_distance + 1, device=table.device)  # key minus row
    far = distance.abs() if bidirectional else (-distance).clamp(min=0)
    share = (far.clamp(min=1).float() / exact).log() / _math.log(max_distance / exact)
    coarse = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket = torch.where(far < exact, far, coarse)
    if bidirectional:
        bucket = bucket + (distance > 0) * buckets
    return relative_bias(table[bucket].T)


def window_bias(table: Tensor, window: Sequence[int]) -> ScoreMod:
    """Swin's relative position bias (arXiv 2103.14030, equation 4), in windows of 2, 3, … axes.

    The table gets its gradient.

    Args:
        table: (Π (2·w - 1), H) for axes w, as Swin's relative_position_bias_table.
        window: the axes' sizes, such as (7, 7); a window's tokens are its keys and rows, the last axis fastest.
    """
    sides = tuple(window)
    if not sides or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in sides):
        raise InvalidInput(f"window is {window!r}; expected ints of at least 1")
    rows = 1
    for w in sides:  # no math.prod: Dynamo does not know it of a generator
        rows *= 2 * w - 1
    if not isinstance(table, Tensor) or table.ndim != 2 or table.shape[0] != rows:
        raise InvalidInput(
            f"table is {_shown(table)}; expected a tensor ({rows}, H) for window {sides}"
        )
    places = torch.zeros((), dtype=torch.long, device=table.device)
    for w in sides:  # digits of a number whose differences are the table's rows
        places = places[..., None] * (2 * w - 1) + torch.arange(w, device=table.device)
    return relative_bias(table.flip(0).T, places.flatten())  # Swin counts from key to row


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


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


def _alibi_by_slope(score, q, k, head, args, math):
    return -math.abs(q - k)


def _add(score, q, k, head, args, math):
    return score + args[0]


def _one(score, q, k, head, args, math):
    return 1.0


def zero(score, q, k, head, args, math):
    """The second derivative of a mod that is linear in the score."""
    return 0.0
