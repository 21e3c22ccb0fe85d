"""What a user writes to say who sees whom: `Causal() & Window(1023, 0) & Document(starts)`.

Every mask here is a value. `resolve` folds one, at the door, into plain numbers and at most two int32 tables per
row (a `rules.Band`), a `BlockSparse`, or a dense boolean tensor: whatever a kernel sees, it never sees these classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relampago.errors import InvalidInput
from relampago.shapes import broadcasts, is_one_of

if TYPE_CHECKING:
    from relampago.masks.blocks import BlockSparse


class Mask:
    """A value that can be combined with `&`: a key is visible where both masks show it."""

    def __and__(self, other: Any) -> Mask:
        return All.of(self, other)

    def __rand__(self, other: Any) -> Mask:
        return All.of(other, self)


@dataclass(frozen=True)
class Causal(Mask):
    """No key after the row's own position; aligned to the bottom right when Lq != Lk (flash-attn >= 2.1)."""


@dataclass(frozen=True)
class Window(Mask):
    """At most `left` keys before and `right` keys after the row's own position; None is unbounded."""

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Prefix-LM: causal, but every row sees the first `length` keys (an int, or one per sequence: (B,))."""

    length: int | Tensor


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Rows see keys of their own document only.

    Args:
        starts: int tensor (n,) or (B, n), ascending: where each document begins among the keys. Keys before
            the first start belong to no document. Pad rows of (B, n) with the length of the keys.
    """

    starts: Tensor

    @staticmethod
    def from_ids(ids: Tensor) -> Document:
        """From one id per key, (L,) or (B, L): each run of equal ids is a document."""
        if not isinstance(ids, Tensor) or ids.ndim not in (1, 2):
            raise InvalidInput(f"ids is {_describe(ids)}; expected a tensor (L,) or (B, L)")
        length = ids.shape[-1]
        new = torch.ones_like(ids, dtype=torch.bool)
        new[..., 1:] = ids[..., 1:] != ids[..., :-1]
        place = torch.arange(length, device=ids.device).expand_as(ids)
        return Document(torch.where(new, place, length).sort(-1).values)


@dataclass(frozen=True, eq=False)
class Runs(Mask):
    """Each row sees one run of keys of its own: start[row] <= key < end[row], whatever the offset.

    Args:
        start: int tensor (Lq,) or (B, Lq), with 0 <= start <= end.
        end: likewise, at most Lk.
    """

    start: Tensor
    end: Tensor


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """A user's `fn(b, h, q, k) -> bool` on positions; becomes a `BlockSparse` at the door."""

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor that broadcasts to (B, H, Lq, Lk); True is visible. O(N²) memory, and the user's own."""

    seen: Tensor


@dataclass(frozen=True, eq=False)
class All(Mask):
    """The intersection of several masks."""

    masks: tuple[Mask, ...]

    @staticmethod
    def of(*masks: Any) -> All:
        """Those given, tensors and functions among them; what `&` says, but Dynamo takes `&` with a tensor for its."""
        return All(tuple(part for mask in masks for part in _parts(mask)))


@dataclass(frozen=True, eq=False)
class Resolved:
    """A mask folded for one problem: numbers, row tables, tiles and a dense mask; all but numbers may be None."""

    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    row_start: Tensor | None = None
    row_end: Tensor | None = None
    blocks: BlockSparse | None = None
    dense: Tensor | None = None


@dataclass(frozen=True)
class Extent:
    """The sizes a mask is folded for. offset is the position of row 0 among the keys."""

    batch: int
    heads: int
    len_q: int
    len_k: int
    offset: int
    device: torch.device
    ragged: bool = False


