"""The door: rows of checks walked by one loop, so that every message has the same form and none is pasted wrong.

A check is (argument, what came, what was expected, whether it holds); a tuple is a format and its values, filled in
only where a check fails, so that torch.compile traces no strings. What would need a device sync is not read here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relampago.errors import InvalidInput
from relampago.quant.cast import BLOCK, E4M3, check_scales
from relampago.shapes import broadcasts, is_one_of

Check = tuple[str, Any, Any, bool]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require(checks: Iterable[Check], tensors: dict[str, Any] | None = None) -> None:
    """Raise `InvalidInput` for the first check that does not hold, with the tensors' shapes below."""
    for name, got, expected, holds in checks:
        if not holds:
            lines = [f"{name} {_text(got)}; expected {_text(expected)}"]
            for label, value in (tensors or {}).items():
                if isinstance(value, Tensor):
                    dtype = str(value.dtype).removeprefix("torch.")
                    lines.append(f"  {label} {tuple(value.shape)} {dtype} {value.device}")
            raise InvalidInput("\n".join(lines))


def several(name: str, value: Any, parts: tuple[str, ...]) -> None:
    """An argument that holds several."""
    holds = isinstance(value, tuple | list) and len(value) == len(parts)
    require([(name, ("is a {}", type(value).__name__), f"({', '.join(parts)})", holds)])


