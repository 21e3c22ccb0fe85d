"""Ulysses (DeepSpeed, arXiv 2309.14509): trade tokens for heads by an all-to-all; a rank then has all tokens of some.

GQA with fewer kv heads than ranks: each rank gets the kv heads its query heads need, so some travel to several ranks,
and their gradients are summed where they come home.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from relampago.distributed.layouts import Layout
from relampago.distributed.transport import Program, Shape, Transport
from relampago.problem import accumulate_dtype


class Split(NamedTuple):
    """How heads are dealt to `size` ranks. Each gets heads_q / size query heads, in groups that share a kv head."""

    heads_q: int
    heads_kv: int
    size: int

    @property
    def group(self) -> int:
        """Query heads that share a kv head on a rank."""
        return math.gcd(self.heads_q // self.size, self.heads_q // self.heads_kv)

    def queries(self, rank: int) -> list[int]:
        """The query heads of a rank."""
        own = self.heads_q // self.size
        return list(range(rank * own, (rank + 1) * own))

    def keys(self, rank: int) -> list[int]:
        """The kv heads of a rank, one for each of its groups: one head twice where groups were cut."""
        return [h * self.heads_kv // self.heads_q for h in self.queries(rank)[:: self.group]]

    @property
    def shared(self) -> bool:
        """Whether some kv head goes to several places, so that its gradients must be summed."""
        return self.group * self.heads_kv < self.heads_q

    def of(self, kind: str, rank: int) -> list[int]:
        """`queries` or `keys`."""
        return self.queries(rank) if kind == "q" else self.keys(rank)


@dataclass(frozen=True)
class Exchange:
    """The all-to-all of one group of ranks: member i holds `counts[i]` tokens; `order` sorts all of them."""

    link: Transport
    split: Split
    counts: tuple[int, ...]
    order: Tensor  # where the token at each place of the joint sequence lies in the members' tokens, one after another
    step: str

    @staticmethod
    def of(
        layout: Layout,
        link: Transport,
        context_rank: int,
        split: Split,
        device: torch.device,
        step: str,
    ) -> Exchange:
        """For the group with this rank in the context."""
        counts, order = _sorting(layout, link.size, context_rank, device)
        return Exchange(link, split, counts, order, step)

    def scatter(self, name: str, *tensors: tuple[str, Tensor]) -> Program:
        """(kind, (B, L, all heads, W)) to (B, all tokens, own heads · W), all tensors side by side in one message."""
        sends = [
            torch.cat([_heads(t, self.split.of(kind, peer)).flatten(2) for kind, t in tensors], -1)
            for peer in range(self.link.size)
        ]
        batch, width, dtype = sends[0].shape[0], sends[0].shape[2], sends[0].dtype
        receives = [Shape((batch, n, width), dtype) for n in self.counts]
        arrived = yield self.link.all_to_all(sends, receives, f"{self.step}, {name} to heads")
        return torch.cat(arrived, 1).index_select(1, self.order)

    def parts(self, joint: Tensor, *widths: tuple[str, int]) -> list[Tensor]:
        """What `scatter` joined: (kind, W) each, as views (B, tokens, own heads, W)."""
        own = [(len(self.split.of(kind, self.link.rank)), width) for kind, width in widths]
        found = joint.split([heads * width for heads, width in own], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(found, own, strict=True)]

    def gather(self, name: str, kind: str, tensor: Tensor) -> Program:
        """(B, all tokens, own heads, W) to (B, L, all heads, W); kv heads that were in several places are summed."""
        unsorted = torch.empty_like(tensor)
        unsorted[:, self.order] = tensor
        sends = [part.flatten(2) for part in unsorted.split(self.counts, 1)]
        batch, width = tensor.shape[0], tensor.shape[3]
        count = self.counts[self.link.rank]
        places = [self.split.of(kind, peer) for peer in range(self.link.size)]
        receives = [Shape((batch, count, len(p) * width), tensor.dtype) for p in places]
        arrived = yield self.link.all_to_all(sends, receives, f"{self.step}, {name} to tokens")
        found = torch.cat([t.unflatten(2, (-1, width)) for t in arrived], 2)
        if kind == "q" or not self.split.shared:
            return found
        index = torch.tensor([h for p in places for h in p], device=tensor.device)
        shape = (batch, count, self.split.heads_kv, width)
        wide = accumulate_dtype(tensor.dtype)
        return torch.zeros(shape, dtype=wide, device=tensor.device).index_add_(
            2, index, found.to(wide)
        )


@functools.lru_cache(maxsize=64)
def _sorting(
    layout: Layout, size: int, context_rank: int, device: torch.device
) -> tuple[tuple[int, ...], Tensor]:
    """Tokens of each member of a group, and what sorts them; kept on the device, since a copy would wait for it."""
    members = [layout.positions(context_rank * size + i) for i in range(size)]
    return tuple(m.numel() for m in members), torch.cat(members).argsort().to(device)


def _heads(tensor: Tensor, heads: list[int]) -> Tensor:
    """Heads of (B, L, H, W); a view where they are neighbours."""
    if heads == list(range(heads[0], heads[0] + len(heads))):
        return tensor[:, :, heads[0] : heads[0] + len(heads)]
    return tensor[:, :, heads]