def resolve(mask: Any, extent: Extent) -> Resolved:
    """Fold a mask (a `Mask`, a bool tensor or a function) into what kernels understand."""
    from relampago.masks.blocks import BlockSparse

    left = right = prefix = row_start = row_end = dense = blocks = None
    tabled: list[Prefix | Document | Runs] = []
    for part in _parts(mask):
        if isinstance(part, Causal):
            right = _least(right, 0)
        elif isinstance(part, Window):
            check_window(part)
            left, right = _least(left, part.left), _least(right, part.right)
        elif isinstance(part, Prefix | Document | Runs):
            if isinstance(part, Prefix):
                check_prefix(part)
            tabled.append(part)
        elif isinstance(part, MaskFunction | BlockSparse):
            if blocks is not None:
                raise InvalidInput("mask combines two block-sparse masks; expected at most one")
            blocks = part
        elif isinstance(part, Dense):
            seen = _check_dense(part.seen, extent)
            dense = seen if dense is None else dense & seen
    if extent.ragged and (
        blocks is not None or dense is not None or any(map(_per_sequence, tabled))
    ):
        raise InvalidInput(
            "mask gives tables per row or tile; expected Causal, Window or an int Prefix with packed "
            "sequences or a cache (they keep the sequences apart)"
        )
    alone = left is None and right is None and len(tabled) == 1
    for part in tabled:
        if isinstance(part, Prefix) and isinstance(part.length, int) and (alone or extent.ragged):
            if not alone:
                raise InvalidInput(
                    "mask combines Prefix with others; expected Prefix alone with packed sequences"
                )
            right, prefix = 0, part.length
        else:
            start, end = _rows(part, extent)
            row_start = start if row_start is None else torch.maximum(row_start, start)
            row_end = end if row_end is None else torch.minimum(row_end, end)
    if isinstance(blocks, MaskFunction):
        blocks = BlockSparse.from_function(
            blocks.fn,
            batch=extent.batch,
            heads=extent.heads,
            len_q=extent.len_q,
            len_k=extent.len_k,
            offset=extent.offset,
            device=extent.device,
        )
    if blocks is not None:
        _check_blocks(blocks, extent)
    return Resolved(left, right, prefix, row_start, row_end, blocks, dense)


def check_window(window: Window) -> None:
    """Refuse sides that are no numbers of keys."""
    for name, side in (("left", window.left), ("right", window.right)):
        if side is not None and not _is_count(side):
            raise InvalidInput(
                f"mask: Window has {name} = {side!r}; expected an int >= 0, or None for unbounded"
            )


def check_prefix(prefix: Prefix) -> None:
    """Refuse a length that is no number of keys; a tensor's values are not read."""
    if not isinstance(prefix.length, Tensor) and not _is_count(prefix.length):
        raise InvalidInput(
            f"mask: Prefix length is {prefix.length!r}; expected an int >= 0, or ints (B,)"
        )


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0


def _is_ints(t: Any) -> bool:
    return isinstance(t, Tensor) and not (
        t.is_floating_point() or t.is_complex() or t.dtype == torch.bool
    )


def _parts(mask: Any) -> tuple[Mask, ...]:
    if mask is None:
        return ()
    if isinstance(mask, All):
        return mask.masks
    if isinstance(mask, Mask):
        return (mask,)
    if isinstance(mask, Tensor):
        return (Dense(mask),)
    if callable(mask) and not isinstance(mask, type):
        return (MaskFunction(mask),)  # pyright: ignore[reportArgumentType]
    raise InvalidInput(
        f"mask is {_describe(mask)}; expected a mask such as Causal(), a bool tensor or a function fn(b, h, q, k)"
    )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _per_sequence(part: Prefix | Document | Runs) -> bool:
    return isinstance(part, Document | Runs) or not isinstance(part.length, int)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return f"a {type(value).__name__}"


def _positions(extent: Extent) -> Tensor:
    return torch.arange(extent.len_q, device=extent.device) + extent.offset


def _rows(part: Prefix | Document | Runs, extent: Extent) -> tuple[Tensor, Tensor]:
    """Each row's run of keys, as tables (B or 1, Lq)."""
    if isinstance(part, Prefix):
        return _prefix_rows(part, extent)
    return _document_rows(part, extent) if isinstance(part, Document) else _given_rows(part, extent)


