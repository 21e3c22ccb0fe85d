"""Decoding over a KV cache that is spread over ranks: each attends to its share, LSE merges the shares.

Tokens are dealt out in turns of `interleave`: position p lies on rank (p // interleave) mod P, so that every rank's
share grows alike. Queries are the same on all ranks. What travels does not depend on the length of the cache: the
fp32 outputs and LSE of the new rows, once around.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relampago.cache import KVCache
from relampago.distributed.accumulate import Output
from relampago.distributed.transport import (
    Alone,
    GroupTransport,
    Program,
    Transport,
    check_group,
    drive,
)
from relampago.errors import InvalidInput, Unsupported
from relampago.lower import prepare
from relampago.merge import merge
from relampago.op import forward_op
from relampago.options import Options


class ShardedKVCache:
    """One rank's share of a cache. Lengths are of the whole sequences, the same on all ranks, kept without messages.

    Args:
        cache: a `KVCache` or `PagedKVCache` for this rank's share: room for length / P + interleave tokens.
        group: a ProcessGroup; a transport of virtual ranks; or None for one rank.
        interleave: tokens dealt to a rank at a time.
        timeout: seconds to wait for another rank.
    """

    def __init__(
        self, cache: KVCache, group: Any = None, *, interleave: int = 1, timeout: float = 600.0
    ) -> None:
        if not isinstance(cache, KVCache):
            raise InvalidInput(
                f"cache is a {type(cache).__name__}; expected a KVCache or PagedKVCache"
            )
        if not isinstance(interleave, int) or interleave < 1:
            raise InvalidInput(f"interleave is {interleave!r}; expected an int >= 1")
        if group is None:
            link: Transport = Alone()
        elif isinstance(group, dist.ProcessGroup):
            link = GroupTransport(check_group(group), timeout)
        else:
            link = group
        self.cache, self.link, self.interleave = cache, link, interleave
        self.lengths = cache.lengths.clone()
        self._bounds = [0] * cache.batch

    def held(self, lengths: Tensor) -> Tensor:
        """How many of the first `lengths` tokens lie on this rank."""
        turn = self.interleave * self.link.size
        rest = (lengths % turn - self.link.rank * self.interleave).clamp(0, self.interleave)
        return lengths // turn * self.interleave + rest

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Add tokens (B, n, G, D) and (B, n, G, E), given alike on all ranks: each keeps its own.

        Args:
            k: keys of the new tokens.
            v: their values.
            counts: int32 (B,): how many of the n each sequence gets; all if None.

        Raises:
            InvalidInput: as `KVCache.append`; nothing is written then.
        """
        n = k.shape[1]
        real = torch.full_like(self.lengths, n) if counts is None else counts
        step = torch.arange(n, device=k.device)
        place = self.lengths[:, None] + step
        owner = place // self.interleave % self.link.size
        mine = (owner == self.link.rank) & (step < real[:, None])
        turns = -(-n // (self.interleave * self.link.size)) + 1
        most = min(n, turns * self.interleave)  # of n neighbours, no rank gets more
        order = torch.sort(mine.int(), stable=True, dim=1, descending=True).indices[
            :, :most, None, None
        ]
        picked = [t.gather(1, order.expand(-1, -1, *t.shape[2:])) for t in (k, v)]
        self.cache.append(picked[0], picked[1], mine.sum(1, dtype=torch.int32))
        self.lengths += real.to(self.lengths.dtype)
        self._bounds = [bound + n for bound in self._bounds]
        self.cache.bound([int(self.held(torch.tensor(bound))) for bound in self._bounds])


def attention_decode(
    q: Tensor,
    cache: ShardedKVCache,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **other: Any,
) -> Any:
    """`relampago.attention_decode` over a sharded cache. All ranks give the same q and new tokens, and get the same.

    Args:
        q: (B, Lq, H, D); row i of sequence b stands at position lengths[b] - Lq + i, after appending.
        cache: this rank's `ShardedKVCache`.
        k_new: (B, n, G, D), appended first; or None.
        v_new: (B, n, G, E).
        counts: int32 (B,): how many of the n each sequence gets.
        causal: whether rows see no later keys. With Lq rows, each is one local call.
        scale: as in `relampago.attention`.
        softcap: likewise.
        sinks: (H,).
        return_lse: also return LSE (B, H, Lq).
        backend: of the kernels.

    Returns:
        out (B, Lq, H, E), or (out, lse).

    Raises:
        InvalidInput: an argument is wrong, or the cache is full; nothing was appended then.
        Unsupported: windows (keep such layers' small caches whole on every rank), masks, score mods.
        RankFailure: another rank died or hung.
    """
    program = decode_program(
        q, cache, k_new, v_new, counts, causal, (scale, softcap, backend), sinks, other
    )
    out, lse = drive(program)
    return (out, lse) if return_lse else out


def decode_program(
    q: Tensor,
    cache: ShardedKVCache,
    k_new: Tensor | None,
    v_new: Tensor | None,
    counts: Tensor | None,
    causal: bool,
    scores: tuple[float | None, float | None, str | None],
    sinks: Tensor | None,
    other: dict[str, Any],
) -> Program:
    """`attention_decode` as a strategy, for process groups and virtual ranks."""
    if unknown := sorted(name for name, value in other.items() if value is not None):
        raise Unsupported(f"{', '.join(unknown)}: decoding over several ranks does not know it")
    if (k_new is None) != (v_new is None):
        raise InvalidInput(
            "v_new is given without k_new, or k_new without it; expected both or neither"
        )
    options = Options(scale=scores[0], softcap=scores[1], backend=scores[2])
    prepare(q, cache.cache.k, cache.cache.v, options._replace(sinks=sinks), cache=cache.cache)
    if k_new is not None and v_new is not None:
        cache.append(k_new, v_new, counts)
    out, lse = _local(q, cache, options, causal)
    mine = torch.cat([out, lse.transpose(1, 2)[..., None]], -1)
    (every,) = yield cache.link.all_gather(mine, "decode")
    return _merged(q, every, sinks)


@torch.no_grad()
def _merged(q: Tensor, every: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of all ranks' shares, the whole; the sinks once."""
    parts = [(part[..., :-1], part[..., -1].transpose(1, 2)) for part in every]
    total = Output(q, every.shape[-1] - 1)
    total.start(*merge(*parts))
    return total.finish(sinks, q.dtype)


@torch.no_grad()
def _local(
    q: Tensor, cache: ShardedKVCache, options: Options, causal: bool
) -> tuple[Tensor, Tensor]:
    """This rank's share, in fp32. What a row may see of a share is a length, so causal rows go one by one."""
    call = prepare(q, cache.cache.k, cache.cache.v, options, cache=cache.cache, shard=True)
    if not causal or q.shape[1] == 1:
        return forward_op(*call)
    rows = []
    for i in range(q.shape[1]):
        seen = (cache.lengths - (q.shape[1] - 1 - i)).clamp(min=0)
        row = prepare(
            q[:, i : i + 1], cache.cache.k, cache.cache.v, options, cache=cache.cache, shard=True
        )
        rows.append(forward_op(*row._replace(lens_k=cache.held(seen).int())))
    return torch.cat([out for out, _ in rows], 1), torch.cat([lse for _, lse in rows], 2)
