"""How a call is described: `Facts` (what the user said), `Arrays` (tensors), `Problem` (the key of every choice)."""

from __future__ import annotations

import ast
import functools
import math
import platform
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from relampago.errors import InvalidInput
from relampago.masks.blocks import Blocks
from relampago.masks.rules import Band
from relampago.mods import no_bend, no_slope

FP8_PRODUCTS, FP8_CACHE = "FP8 products", "FP8 keys in a cache"


class Layout(str, Enum):
    """How sequences lie in memory."""

    DENSE = "dense"  # (B, L, H, D)
    RAGGED = "ragged"  # (total, H, D) with cu_seqlens
    CACHE = "cache"  # keys (B, room, G, D), of which lens_k[b] are filled
    PAGED = "paged"  # keys (pages, page, G, D), found through a page table; lens_k[b] are filled


@dataclass(frozen=True, slots=True)
class Device:
    """What a kernel must know of the machine, without touching it."""

    kind: str  # "cpu", "cuda" or "hip"
    arch: str  # "sm90", "gfx942", "x86_64"
    multiprocessors: int = 1
    shared_memory: int = 0  # bytes a block may use

    def __str__(self) -> str:
        return self.arch if self.kind != "cpu" else "cpu"

    @property
    def has_e4m3(self) -> bool:
        """Whether its kernels can read e4m3 numbers; a CPU's do."""
        sm = re.fullmatch(r"sm(\d+)", self.arch)
        return self.arch != "gfx942" and (sm is None or int(sm[1]) >= 89)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(device: torch.device) -> Device:
        """Describe a torch device."""
        if device.type != "cuda":
            return Device(device.type, platform.machine() or "unknown", torch.get_num_threads())
        facts = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            arch = facts.gcnArchName.split(":")[0]
            return Device("hip", arch, facts.multi_processor_count, 65536)
        shared = getattr(facts, "shared_memory_per_block_optin", 99 * 1024)
        return Device("cuda", f"sm{facts.major}{facts.minor}", facts.multi_processor_count, shared)


class Facts(NamedTuple):
    """What the user asked for, as plain values: it crosses the custom op's border as one string."""

    scale: float | None = None  # None: dim ** -0.5
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    block: tuple[int, int] | None = None  # tile of a BlockSparse
    mods: tuple[str, ...] = ()  # `ScoreMod.token`s
    dropout_p: float = 0.0
    deterministic: bool = False
    dtype: str | None = None  # of out and gradients; None: as the inputs
    shard: bool = False  # part of a larger attention: in the backward, LSE is the whole's
    backend: str | None = None
    plan: tuple[tuple[str, int], ...] = ()  # a forced plan
    batch_invariant: bool = False
    precision: str | None = None  # "fp8": products of e4m3 numbers

    def encode(self) -> str:
        """As a string."""
        return repr(tuple(self))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def decode(text: str) -> Facts:
        """From a string."""
        return Facts(*ast.literal_eval(text))