def into(
    found: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], q: Tensor, *others: Tensor | None
) -> None:
    """What a result of these names and shapes is to be added to; q and `others` are what the result depends on."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, t in found.items():
        at, shape = f"into's {name}", shapes[name]
        require([(at, ("is a {}", type(t).__name__), "a tensor", isinstance(t, Tensor))])
        require(
            [
                (at, ("has shape {}", tuple(t.shape)), shape, tuple(t.shape) == shape),
                (at, ("has dtype {}", t.dtype), dtype, t.dtype == dtype),
                (at, ("is on {}", t.device), q.device, t.device == q.device),
                (
                    at,
                    ("has strides {}", t.stride()),
                    "1 in the last dimension",
                    t.stride(-1) == 1 or t.shape[-1] == 1,
                ),
            ],
            found,
        )
    read = [t for t in (*found.values(), q, *others) if t is not None]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in read)
    moving = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in read
    )
    require(
        [
            ("into", "is given while gradients are recorded", "torch.no_grad()", not recorded),
            ("into", "is given along a tangent", "no forward-mode AD", not moving),
        ]
    )


def _text(part: Any) -> str:
    return (
        part[0].format(*part[1:])
        if isinstance(part, tuple) and isinstance(part[0], str)
        else str(part)
    )


def tensors(q: Any, k: Any, v: Any, *, packed: bool, cached: bool = False) -> None:
    """Ranks, heads, dims, batch, dtype and device of q, k and v; a cache tells its own batch."""
    named = {"q": q, "k": k, "v": v}
    forms = {3: "(total, heads, dim)", 4: "(batch, length, heads, dim)"}
    ranks = {"q": 3 if packed else 4, "k": 3 if packed and not cached else 4}
    ranks["v"] = ranks["k"]
    for name, value in named.items():
        require([(name, ("is a {}", type(value).__name__), "a tensor", isinstance(value, Tensor))])
        require([(name, ("is {}", value.layout), "strided", value.layout == torch.strided)])
    require(
        [
            (
                n,
                ("has {} dimensions", t.ndim),
                ("{}: {}", ranks[n], forms[ranks[n]]),
                t.ndim == ranks[n],
            )
            for n, t in named.items()
        ],
        named,
    )
    checks: list[Check] = [
        (
            "q",
            ("has dtype {}", q.dtype),
            "fp16, bf16, fp32 or fp64",
            q.dtype in FLOATS or q.dtype == E4M3,
        ),
        *(
            (
                name,
                ("has dtype {}", t.dtype),
                ("{}, as q", q.dtype),
                t.dtype == q.dtype or (cached and t.dtype == E4M3 and k.dtype == v.dtype),
            )
            for name, t in (("k", k), ("v", v))
        ),
        ("k", ("is on {}", k.device), ("{}, as q", q.device), k.device == q.device),
        ("v", ("is on {}", v.device), ("{}, as q", q.device), v.device == q.device),
        ("q", "has head dim 0", "at least 1", q.shape[-1] > 0),
        ("v", "has head dim 0", "at least 1", v.shape[-1] > 0),
    ]
    require(checks, named)
    if not packed and not cached:
        require(
            [
                ("k", "has another batch", "that of q", k.shape[0] == q.shape[0]),
                ("v", "has another batch", "that of q", v.shape[0] == q.shape[0]),
            ],
            named,
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    require(
        [
            ("k", "has another head dim", "that of q", k.shape[-1] == q.shape[-1]),
            ("v", "has another length", "that of k", v.shape[-3] == k.shape[-3]),
            ("v", "has another number of heads", "that of k", v.shape[-2] == kv_heads),
            ("k", "has 0 heads", "at least 1", kv_heads > 0),
            ("q", "has 0 heads", "at least 1", heads > 0),
        ],
        named,
    )
    require(
        [
            (
                "k",
                "has a number of heads that does not divide q's",
                "a divisor of q's heads",
                heads % kv_heads == 0,
            )
        ],
        named,
    )


def numbers(scale: Any, softcap: Any, dropout_p: Any, window: Any) -> None:
    """Plain arguments that do not depend on the tensors."""
    real = (int, float)
    require(
        [
            ("scale", ("is {}", scale), "a finite number or None", scale is None or _finite(scale)),
            (
                "softcap",
                ("is {}", softcap),
                "a number > 0, or None",
                softcap is None or (_finite(softcap) and softcap > 0),
            ),
            (
                "dropout_p",
                ("is {}", dropout_p),
                "a number in [0, 1)",
                isinstance(dropout_p, real) and 0 <= dropout_p < 1,
            ),
        ]
    )
    window_sides(window)


def window_sides(window: Any) -> None:
    """The option `window`."""
    if window is None:
        return
    pair = isinstance(window, tuple | list) and len(window) == 2
    require([("window", ("is {}", window), "a pair (left, right) or None", pair)])
    for name, side in zip(("left", "right"), window, strict=True):
        holds = side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= 0)
        require(
            [
                (
                    "window",
                    ("has {} = {}", name, side),
                    "an int >= 0, or None for unbounded",
                    holds,
                )
            ]
        )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value - value == 0  # a graph cannot trace isfinite


def extras(
    q: Tensor, bias: Any, sinks: Any, alibi_slopes: Any, full: tuple[int, int, int, int]
) -> None:
    """Tensors beside q, k and v; full = (B, H, Lq, Lk)."""
    batch, heads = full[:2]
    if bias is not None:
        named = {"q": q, "bias": bias}
        require([("bias", ("is a {}", type(bias).__name__), "a tensor", isinstance(bias, Tensor))])
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        fits = broadcasts(shape, full)
        require(
            [
                (
                    "bias",
                    ("has shape {}", tuple(bias.shape)),
                    ("one that broadcasts to {}", full),
                    fits,
                ),
                (
                    "bias",
                    ("has dtype {}", bias.dtype),
                    "a float dtype (a bool mask goes to mask=)",
                    bias.dtype in FLOATS,
                ),
                (
                    "bias",
                    ("is on {}", bias.device),
                    ("{}, as q", q.device),
                    bias.device == q.device,
                ),
            ],
            named,
        )
    for name, value, form, shapes in (
        ("sinks", sinks, "{}", ((heads,),)),
        ("alibi_slopes", alibi_slopes, "{} or {}", ((heads,), (batch, heads))),
    ):
        if value is None:
            continue
        named = {"q": q, name: value}
        require([(name, ("is a {}", type(value).__name__), "a tensor", isinstance(value, Tensor))])
        require(
            [
                (
                    name,
                    ("has shape {}", tuple(value.shape)),
                    (form, *shapes),
                    is_one_of(tuple(value.shape), shapes),
                ),
                (name, ("has dtype {}", value.dtype), "a float dtype", value.dtype in FLOATS),
                (
                    name,
                    ("is on {}", value.device),
                    ("{}, as q", q.device),
                    value.device == q.device,
                ),
            ],
            named,
        )


def precision(name: Any) -> None:
    """The name of a precision, or None."""
    fits = name in (None, "full", "fp8")
    require([("precision", ("is {!r}", name), "None, 'full' or 'fp8'", fits)])


def fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    asked: Any,
    descales: tuple[Any, Any, Any],
    full: tuple[int, int, int, int],
    shard: bool,
) -> list[Tensor | None]:
    """Precision and scales; full = (B, H, Lq, Lk). Scales come back as (B, heads of the tensor, blocks or 1)."""
    batch, _, len_q, len_k = full
    wide = q.dtype == torch.float64
    precision(asked)
    require(
        [
            ("precision", "is 'fp8'", "None where q is fp64", not (wide and asked == "fp8")),
            (
                "precision",
                "is 'fp8' for one shard",
                "None: shards are fp32",
                not (shard and asked == "fp8"),
            ),
            ("q", "is e4m3 for one shard", "bf16 or wider", not (shard and q.dtype == E4M3)),
        ]
    )
    found: list[Tensor | None] = []
    for name, t, scale in zip("qkv", (q, k, v), descales, strict=True):
        label, given = f"{name}_descale", isinstance(scale, Tensor)
        got = "is given" if given else ("is {!r}", scale)
        require(
            [
                (
                    label,
                    got,
                    ("None, as {} is {}", name, t.dtype),
                    t.dtype == E4M3 or scale is None,
                ),
                (label, got, ("fp32 scales, as {} is {}", name, t.dtype), t.dtype != E4M3 or given),
            ]
        )
        if not isinstance(scale, Tensor):
            found.append(None)
            continue
        groups, own = k.shape[-2], t.shape[-2]
        if scale.ndim == 2:  # FlashAttention-3's form, per kv head
            require(
                [(label, ("has shape {}", tuple(scale.shape)), (batch, groups), tuple(scale.shape) == (batch, groups))]
            )  # fmt: skip
            scale = scale.repeat_interleave(own // groups, 1)[..., None]
        blocks = max(1, -(-(len_q if name == "q" else len_k) // BLOCK))
        check_scales(label, scale, batch, own, blocks, q.device)
        found.append(scale.expand(batch, own, -1))
    return found


def packing(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> None:
    """cu_seqlens and the longest lengths; their values are checked inside the op."""
    packed("q", q, cu_q, max_q)
    packed("k", k, cu_k, max_k)
    require(
        [("cu_seqlens_k", "has another length", "that of cu_seqlens_q", cu_q.shape == cu_k.shape)],
        {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k},
    )


def packed(side: str, like: Tensor, cu: Any, longest: Any) -> None:
    """cu_seqlens and the longest length of one side, "q" or "k"."""
    name = f"cu_seqlens_{side}"
    require([(name, ("is a {}", type(cu).__name__), "a tensor", isinstance(cu, Tensor))])
    require(
        [
            (
                name,
                ("has shape {}", tuple(cu.shape)),
                "(batch + 1,)",
                cu.ndim == 1 and cu.shape[0] >= 1,
            ),
            (name, ("has dtype {}", cu.dtype), "torch.int32", cu.dtype == torch.int32),
            (name, ("is on {}", cu.device), ("{}, as q", like.device), cu.device == like.device),
        ],
        {name: cu},
    )
    whole = isinstance(longest, int | torch.SymInt) and not isinstance(longest, bool)
    require([(f"max_seqlen_{side}", ("is {!r}", longest), "an int >= 0", whole and longest >= 0)])


def score_args(mods: Iterable[Any], full: tuple[int, int, int, int], device: torch.device) -> None:
    """Shapes of score mods' tensors against (B, H, Lq, Lk); only those with a derivative may want a gradient."""
    batch, heads, len_q, len_k = full
    for mod in mods:
        dargs = mod.dargs or [None] * len(mod.args)
        for value, darg in zip(mod.args, dargs, strict=True):
            if not isinstance(value, tuple):
                continue
            axis, tensor, *places = value
            if axis == "head":
                shapes = [(heads,), (batch, heads)]
            else:
                n = {"q": len_q, "k": len_k}.get(axis, tensor.shape[-1] if tensor.ndim else 0)
                shapes = [(n,), (heads, n), (batch, heads, n)]
            odd = axis != "distance" or (tensor.ndim > 0 and tensor.shape[-1] % 2 == 1)
            shape = tuple(tensor.shape)
            require(
                [
                    ("score_mod", ("has an argument by {!r} of shape {}", axis, shape), ("one of {}", shapes),
                     is_one_of(shape, shapes)),
                    ("score_mod", ("has {} distances", shape[-1:]), "an odd number, 2·R + 1", odd),
                    ("score_mod", ("has an argument on {}", tensor.device), ("{}, as q", device),
                     tensor.device == device),
                    ("score_mod", "has an argument that requires a gradient", "its derivative in dargs, or a constant",
                     darg is not None or not tensor.requires_grad),
                ]
            )  # fmt: skip
            for t in places:
                _places(t, [(len_k,), (batch, len_k)], device)


def _places(t: Tensor, shapes: list[tuple[int, ...]], device: torch.device) -> None:
    require(
        [
            ("score_mod", ("has places of shape {}", tuple(t.shape)), ("one of {}", shapes),
             is_one_of(tuple(t.shape), shapes)),
            ("score_mod", ("has places of dtype {}", t.dtype), "torch.int32 or torch.int64",
             t.dtype in (torch.int32, torch.int64)),
            ("score_mod", ("has places on {}", t.device), ("{}, as q", device), t.device == device),
        ]
    )  # fmt: skip
