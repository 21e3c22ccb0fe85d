"""The kernels' arguments: a handful of NamedTuples, built from `Arrays` with as few Python objects as a launch allows.

A field that is None, or a `tl.constexpr`, is known when the kernel is compiled; all others are values.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from relampago import dropout
from relampago.backends.triton.tile import Strides, plain
from relampago.masks.rules import Band as Facts
from relampago.mods import BETWEEN, Rule, rule_of
from relampago.problem import Arrays, Device

# Of keys and values that heads in flight share: half of an H100's L2 is near an SM.
L2_BYTES = 24 << 20


class Size(NamedTuple):
    """Lengths and counts."""

    batch: int
    heads: int
    group: int
    len_q: int
    len_k: int
    total_q: int
    total_k: int
    tiles: int
    section: int  # heads in flight together
    heads_q: int


class Lay(NamedTuple):
    """Where sequences lie; all None: dense."""

    cu_q: Any = None
    cu_k: Any = None
    lens_k: Any = None
    page_table: Any = None
    width: Any = None  # pages in a row of the table
    page: Any = None
    pages: Any = None


class Band(NamedTuple):
    """A `rules.Band` with its tables' stride."""

    offset: int
    left: Any
    right: Any
    prefix: Any
    row_start: Any
    row_end: Any
    table_stride: Any


class Part(NamedTuple):
    """Strides of what broadcasts to (B, H, Lq, Lk); None where its size is 1."""

    b: Any
    h: Any
    q: Any
    k: Any


class Slot(NamedTuple):
    """An argument of a mod: a number if axis is None, else a tensor and its strides."""

    axis: Any
    value: Any
    b: int = 0
    h: int = 0
    size: int = 1
    places: Any = None  # between which axis "distance" counts; None: between positions
    places_b: Any = None
    places_size: Any = None


class Mod(NamedTuple):
    """A score mod, compiled."""

    fn: Any
    dfn: Any
    ddfn: Any
    count: Any
    slots: Any


class Extra(NamedTuple):
    """What else shapes the scores and weights."""

    bias: Any = None
    bias_stride: Any = None
    mask: Any = None
    mask_stride: Any = None
    sinks: Any = None
    seed: Any = None
    cutoff: Any = None
    upscale: Any = None  # 1 / (1 - dropout_p)
    modified: Any = None  # how many mods: a tuple of tuples cannot be compared with None
    mods: Any = None


class Sparse(NamedTuple):
    """One direction of a BlockSparse: lists by query tile, or by key tile."""

    count: Any
    index: Any
    pattern: Any
    tiles: Any
    stride_b: int  # in lists
    stride_h: int
    most: int
    block_q: int
    block_k: int


class Boxes(NamedTuple):
    """TMA descriptors of keys and values (over keys: of queries and dO) by parts of head dims; None: plain loads."""

    k1: Any = None
    k2: Any = None
    v1: Any = None
    v2: Any = None


NO_BOXES = Boxes()
NO_LAY = Lay()
NO_EXTRA = Extra()


def strides(t: Tensor) -> Strides:
    """Of (B, L, H, D) or packed (T, H, D)."""
    s = t.stride()
    return Strides(s[0], s[1], s[2]) if len(s) == 4 else Strides(0, s[0], s[1])