@dataclass(slots=True, kw_only=True)
class Arrays:
    """The tensors of one call and the numbers that vary with them. Legend: see `relampago.attention`."""

    q: Tensor  # (B, Lq, H, D) or (Tq, H, D)
    k: Tensor  # (B, Lk, G, D) or (Tk, G, D)
    v: Tensor  # (B, Lk, G, E) or (Tk, G, E)
    scale: float
    band: Band  # of a dense problem; for packed ones the offset is added to each sequence's own
    len_q: int  # of the longest sequence
    len_k: int
    cu_q: Tensor | None = None  # int32 (B + 1,)
    cu_k: Tensor | None = None
    lens_k: Tensor | None = None  # int32 (B,): keys in a cache
    page_table: Tensor | None = None  # int32 (B, pages of the longest)
    bias: Tensor | None = None  # broadcasts to (B, H, Lq, Lk)
    mask: Tensor | None = None  # bool, likewise
    sinks: Tensor | None = None  # (H,)
    seed: Tensor | None = None  # int64 scalar
    blocks: Blocks | None = None
    block: tuple[int, int] | None = None
    mods: tuple[str, ...] = ()
    mod_args: tuple[Tensor, ...] = ()
    dropout_p: float = 0.0
    shard: bool = False  # LSE is a larger attention's
    dtype: torch.dtype | None = None  # of out and gradients, if not that of the inputs
    # (out, lse) of other keys, to go on from, see `Backend.forward`
    into: tuple[Tensor, Tensor] | None = None
    anew: bool = False  # what stands in `into` counts for nothing
    sums: Sums | None = None  # what a backward adds to, see `Backend.backward`
    max_logits: Tensor | None = None  # (B, H) of -inf: a forward without mods and bias raises it
    precision: str | None = None  # "fp8": products of e4m3 numbers
    q_scale: Tensor | None = None  # fp32 (B, H, blocks or 1), where q is e4m3
    k_scale: Tensor | None = None  # fp32 (B, G, blocks or 1), where k is
    v_scale: Tensor | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        """Of out, dq, dk and dv."""
        return self.dtype or self.q.dtype

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q.shape[-2] // max(1, self.k.shape[-2])

    @property
    def layout_q(self) -> Layout:
        """How queries lie: DENSE or RAGGED."""
        return Layout.DENSE if self.cu_q is None else Layout.RAGGED

    @property
    def layout_k(self) -> Layout:
        """How keys and values lie."""
        if self.page_table is not None:
            return Layout.PAGED
        if self.lens_k is not None:
            return Layout.CACHE
        return Layout.DENSE if self.cu_k is None else Layout.RAGGED

    def check_cache(self) -> None:
        """Refuse lengths beyond the room, and pages that are not there; on a device their values are not read."""
        lens, table = self.lens_k, self.page_table
        if lens is None or lens.device.type != "cpu" or not lens.numel():
            return
        page = self.k.shape[1]
        room = page if table is None else page * table.shape[1]
        least, most = torch.aminmax(lens)
        if int(least) < 0 or int(most) > room:
            raise InvalidInput(
                f"cache: lengths are {lens.tolist()[:16]}; expected 0 to the room of {room}"
            )
        if table is not None and table.numel():
            used = torch.arange(table.shape[1]) * page < lens[:, None]
            if bool((used & ((table < 0) | (table >= self.k.shape[0]))).any()):
                raise InvalidInput(
                    f"cache: the page table has pages beyond 0 to {self.k.shape[0] - 1}, the pages there are"
                )

    def rows(self, b: int) -> slice | int:
        """Where sequence b lies in q. Reads cu_seqlens, as do `keys` and `band_of`: for the CPU."""
        return b if self.cu_q is None else slice(int(self.cu_q[b]), int(self.cu_q[b + 1]))

    def keys(self, b: int) -> tuple[Any, ...]:
        """Where sequence b lies in k and v, as an index of its keys; a paged one is gathered, all else is a view."""
        if self.page_table is not None and self.lens_k is not None:
            page = self.k.shape[1]
            place = torch.arange(int(self.lens_k[b]), device=self.k.device)
            return self.page_table[b, place // page].long(), place % page
        if self.lens_k is not None:
            return b, slice(0, int(self.lens_k[b]))
        return (b,) if self.cu_k is None else (slice(int(self.cu_k[b]), int(self.cu_k[b + 1])),)

    def band_of(self, b: int) -> Band:
        """Sequence b's band: where lengths differ, each aligns bottom right by its own."""
        if self.layout_q is Layout.DENSE and self.layout_k is Layout.DENSE:
            return self.band
        rows, keys = self.lengths(b)
        return self.band._replace(offset=self.band.offset + keys - rows)

    def lengths(self, b: int) -> tuple[int, int]:
        """Rows and keys of sequence b."""
        rows = self.q.shape[1] if self.cu_q is None else int(self.cu_q[b + 1] - self.cu_q[b])
        if self.lens_k is not None:
            return rows, int(self.lens_k[b])
        return rows, self.k.shape[1] if self.cu_k is None else int(self.cu_k[b + 1] - self.cu_k[b])


class Saved(NamedTuple):
    """What a backward needs of the forward."""

    out: Tensor
    lse: Tensor
    delta: Tensor | None = (
        None  # rowsum(dout · out) - dlse, if known: out and dlse are not read then
    )


class Sums(NamedTuple):
    """Gradients that other shards gave, in fp32 (fp64 for fp64 input), to be added to."""

    q: Tensor  # (B, Lq, H, D), or what `Holding.hold` gave
    k: Tensor  # (B, Lk, G, D)
    v: Tensor  # (B, Lk, G, E)
    anew: bool = False  # what stands in k and v counts for nothing


class Held(NamedTuple):
    """Rows as a backend holds them over a backward by shards: in an order of its own, three dimensions each.

    The last one counts rows of a head (dq: rows times their width), of which `part` takes some.
    """

    dq: Tensor  # (B, H, room · width)
    lse: Tensor  # (B, H, room)
    delta: Tensor  # (B, H, room)
    unit: int  # parts begin at multiples of it, and end there or at the last row

    def part(self, start: int, stop: int) -> Held:
        """Rows [start, stop)."""
        width = self.dq.shape[-1] // self.lse.shape[-1]
        dq = self.dq[..., start * width : stop * width]
        return Held(dq, self.lse[..., start:stop], self.delta[..., start:stop], self.unit)


class RowStatistics(NamedTuple):
    """What `statistics.rows` tells; all but max_logits are shaped like LSE, in its dtype."""

    lse: Tensor
    entropy: Tensor
    max_logits: Tensor  # (B, H)


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    bias: bool = False
    sinks: bool = False
    mod_args: tuple[bool, ...] = ()  # of each tensor among Arrays.mod_args; () for none


class Grads(NamedTuple):
    """Gradients; None where not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    mod_args: tuple[Tensor | None, ...] = ()


class Tangents(NamedTuple):
    """Directions of a derivative, each shaped like its input; None where the input stands still."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None = None  # broadcasts to (B, H, Lq, Lk), as the bias does
    sinks: Tensor | None = None


class Moving(NamedTuple):
    """What the derivative of a backward takes beside the backward's own: see docs/derivatives.md."""

    inputs: Tangents
    out: Tensor  # tangents of out and LSE, as `tangent` gives them
    lse: Tensor
    dout: Tensor | None  # tangents of the gradients of out and LSE
    dlse: Tensor | None


class HeldOut(NamedTuple):
    """Out and LSE as a backend holds them over a forward by shards: out in an order of its own."""

    out: Tensor  # (B, H, room · width), fp32
    lse: Tensor  # (B, H, room)
    unit: int  # parts begin at multiples of it, and end there or at the last row

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows [start, stop), as `Arrays.into`."""
        width = self.out.shape[-1] // self.lse.shape[-1]
        return self.out[..., start * width : stop * width], self.lse[..., start:stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is asked, without tensors. Hashable: the key of choice, plan and compile cache."""

    direction: Literal["forward", "backward"] = "forward"
    moving: bool = False  # its derivative along tangents
    device: Device
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int  # the longest sequence, rounded up to a power of two
    len_k: int
    dim: int
    dim_v: int
    dtype: str
    layout_q: Layout = Layout.DENSE
    layout_k: Layout = Layout.DENSE
    left: bool = False  # whether the side is bounded
    right: bool = False
    prefix: bool = False
    tables: bool = False
    blocks: bool = False
    mask: bool = False
    mods: tuple[str, ...] = ()
    bias: bool = False
    bias_grad: bool = False
    mod_grads: bool = False
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    statistic: str = ""  # one of STATISTICS
    fp8: Literal["", "products", "cache"] = (
        ""  # what is in e4m3: all operands, or keys and values in a cache
    )

    def backward(self) -> Problem:
        """The same problem, the other way."""
        return replace(self, direction="backward")

    def features(self) -> frozenset[str]:
        """The features a backend must know, in the words a refusal uses."""
        flags = {
            "packed sequences": Layout.RAGGED in (self.layout_q, self.layout_k),
            "keys in a cache": self.layout_k is Layout.CACHE,
            "keys in pages": self.layout_k is Layout.PAGED,
            "window": self.left or (self.right and self.prefix),
            "prefix": self.prefix,
            "document tables": self.tables,
            "BlockSparse masks": self.blocks,
            "dense masks": self.mask,
            "score mods": bool(self.mods),
            "bias": self.bias,
            "the bias gradient": self.bias_grad,
            "gradients of score mod arguments": self.mod_grads,
            "sinks": self.sinks,
            "dropout": self.dropout,
            "deterministic mode": self.deterministic,
            "batch invariance": self.batch_invariant,
            "tangents": self.moving and self.direction == "forward",
            "second derivatives": self.moving and self.direction == "backward",
            self.statistic: bool(self.statistic),
            FP8_PRODUCTS: self.fp8 == "products",
            FP8_CACHE: self.fp8 == "cache",
        }
        return frozenset(name for name, present in flags.items() if present)

    def __str__(self) -> str:
        dims = f"D{self.dim}" if self.dim == self.dim_v else f"D{self.dim}/{self.dim_v}"
        sides = "causal " if self.right else ""
        extras = "".join(f" +{name}" for name in sorted(self.features() - {"window"}))
        window = "window " if self.left else ""
        return (
            f"{self.direction} B{self.batch} H{self.heads_q}/{self.heads_kv} Q{self.len_q} K{self.len_k} "
            f"{dims} {self.dtype} {window or sides}{self.device}{extras}"
        )


def short_dtype(dtype: torch.dtype) -> str:
    """bf16, fp16, fp32, fp64, e4m3."""
    names = {
        "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "e4m3",
    }  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    return names.get(name, name)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums, LSE and partial results are held in: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_lse(x: Arrays) -> Tensor:
    """The LSE of rows that see nothing: -inf, (B, H, Lq) or (H, total)."""
    rows = x.q.shape
    shape = (rows[0], rows[2], rows[1]) if x.cu_q is None else (rows[1], rows[0])
    return x.q.new_full(shape, -math.inf, dtype=accumulate_dtype(x.q.dtype))


def round_up(n: int) -> int:
    """The next power of two: lengths in a Problem vary less than those of calls."""
    return 1 << max(0, n - 1).bit_length()


def describe(
    x: Arrays,
    facts: Facts,
    *,
    wanted: Wanted | None = None,
    device: Device | None = None,
    moving: bool = False,
    statistic: str = "",
) -> Problem:
    """The Problem that tensors and facts amount to; a backward one if gradients are wanted."""
    return Problem(
        direction="forward" if wanted is None else "backward",
        moving=moving,
        device=device or Device.of(x.q.device),
        batch=x.batch,
        heads_q=x.q.shape[-2],
        heads_kv=x.k.shape[-2],
        len_q=round_up(x.len_q),
        len_k=round_up(x.len_k),
        dim=x.q.shape[-1],
        dim_v=x.v.shape[-1],
        dtype=short_dtype(x.q.dtype),
        layout_q=x.layout_q,
        layout_k=x.layout_k,
        left=facts.left is not None,
        right=facts.right is not None,
        prefix=facts.prefix is not None,
        tables=x.band.row_start is not None,
        blocks=x.blocks is not None,
        mask=x.mask is not None,
        mods=facts.mods,
        bias=x.bias is not None,
        bias_grad=wanted is not None and wanted.bias,
        mod_grads=wanted is not None and any(wanted.mod_args),
        sinks=x.sinks is not None,
        dropout=facts.dropout_p > 0,
        deterministic=facts.deterministic,
        batch_invariant=facts.batch_invariant,
        statistic=statistic,
        fp8="products" if facts.precision else "" if x.k_scale is None else "cache",
    )


def refuse_unknown(p: Problem, knows: frozenset[str]) -> str | None:
    """The refusal of a backend that knows these features only: a new feature is refused until it is learnt."""
    unknown = sorted(p.features() - knows)
    return f"does not know {', '.join(unknown)}" if unknown else None


def refuse_variance(p: Problem) -> str | None:
    """What no backend can keep from depending on the rest of a batch."""
    if p.batch_invariant and p.dropout:
        return "drops weights by a sequence's place in the batch, so dropout is not batch-invariant"
    if p.batch_invariant and p.blocks:
        return "cuts keys by a BlockSparse's lists, not by their positions, so it is not batch-invariant"
    if p.batch_invariant and (p.statistic or p.mod_grads or p.fp8 or p.moving):
        what = p.statistic or (
            "tangents" if p.moving else "FP8" if p.fp8 else "gradients of score mods' arguments"
        )
        return f"does not know batch-invariant {what}"
    return None


def refuse_backward(p: Problem) -> str | None:
    """What no backend can differentiate: mods without a derivative, keys in a cache."""
    if p.direction == "forward" and not p.moving:
        return None
    if p.statistic:
        return "statistics have no gradient"
    if p.layout_k in (Layout.CACHE, Layout.PAGED):
        return "keys in a cache have no gradient"
    if p.dtype == "e4m3":
        return "e4m3 inputs have no gradient"
    if p.moving and p.fp8 == "products":
        return "FP8 products have no tangents and no second derivatives"
    return no_slope(p.mods) or (no_bend(p.mods) if p.moving and p.direction == "backward" else None)


STATISTICS = ("max logits", "row statistics", "column sums")
FEATURES = frozenset(
    name
    for layout in Layout
    for statistic in STATISTICS
    for direction in ("forward", "backward")
    for name in Problem(
        direction=direction, moving=True, device=Device("cpu", "any"), batch=1, heads_q=1, heads_kv=1, len_q=1,
        len_k=1, dim=1, dim_v=1, dtype="fp32", layout_k=layout, left=True, right=True, prefix=True, tables=True,
        blocks=True, mask=True, mods=("any",), bias=True, bias_grad=True, mod_grads=True, sinks=True, dropout=True,
        deterministic=True, batch_invariant=True, statistic=statistic,
    ).features()
)  # fmt: skip
