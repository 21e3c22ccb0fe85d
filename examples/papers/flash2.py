"""FlashAttention-2 (arXiv 2307.08691): Algorithm 1 forward, Algorithm 2 backward, line by line.

Queries outside, keys inside: O_i stays in fast memory until it is done and is written once, not
yet divided by its row sum until the end. One statistic is kept, L = m + log l. The comments give
the paper's line numbers. τ is the softmax scale, which the paper leaves out.
"""

from __future__ import annotations

import torch
from memory import SlowMemory, blocks, ceil_div


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """Rows of the outer and of the inner block. The paper leaves them open; these are FA1's."""
    outer = ceil_div(M, 4 * d)
    return outer, min(outer, d)


def forward(hbm: SlowMemory, M: int, tau: float) -> None:
    """Algorithm 1. Read Q, K, V [N, d]; leave O [N, d] and L [N, 1]."""
    N, d = hbm["Q"].shape
    Br, Bc = block_sizes(M, d)
    hbm.create("O", N, d)  # line 2: room only, nothing is moved
    hbm.create("L", N, 1)

    with hbm.fast:
        for rows in blocks(N, Br):  # lines 1, 3
            Qi = hbm.load("Q", rows)  # line 4  [Br, d]
            Oi = torch.zeros_like(Qi)  # line 5
            li = Qi.new_zeros(len(Qi), 1)
            mi = Qi.new_full((len(Qi), 1), -torch.inf)
            for cols in blocks(N, Bc):  # line 6
                Kj, Vj = hbm.load("K", cols), hbm.load("V", cols)  # line 7  [Bc, d]
                Sij = (Qi @ Kj.T).mul_(tau)  # line 8  [Br, Bc]
                m_new = torch.maximum(mi, Sij.amax(dim=1, keepdim=True))  # line 9  [Br, 1]
                Pij = Sij.sub_(m_new).exp_()  # P̃ij, in the place of Sij
                decay = (mi - m_new).exp()
                li = decay * li + Pij.sum(dim=1, keepdim=True)
                Oi.mul_(decay).add_(Pij @ Vj)  # line 10
                mi = m_new
                del Kj, Vj, Sij, Pij
            Oi.div_(li)  # line 12
            hbm.store("O", Oi, rows)  # line 14
            hbm.store("L", mi + li.log(), rows)  # lines 13, 15
            del Qi, Oi


def backward(hbm: SlowMemory, M: int, tau: float) -> None:
    """Algorithm 2. Read dO and what `forward` left; leave dQ, dK, dV [N, d] and D [N, 1]."""
    N, d = hbm["Q"].shape
    Bc, Br = block_sizes(M, d)
    hbm.create("dQ", N, d, fill=0.0)  # line 3
    for name, width in (("dK", d), ("dV", d), ("D", 1)):
        hbm.create(name, N, width)

    with hbm.fast:
        for rows in blocks(N, Bc):  # line 4: D = rowsum(dO ∘ O)
            hbm.store("D", (hbm.load("dO", rows) * hbm.load("O", rows)).sum(1, True), rows)

        for cols in blocks(N, Bc):  # lines 1, 5
            Kj, Vj = hbm.load("K", cols), hbm.load("V", cols)  # line 6  [Bc, d]
            dKj, dVj = torch.zeros_like(Kj), torch.zeros_like(Vj)  # line 7
            for rows in blocks(N, Br):  # lines 2, 8
                # Line 9 also lists O_i, which nothing below reads, and dQ_i, which is line 15's.
                Qi, dOi = hbm.load("Q", rows), hbm.load("dO", rows)  # line 9  [Br, d]
                Li, Di = hbm.load("L", rows), hbm.load("D", rows)  # [Br, 1]

                Sij = (Qi @ Kj.T).mul_(tau)  # line 10  [Br, Bc]
                Pij = Sij.sub_(Li).exp_()  # line 11, in the place of Sij
                dVj += Pij.T @ dOi  # line 12
                dPij = dOi @ Vj.T  # line 13  [Br, Bc]
                dSij = dPij.sub_(Di).mul_(Pij)  # line 14, in the place of dPij
                dQi = hbm.load("dQ", rows)  # line 15  [Br, d]
                dQi += (dSij @ Kj).mul_(tau)
                hbm.store("dQ", dQi, rows)
                dKj += (dSij.T @ Qi).mul_(tau)  # line 16
                del Qi, dOi, dQi, Sij, Pij, dPij, dSij
            hbm.store("dK", dKj, cols)  # line 18
            hbm.store("dV", dVj, cols)
            del Kj, Vj, dKj, dVj


def forward_cost(N: int, d: int, M: int) -> int:
    """Elements moved: every query block loads K and V in full; Q, O, L move once."""
    Tr = ceil_div(N, block_sizes(M, d)[0])
    return 2 * N * d + N + Tr * 2 * N * d  # = 8 N²d²/M and lower terms


def backward_cost(N: int, d: int, M: int) -> int:
    """Elements moved: every key block loads Q, dO, dQ, L, D and stores dQ in full."""
    Tc = ceil_div(N, block_sizes(M, d)[0])
    delta = 2 * N * d + N  # line 4
    return delta + 5 * N * d + Tc * (4 * N * d + 2 * N)  # = 16 N²d²/M and lower terms
