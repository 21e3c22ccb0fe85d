"""The one catalogue of named problems: tests, benchmarks, tuning and docs read it.

A case is plain values; `make` builds its tensors. Contract cases are small and odd on purpose; bench cases have real
sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from relampago.masks.blocks import BlockSparse
from relampago.masks.spec import All, Causal, Document, Prefix, Window
from relampago.mods import ScoreMod, relative_bias, window_bias


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem.

    Args:
        name: how it is asked for.
        len_q, len_k: lengths, or lists of them for packed sequences.
        options: keyword arguments of `attention`; a callable gets the case's random generator and returns the value.
        layout: "bshd", or "bhsd" for the transposed view that PyTorch users have.
        magnitude: standard deviation of q and k.
    """

    name: str
    batch: int = 2
    len_q: int | tuple[int, ...] = 64
    len_k: int | tuple[int, ...] = 64
    heads: int = 4
    kv_heads: int | None = None
    dim: int = 32
    dim_v: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "bshd"
    magnitude: float = 1.0

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return not isinstance(self.len_q, int)

    def make(
        self, dtype: torch.dtype, device: Any = "cpu", seed: int = 0
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The tensors (q, k, v) and the keyword arguments, cu_seqlens included for a packed case."""
        g = torch.Generator().manual_seed(seed)
        heads, kv = self.heads, self.kv_heads or self.heads
        dims = ((heads, self.dim), (kv, self.dim), (kv, self.dim_v or self.dim))
        lengths = (self.len_q, self.len_k, self.len_k)
        tensors = [
            self._tensor(n, h, d, g)
            .mul_(self.magnitude if i < 2 else 1.0)
            .to(device=device, dtype=dtype)
            for i, (n, (h, d)) in enumerate(zip(lengths, dims, strict=True))
        ]
        if self.layout == "bhsd":
            tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        options = {
            name: value(g) if callable(value) and not isinstance(value, type) else value
            for name, value in self.options.items()
        }
        options = {name: _move(value, device) for name, value in options.items()}
        if isinstance(self.len_q, tuple) and isinstance(self.len_k, tuple):
            for side, n in (("q", self.len_q), ("k", self.len_k)):
                ends = torch.tensor((0, *n)).cumsum(0)
                options[f"cu_seqlens_{side}"] = ends.to(device=device, dtype=torch.int32)
                options[f"max_seqlen_{side}"] = max(n, default=0)
        return tuple(tensors), options

    def _tensor(self, n: int | tuple[int, ...], heads: int, dim: int, g: torch.Generator) -> Tensor:
        shape = (self.batch, n, heads, dim) if isinstance(n, int) else (sum(n), heads, dim)
        return torch.randn(shape, generator=g)


def _move(value: Any, device: Any) -> Any:
    if isinstance(value, All):
        return All(tuple(_move(part, device) for part in value.masks))
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, ScoreMod):
        args = [
            (a[0], *(t.to(device) for t in a[1:])) if isinstance(a, tuple) else a
            for a in value.args
        ]
        return replace(value, args=args)
    if isinstance(value, BlockSparse):
        return BlockSparse(
            type(value.blocks)(*(t.to(device) for t in value.blocks)), value.block, value.shape
        )
    return value


def _randn(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(shape, generator=g)


def _bool(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.rand(shape, generator=g) < 0.7


def _strided(b, h, q, k):
    return ((q - k) % 3 == 0) | (k < 5)


def _per_head(b, h, q, k):
    return (q - k) % (h + 2) == 0


def _soft(score, q, k, head, args, math):
    return score + args[0] * math.tanh(score) - args[1]


def _soft_slope(score, q, k, head, args, math):
    t = math.tanh(score)
    return 1.0 + args[0] * (1.0 - t * t)


def _soft_bend(score, q, k, head, args, math):
    t = math.tanh(score)
    return -2.0 * args[0] * t * (1.0 - t * t)


def _checker(g: torch.Generator) -> BlockSparse:
    tiles = torch.rand(2, 4, 5, 6, generator=g) < 0.6
    return BlockSparse.from_tiles(tiles, shape=(72, 90), block=(16, 16))


def _padding(g: torch.Generator) -> Tensor:
    bias = torch.zeros(2, 1, 40, 48)
    least = torch.finfo(torch.bfloat16).min
    bias[0, :, :, :9] = least
    bias[1, :, :7] = least  # these rows see nothing but finfo.min
    return bias


def _minus_inf(g: torch.Generator) -> Tensor:
    bias = torch.randn(2, 4, 40, 48, generator=g)
    bias[0, :, :, 20:] = -torch.inf
    bias[1, :, 3] = -torch.inf
    return bias


CONTRACT: tuple[Case, ...] = (
    Case(name="full"),
    Case(name="causal", options={"causal": True}),
    Case(name="causal-long", len_q=300, len_k=300, options={"causal": True}, batch=1),
    Case(name="bottom-right", len_q=33, len_k=77, options={"causal": True}),
    Case(name="more-queries-than-keys", len_q=77, len_k=33, options={"causal": True}),
    Case(name="one-query", len_q=1, len_k=130, heads=8, kv_heads=2, options={"causal": True}),
    Case(name="one-key", len_q=19, len_k=1),
    Case(name="odd-lengths", len_q=129, len_k=257, batch=1),
    Case(name="bhsd", len_q=65, len_k=65, layout="bhsd", options={"causal": True}),
    Case(name="gqa", heads=8, kv_heads=2, len_q=70, len_k=70, options={"causal": True}),
    Case(name="mqa", heads=6, kv_heads=1, len_q=50, len_k=90),
    Case(name="dim-1", dim=1),
    Case(name="dim-40-v-72", dim=40, dim_v=72, options={"causal": True}),
    Case(name="dim-128", dim=128, len_q=90, len_k=90, options={"causal": True}),
    Case(name="dim-192-v-128", dim=192, dim_v=128, len_q=50, len_k=50, batch=1, heads=2),
    Case(name="dim-256", dim=256, len_q=50, len_k=70, batch=1, heads=2, options={"causal": True}),
    Case(name="dim-512", dim=512, len_q=40, len_k=40, batch=1, heads=2, options={"causal": True}),
    Case(name="scale", options={"scale": 0.5}),
    Case(name="large-values", magnitude=30.0, options={"causal": True}),
    Case(name="window", len_q=150, len_k=150, options={"window": (20, 5)}),
    Case(name="window-causal", len_q=150, len_k=190, options={"causal": True, "window": (30, None)}),
    Case(name="window-sees-nothing", len_q=90, len_k=20, options={"window": (3, 3)}),
    Case(name="prefix", len_q=70, len_k=70, options={"mask": Prefix(25)}),
    Case(name="prefix-per-sequence", options={"mask": Prefix(torch.tensor([5, 40]))}),
    Case(name="prefix-window", options={"mask": Prefix(30) & Window(20, None)}),
    Case(name="documents", len_q=100, len_k=100, options={"mask": Causal() & Document(torch.tensor([0, 17, 60]))}),
    Case(name="documents-per-sequence", options={"mask": Document(torch.tensor([[0, 9, 40], [3, 20, 64]]))}),
    Case(name="dense-mask", len_q=40, len_k=48, options={"mask": _bool(2, 4, 40, 48)}),
    Case(name="dense-mask-broadcast", len_q=40, len_k=48, options={"mask": _bool(2, 1, 1, 48), "causal": True}),
    Case(
        name="mask-function",
        len_q=72,
        len_k=90,
        options={"mask": lambda g: BlockSparse.from_function(
            _strided, batch=2, heads=4, len_q=72, len_k=90, block=(16, 16))},
    ),
    Case(
        name="mask-function-per-head",
        len_q=72,
        len_k=90,
        kv_heads=2,
        options={"mask": lambda g: Causal() & BlockSparse.from_function(
            _per_head, batch=2, heads=4, len_q=72, len_k=90, block=(16, 32))},
    ),
    Case(name="block-sparse", len_q=72, len_k=90, kv_heads=2, options={"mask": _checker}),
    Case(name="softcap", options={"softcap": 3.0, "causal": True}),
    Case(name="alibi", kv_heads=2,
         options={"alibi_slopes": lambda g: torch.tensor([0.5, 0.25, 0.125, 0.06]), "causal": True}),
    Case(name="alibi-per-sequence", len_q=30, options={"alibi_slopes": lambda g: torch.rand(2, 4, generator=g)}),
    Case(name="relative-bias", options={"score_mod": lambda g: relative_bias(torch.randn(4, 41, generator=g))}),
    Case(name="window-bias", len_q=12, len_k=12, kv_heads=2,
         options={"score_mod": lambda g: window_bias(torch.randn(35, 4, generator=g), (3, 4))}),
    Case(
        name="user-mod",
        kv_heads=2,
        options={
            "score_mod": lambda g: ScoreMod(
                _soft, _soft_slope, [("head", torch.rand(4, generator=g)), ("k", torch.rand(2, 4, 64, generator=g))],
                ddfn=_soft_bend,
            ),
            "softcap": 5.0,
        },
    ),
    Case(name="bias", len_q=40, len_k=48, kv_heads=2, options={"bias": _randn(2, 4, 40, 48)}),
    Case(name="bias-shared", len_q=40, len_k=48, options={"bias": _randn(1, 4, 40, 48), "causal": True}),
    Case(name="bias-row", len_q=40, len_k=48, options={"bias": _randn(2, 1, 1, 48)}),
    Case(name="bias-minus-inf", len_q=40, len_k=48, options={"bias": _minus_inf}),
    Case(name="bias-finfo-min", len_q=40, len_k=48, options={"bias": _padding}),
    Case(name="sinks", kv_heads=2, options={"sinks": _randn(4), "causal": True}),
    Case(name="sinks-window", len_q=90, len_k=20, options={"sinks": _randn(4), "window": (3, 3)}),
    Case(name="dropout", kv_heads=2, options={"dropout_p": 0.3, "dropout_seed": 7}),
    Case(name="dropout-causal", len_q=150, len_k=170,
         options={"dropout_p": 0.1, "dropout_seed": 2**40 + 3, "causal": True}),
    Case(name="packed", len_q=(33, 1, 64, 0, 20), len_k=(33, 1, 64, 0, 20), kv_heads=2, options={"causal": True}),
    Case(name="packed-cross", len_q=(5, 40, 0, 3), len_k=(17, 9, 4, 0), options={"causal": True}),
    Case(name="packed-window", len_q=(50, 90), len_k=(70, 90), options={"window": (15, 2), "sinks": _randn(4)}),
    Case(name="packed-prefix", len_q=(50, 90), len_k=(50, 90), options={"mask": Prefix(20)}),
    Case(name="packed-dropout", len_q=(5, 40, 3), len_k=(17, 9, 4), options={"dropout_p": 0.3, "dropout_seed": 5}),
    Case(name="packed-alibi", len_q=(20, 30), len_k=(25, 30), options={"alibi_slopes": _randn(2, 4), "softcap": 9.0}),
    Case(name="packed-bias", len_q=(20, 30), len_k=(25, 30), options={"bias": _randn(2, 4, 30, 30)}),
    Case(name="deterministic", kv_heads=2, options={"deterministic": True, "causal": True}),
    Case(name="empty-batch", batch=0),
    Case(name="no-queries", len_q=0),
    Case(name="no-keys", len_k=0),
)  # fmt: skip


def _bench(length: int, dim: int, causal: bool, **more: Any) -> Case:
    kind = "causal" if causal else "full"
    return Case(name=f"{kind}-d{dim}-{length // 1024}k", batch=1, heads=8, dim=dim, len_q=length, len_k=length,
                options={"causal": causal}, **more)  # fmt: skip


BENCH: tuple[Case, ...] = (
    *(_bench(n, d, c) for d in (64, 128) for n in (1024, 4096, 16384) for c in (False, True)),
    Case(name="window-1k-16k", batch=1, heads=8, dim=64, len_q=16384, len_k=16384,
         options={"causal": True, "window": (1023, 0)}),
    Case(name="decode-32k", batch=1, heads=32, kv_heads=8, dim=128, len_q=1, len_k=32768),
    Case(name="packed-32", heads=8, dim=64, len_q=tuple(range(16, 513, 16)), len_k=tuple(range(16, 513, 16)),
         options={"causal": True}),
)  # fmt: skip


def find(name: str) -> Case:
    """A case by name, from both lists."""
    for case in (*CONTRACT, *BENCH):
        if case.name == name:
            return case
    raise KeyError(name)
