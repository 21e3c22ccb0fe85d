"""What an attention call costs: visible pairs, FLOPs, and the bytes the papers count.

FLOPs as FlashAttention-2 counts them (arXiv 2307.08691, section 4.1): two products forward, five backward, over the
pairs that the band shows. Bytes: standard attention also moves S and P (arXiv 2205.14135, Theorem 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from relampago.masks.rules import key_range
from relampago.problem import Facts


@dataclass(frozen=True)
class Work:
    """The work of one call.

    Args:
        pairs: visible (row, key) pairs, all batches and query heads.
        rows: query rows, all batches and query heads.
        keys: keys, all batches and kv heads.
        dim: head dim of q and k.
        dim_v: head dim of v.
        scores: entries of the N×N matrices that standard attention writes, hidden ones too.
    """

    pairs: int
    rows: int
    keys: int
    dim: int
    dim_v: int
    scores: int

    @staticmethod
    def of_shapes(q, k, v, sizes: tuple[int, int, int], facts: Facts) -> Work:
        """From shapes as the op gets them. Packed sequences count as equally long; tables and tiles as full."""
        packed = len(q) == 3
        batch, len_q, len_k = (1, q[0], k[0]) if packed else (q[0], q[1], k[1])
        if packed:  # lengths are data; take the longest
            batch, len_q, len_k = max(1, q[0] // max(1, sizes[1])), sizes[1], sizes[2]
        heads, kv_heads = q[-2], k[-2]
        offset = sizes[0] + (len_k - len_q if packed else 0)
        per_head = visible_pairs(len_q, len_k, offset, facts)
        return Work(
            pairs=per_head * batch * heads,
            rows=batch * heads * len_q,
            keys=batch * kv_heads * len_k,
            dim=q[-1],
            dim_v=v[-1],
            scores=batch * heads * len_q * len_k,
        )

    @property
    def forward_flops(self) -> int:
        """Q·Kᵀ and P·V."""
        return 2 * self.pairs * (self.dim + self.dim_v)

    @property
    def backward_flops(self) -> int:
        """S again, dP, dV, dK, dQ."""
        return 2 * self.pairs * (3 * self.dim + 2 * self.dim_v)

    def tangent_flops(self, q: bool, k: bool, v: bool) -> int:
        """The forward's, and along tangents of q, k and v: Q̇·Kᵀ, Q·K̇ᵀ, (P∘Ṡ)·V and P·V̇."""
        return self.forward_flops + 2 * self.pairs * (self.dim * (q + k) + self.dim_v * (1 + v))

    def backward_tangent_flops(self, q: bool, k: bool, v: bool, dout: bool) -> int:
        """S, dP, tdS·K, tdSᵀ·Q and ṖᵀdO; two more products for each tangent of q, k, v and dO."""
        moved = 2 * self.dim * (q + k) + self.dim_v * (v + 2 * dout)
        return self.backward_flops + 2 * self.pairs * moved

    def flash_bytes(self, itemsize: int) -> int:
        """Forward, each tensor once: q, k, v, out, LSE."""
        wide = self.dim + self.dim_v
        return itemsize * wide * (self.rows + self.keys) + 4 * self.rows

    def standard_bytes(self, itemsize: int) -> int:
        """Forward with S and P each written and read."""
        return self.flash_bytes(itemsize) - 4 * self.rows + 4 * itemsize * self.scores

    def flash_backward_bytes(self, itemsize: int) -> int:
        """Backward, each tensor once: q, k, v, out, dout, LSE in; dq, dk, dv out."""
        inputs = self.dim * (self.rows + self.keys) + self.dim_v * self.keys
        return itemsize * (2 * inputs + 2 * self.dim_v * self.rows) + 4 * self.rows

    def standard_backward_bytes(self, itemsize: int) -> int:
        """Backward by Algorithm 3 of arXiv 2205.14135: P read twice, dP written and read, dS written, read twice."""
        once = (
            self.flash_backward_bytes(itemsize) - 4 * self.rows - itemsize * self.dim_v * self.rows
        )
        return once + 7 * itemsize * self.scores

    def flash_extra_memory(self) -> int:
        """Bytes held besides inputs and output: the LSE."""
        return 4 * self.rows

    def standard_extra_memory(self, itemsize: int) -> int:
        """Bytes held besides inputs and output: S and P."""
        return 2 * itemsize * self.scores


def visible_pairs(len_q: int, len_k: int, offset: int, facts: Facts) -> int:
    """Pairs that a band shows: a sum over rows, O(Lq), without tensors."""
    if facts.left is None and facts.right is None:
        return len_q * len_k
    total = 0
    for row in range(len_q):
        start, end = key_range(row, row, len_k, offset, facts.left, facts.right, facts.prefix)
        total += max(0, end - start)
    return total
