"""BlockSparse: which tiles of keys each tile of queries sees, and the pattern inside the partial ones.

The escape hatch for masks that are not one run of keys per row. A tile is skipped, full, or partial; only partial
tiles carry booleans, so memory follows the mask's own information and never the whole N×N matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.errors import InvalidInput, Unsupported
from relampago.masks.spec import Mask
from relampago.shapes import broadcasts

FULL = -1  # in `Blocks.pattern`: the whole tile is visible


class Blocks(NamedTuple):
    """The tensors that kernels read; the same lists twice, by query tile and by key tile."""

    count: Tensor  # int32 (B or 1, H or 1, NQ): key tiles that a query tile sees
    index: Tensor  # int32 (B or 1, H or 1, NQ, most): which, ascending
    pattern: Tensor  # int32, like index: FULL, or a row of `tiles`
    q_count: Tensor  # int32 (B or 1, H or 1, NK): query tiles that see a key tile
    q_index: Tensor  # int32 (B or 1, H or 1, NK, most)
    q_pattern: Tensor
    tiles: Tensor  # bool (n, block_q, block_k): the patterns of partial tiles


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """A mask by tiles. Build it with `from_function`, `from_mask` or `from_tiles`, once, outside of the hot loop.

    Args:
        blocks: the lists of tiles.
        block: (queries, keys) of one tile.
        shape: (len_q, len_k) of the problem it was made for.
    """

    blocks: Blocks
    block: tuple[int, int]
    shape: tuple[int, int]

    @staticmethod
    def from_tiles(
        kinds: Tensor, *, shape: tuple[int, int], block: tuple[int, int] = (128, 128)
    ) -> BlockSparse:
        """From a boolean map of tiles (…, NQ, NK) with up to two leading dimensions (batch, heads): True is full."""
        return _build(_four_dims(kinds.bool()), None, None, block, shape)

    @staticmethod
    def from_mask(mask: Tensor, *, block: tuple[int, int] = (128, 128)) -> BlockSparse:
        """From a dense boolean mask (…, Lq, Lk), True where a key is visible."""
        dense = _four_dims(mask)

        def strip(start: int, stop: int) -> Tensor:
            return dense[:, :, start:stop]

        return _from_strips(strip, (dense.shape[2], dense.shape[3]), block)

    @staticmethod
    def from_function(
        fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        *,
        batch: int,
        heads: int,
        len_q: int,
        len_k: int,
        offset: int | None = None,
        block: tuple[int, int] = (128, 128),
        device: torch.device | str = "cpu",
    ) -> BlockSparse:
        """From `fn(b, h, q, k) -> bool`, which gets broadcasting int64 index tensors.

        q is the row's position among the keys (row + offset; offset defaults to len_k - len_q, so that the last
        row is the last key). A function that ignores b or h costs nothing for that dimension.
        """
        if torch.compiler.is_compiling():
            raise Unsupported(
                "a mask function inside a graph of torch.compile; make a BlockSparse of it outside"
            )
        offset = len_k - len_q if offset is None else offset
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(1, -1, 1, 1)
        k = torch.arange(len_k, device=device).view(1, 1, 1, -1)

        def strip(start: int, stop: int) -> Tensor:
            q = torch.arange(start, stop, device=device).view(1, 1, -1, 1) + offset
            seen = fn(b, h, q, k)
            if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
                got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
                raise InvalidInput(f"mask: the function returned {got}; expected a bool tensor")
            full = (batch, heads, stop - start, len_k)
            if not broadcasts((1,) * (4 - seen.ndim) + tuple(seen.shape), full):
                raise InvalidInput(
                    f"mask: the function returned shape {tuple(seen.shape)}; expected one that broadcasts to {full}"
                )
            while seen.ndim < 4:
                seen = seen.unsqueeze(0)
            return seen.expand(*seen.shape[:2], stop - start, len_k)

        return _from_strips(strip, (len_q, len_k), block)


def _four_dims(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool or not 2 <= mask.ndim <= 4:
        raise InvalidInput(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected bool (…, Lq, Lk) of 2 to 4 dimensions"
        )
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _from_strips(
    strip: Callable[[int, int], Tensor], shape: tuple[int, int], block: tuple[int, int]
) -> BlockSparse:
    """Classify tiles one strip of queries at a time, so that memory stays O(N)."""
    len_q, len_k = shape
    block_q, block_k = block
    kinds, partial, tiles = [], [], []
    for start in range(0, len_q, block_q):
        seen = strip(start, min(start + block_q, len_q))
        rows = seen.shape[2]
        padded = torch.nn.functional.pad(seen, (0, -len_k % block_k, 0, block_q - rows))
        grid = padded.unflatten(3, (-1, block_k)).transpose(2, 3)  # [B, H, NK, BQ, BK]
        inside = torch.ones(rows, len_k, dtype=torch.bool, device=seen.device)
        inside = torch.nn.functional.pad(inside, (0, -len_k % block_k, 0, block_q - rows))
        inside = inside.unflatten(1, (-1, block_k)).transpose(0, 1)  # [NK, BQ, BK]
        some = grid.flatten(3).any(-1)
        whole = (grid | ~inside).flatten(3).all(-1)
        kinds.append(some)
        partial.append(some & ~whole)
        tiles.append(grid[some & ~whole])
    if not kinds:
        empty = torch.zeros(1, 1, 0, -(-len_k // block_k), dtype=torch.bool)
        return _build(empty, None, None, block, shape)
    return _build(torch.stack(kinds, 2), torch.stack(partial, 2), tiles, block, shape)


def _build(
    kinds: Tensor,
    partial: Tensor | None,
    tiles: list[Tensor] | None,
    block: tuple[int, int],
    shape: tuple[int, int],
) -> BlockSparse:
    expected = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if tuple(kinds.shape[2:]) != expected:
        raise InvalidInput(
            f"mask: the map of tiles is {tuple(kinds.shape[2:])}; "
            f"expected {expected} for lengths {shape} and block {block}"
        )
    if tiles is None or partial is None:
        pattern = torch.full(kinds.shape, FULL, dtype=torch.int32, device=kinds.device)
        rows = torch.zeros((1, *block), dtype=torch.bool, device=kinds.device)
    else:
        rows = torch.cat(tiles)
        # tiles were gathered strip by strip: number them in the order (query tile, batch, head, key tile)
        order = partial.permute(2, 0, 1, 3)
        number = order.flatten().cumsum(0).sub_(1).view(order.shape).permute(1, 2, 0, 3)
        pattern = torch.where(partial, number, FULL).int()
        if rows.shape[0] == 0:
            rows = torch.zeros((1, *block), dtype=torch.bool, device=kinds.device)
    by_query = _lists(kinds, pattern)
    by_key = _lists(kinds.transpose(2, 3), pattern.transpose(2, 3))
    return BlockSparse(Blocks(*by_query, *by_key, rows), block, shape)


def _lists(kinds: Tensor, pattern: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending lists of the True entries of the last dimension, padded to the longest."""
    count = kinds.sum(-1, dtype=torch.int32)
    most = max(1, int(count.max())) if count.numel() else 1
    order = torch.argsort(~kinds, dim=-1, stable=True)[..., :most]
    if order.shape[-1] < most:
        order = torch.nn.functional.pad(order, (0, most - order.shape[-1]))
        pattern = torch.nn.functional.pad(pattern, (0, 1))
    return count, order.int().contiguous(), pattern.gather(-1, order).contiguous()