def _given_rows(part: Runs, extent: Extent) -> tuple[Tensor, Tensor]:
    tables = []
    for name, table in (("start", part.start), ("end", part.end)):
        shapes = ((extent.len_q,), (1, extent.len_q), (extent.batch, extent.len_q))
        if not _is_ints(table) or not is_one_of(tuple(table.shape), shapes):
            raise InvalidInput(
                f"mask: Runs {name} is {_describe(table)}; expected ints {shapes[0]} or {shapes[2]}"
            )
        tables.append(table.to(extent.device, torch.int32).reshape(-1, extent.len_q))
    return tables[0], tables[1]


def _prefix_rows(part: Prefix, extent: Extent) -> tuple[Tensor, Tensor]:
    """Each row's run [0, max(own position + 1, prefix)), as tables (B or 1, Lq)."""
    length = part.length
    if isinstance(length, Tensor):
        if length.shape != (extent.batch,) or not _is_ints(length):
            raise InvalidInput(
                f"mask: Prefix length is {_describe(length)}; expected ints ({extent.batch},)"
            )
        length = length.to(extent.device)[:, None]
        end = torch.maximum(_positions(extent)[None] + 1, length)
    else:
        end = (_positions(extent)[None] + 1).clamp(min=length)
    end = end.clamp(0, extent.len_k)
    return torch.zeros_like(end, dtype=torch.int32), end.int()


def _document_rows(part: Document, extent: Extent) -> tuple[Tensor, Tensor]:
    """Each row's document [start, end), as tables (B or 1, Lq)."""
    starts = part.starts
    if (
        not _is_ints(starts)
        or starts.ndim not in (1, 2)
        or (starts.ndim == 2 and not broadcasts((starts.shape[0],), (extent.batch,)))
    ):
        raise InvalidInput(
            f"mask: Document starts is {_describe(starts)}; expected ints (n,) or ({extent.batch}, n), ascending"
        )
    starts = starts.to(extent.device).long()
    starts = starts[None] if starts.ndim == 1 else starts
    place = _positions(extent).expand(starts.shape[0], -1).contiguous()
    after = torch.searchsorted(
        starts.contiguous(), place, right=True
    )  # documents begun at or before
    edges = torch.nn.functional.pad(starts, (0, 1), value=extent.len_k).clamp(max=extent.len_k)
    edges = torch.nn.functional.pad(edges, (1, 0), value=0)
    start, end = edges.gather(1, after), edges.gather(1, (after + 1).clamp(max=edges.shape[1] - 1))
    none = after == 0
    return start.masked_fill(none, 0).int(), end.masked_fill(none, 0).int()


def _check_dense(seen: Tensor, extent: Extent) -> Tensor:
    full = (extent.batch, extent.heads, extent.len_q, extent.len_k)
    shape = (1,) * (4 - seen.ndim) + tuple(seen.shape)
    if seen.dtype != torch.bool:
        raise InvalidInput(
            f"mask has dtype {seen.dtype}; expected bool (a float mask goes to bias=)"
        )
    if not broadcasts(shape, full):
        raise InvalidInput(
            f"mask has shape {tuple(seen.shape)}; expected one that broadcasts to {full}"
        )
    if seen.device != extent.device:
        raise InvalidInput(f"mask is on {seen.device}; expected {extent.device}")
    return seen.reshape(shape)


def _check_blocks(blocks: BlockSparse, extent: Extent) -> None:
    lead = tuple(blocks.blocks.count.shape[:2])
    if blocks.shape != (extent.len_q, extent.len_k):
        raise InvalidInput(
            f"mask: BlockSparse was made for lengths {blocks.shape}; expected {(extent.len_q, extent.len_k)}"
        )
    if not broadcasts(lead, (extent.batch, extent.heads)):
        raise InvalidInput(
            f"mask: BlockSparse has {lead[0]} batches and {lead[1]} heads; "
            f"expected 1 or {extent.batch}, and 1 or {extent.heads}"
        )
    if blocks.blocks.count.device != extent.device:
        raise InvalidInput(
            f"mask: BlockSparse is on {blocks.blocks.count.device}; expected {extent.device}"
        )