def rows_contiguous(t: Tensor) -> Tensor:
    """The tensor, or a copy if its last dimension is not contiguous, or if rows lie askew, see `tile.stepped`."""
    step = math.gcd(t.shape[-1], 16 // t.element_size())
    sizes = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    askew = any(n > 1 and s % step for n, s in sizes)
    return t.contiguous() if askew or (t.stride(-1) != 1 and t.shape[-1] != 1) else t


def lse_strides(x: Arrays, lse: Tensor | None = None) -> Strides:
    """Of an LSE, (B, H, Lq) or (H, total), and all that is shaped like one; dense rows may be part of a longer one."""
    if x.cu_q is None and lse is not None:
        return Strides(lse.stride(0), 1, lse.stride(1))
    if x.cu_q is None:
        _, length, heads, _ = x.q.shape
        return Strides(heads * length, 1, length)
    return Strides(0, 1, x.q.shape[0])


def lse_shape(x: Arrays) -> tuple[int, ...]:
    """(B, H, Lq) or (H, total)."""
    s = x.q.shape
    return (s[0], s[2], s[1]) if x.cu_q is None else (s[1], s[0])


def size_of(x: Arrays, tiles: int, row_bytes: int) -> Size:
    """Sizes; `row_bytes` is what one key costs the L2 cache."""
    k = x.k.shape
    heads = x.q.shape[-2]
    group = max(1, heads // max(1, k[-2]))
    if x.page_table is not None:
        len_k = x.page_table.shape[1] * k[1]
    else:
        len_k = k[1] if x.cu_k is None else x.len_k
    together = max(1, L2_BYTES // max(1, x.len_k * row_bytes)) * group
    together = max(1, min(together, x.batch * heads))
    return Size(
        x.batch, heads, group, x.len_q if x.cu_q is not None else x.q.shape[1], len_k,
        x.q.shape[0], k[0], tiles, together, heads,
    )  # fmt: skip


def lay_of(x: Arrays) -> Lay:
    """How sequences lie."""
    if x.cu_q is None and x.cu_k is None and x.lens_k is None:
        return NO_LAY
    if x.page_table is None:
        return Lay(x.cu_q, x.cu_k, x.lens_k)
    table = x.page_table.contiguous()
    return Lay(x.cu_q, x.cu_k, x.lens_k, table, table.shape[1], x.k.shape[1], x.k.shape[0])


def cache_scales(x: Arrays) -> tuple[Tensor | None, Tensor | None]:
    """Scales (B, G) of keys and values in e4m3, as kernels index them."""
    if x.k_scale is None or x.v_scale is None:
        return None, None
    return x.k_scale.contiguous(), x.v_scale.contiguous()


def band_of(band: Facts) -> Band:
    """The band; tables are (B or 1, Lq)."""
    start, end = band.row_start, band.row_end
    if start is None or end is None:
        return Band(band.offset, band.left, band.right, band.prefix, None, None, None)
    start, end = start.contiguous(), end.contiguous()
    stride = start.shape[1] if start.shape[0] > 1 else 0
    return Band(band.offset, band.left, band.right, band.prefix, start, end, stride)


def boxes_of(
    a: Tensor, c: Tensor, rows: int, widths: tuple[int, int], widths_c: tuple[int, int]
) -> Boxes:
    """Descriptors of two dense tensors (B, L, H, D) by tiles of rows, if TMA can address both; no row reads as 0.

    The widths are those of the two parts of each head dim, as the kernel cuts it.
    """
    if not (_addressable(a) and _addressable(c)):
        return NO_BOXES
    return Boxes(*box_of(a, rows, widths), *box_of(c, rows, widths_c))


def box_of(t: Tensor, rows: int, widths: tuple[int, int]) -> tuple[Any, Any]:
    """Descriptors of the two parts of a tensor's head dim."""
    shape, stride = list(t.shape), list(t.stride())
    return tuple(
        TensorDescriptor(t, shape, stride, [1, rows, 1, width]) if width else None
        for width in widths
    )


def _addressable(t: Tensor) -> bool:
    """Whether TMA can: 16-byte steps from a 16-byte address."""
    step = 16 // t.element_size()
    return (
        t.numel() > 0
        and t.data_ptr() % 16 == 0
        and all(s > 0 and s % step == 0 for s in t.stride()[:-1])
    )


def part_of(t: Tensor) -> Part:
    """Strides of a bias or a mask."""
    return Part(*(None if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)))


def extra_of(x: Arrays) -> Extra:
    """Bias, mask, sinks, dropout and mods."""
    if x.bias is None and x.mask is None and x.sinks is None and not x.mods and not x.dropout_p:
        return NO_EXTRA
    mask = None if x.mask is None else x.mask.view(torch.uint8)
    return Extra(
        x.bias,
        None if x.bias is None else part_of(x.bias),
        mask,
        None if mask is None else part_of(mask),
        x.sinks,
        x.seed if x.dropout_p else None,
        dropout.threshold(x.dropout_p) if x.dropout_p else None,
        1.0 / (1.0 - x.dropout_p) if x.dropout_p else None,
        _constant(len(x.mods)) if x.mods else None,
        mods_of(x),
    )


def mods_of(x: Arrays) -> tuple[Mod, ...] | None:
    """The mods with their tensors."""
    if not x.mods:
        return None
    tensors = iter(x.mod_args)
    found = []
    for rule in map(rule_of, x.mods):
        slots = []
        for slot in rule.slots:
            if isinstance(slot, float):
                slots.append(Slot(None, _constant(slot)))
                continue
            t = next(tensors)
            t = t if t.stride(-1) == 1 else t.contiguous()
            lead = t.stride()[:-1]
            if slot == "head":
                slots.append(Slot(_constant(slot), t, lead[0] if lead else 0, 1, t.shape[-1]))
                continue
            b, h = ((0, 0), (0, *lead), lead)[len(lead)]
            places: tuple[Any, ...] = ()
            if slot == BETWEEN:
                slot, at = "distance", next(tensors).contiguous()
                places = (at, at.shape[-1] if at.ndim == 2 else 0, at.shape[-1])
            slots.append(Slot(_constant(slot), t, b, h, t.shape[-1], *places))
        found.append(Mod(*compiled(rule), _constant(len(slots)), tuple(slots)))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _constant(value: Any) -> tl.constexpr:
    return tl.constexpr(value)


@functools.lru_cache(maxsize=1024)
def compiled(rule: Rule) -> tuple[Any, ...]:
    """A rule's function and its two derivatives, for Triton; None where there is none that it can compile."""
    functions = (rule.fn, rule.dfn, rule.ddfn)
    return tuple(None if fn is None or refuse_function(fn) else plain(fn) for fn in functions)


def sparse_of(x: Arrays, by_key: bool) -> Sparse | None:
    """The lists of a BlockSparse by query tile, or by key tile."""
    if x.blocks is None or x.block is None:
        return None
    lists = x.blocks[3:6] if by_key else x.blocks[:3]
    count, index, pattern = (t.contiguous() for t in lists)
    batch, heads, n = count.shape
    return Sparse(
        count, index, pattern, x.blocks.tiles.contiguous().view(torch.uint8),
        heads * n if batch > 1 else 0, n if heads > 1 else 0, index.shape[-1], *x.block,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def split(dim: int) -> tuple[int, int]:
    """A head dim as two powers of two, the second 0 if one does: 192 is 128 + 64, 72 is 64 + 16 with 8 unused."""
    whole = max(16, triton.next_power_of_2(dim))
    main = whole // 2
    rest = max(16, triton.next_power_of_2(dim - main)) if dim > main else 0
    return (main, rest) if main >= 16 and 0 < rest < main else (whole, 0)


def parts(x: Arrays, boxed: bool = False) -> tuple[int, int, int, int]:
    """How a kernel cuts the head dims of keys and of values: both by `split`, or neither.

    ptxas 12.8, which Triton 3.6 brings, at times builds descriptors of a second part's products from a wrong register,
    where registers are short since rows come number by number: on an H200 d 40/72 read beyond shared memory. Rows of
    odd dims and unaligned addresses still come so (see `tile.stepped`), and a batch may hold both kinds of address. So
    on Hopper such rows are padded, unless TMA loads them (boxed). `tests/crosscompile/descriptors.py` looks for it.
    """
    dims = x.q.shape[-1], x.v.shape[-1]
    loose = not boxed and x.q.element_size() == 2 and any(dim % 16 for dim in dims)
    if loose and Device.of(x.q.device).arch == "sm90":
        d, e = (max(16, triton.next_power_of_2(dim)) for dim in dims)
        return d, 0, e, 0
    return *split(dims[0]), *split(dims[1])


def natural(x: Arrays) -> bool:
    """Whether scores are kept in natural units: a bias of finfo.min times log2(e) would no longer be finite."""
    return x.bias is not None or bool(x.mods) or x.scale <= 0


@functools.lru_cache(maxsize=1024)
def refuse_function(fn: Any) -> str | None:
    """Why Triton cannot compile a mod's function; None if nothing speaks against it."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if not inspect.isfunction(fn):
        return f"score mod {name} is a {type(fn).__name__}; needs a plain function"
    if name == "<lambda>":
        return "score mod is a lambda; needs a function written with def"
    if fn.__closure__:
        captured = ", ".join(fn.__code__.co_freevars)
        return f"score mod {name} captures {captured}; needs numbers and tensors in args"
    try:
        inspect.getsource(fn)
    except (OSError, TypeError):
        return f"score mod {name} has no source file to compile"
    used = [n for n in fn.__code__.co_names if n in fn.__globals__]
    plain = [n for n in used if isinstance(fn.__globals__[n], int | float | Tensor)]
    return f"score mod {name} reads the global {plain[0]}; needs it in args" if plain else None
