"""FlashAttention (arXiv 2205.14135): Algorithm 1 forward, Algorithm 4 backward, line by line.

Keys outside, queries inside: each O_i returns to slow memory with its statistics l_i, m_i after
every key block, and is loaded again at the next. Read it beside the paper; the comments give its
line numbers. τ is the softmax scale. Masking and dropout (Algorithms 2 and 4) are left out.
"""

from __future__ import annotations

import torch
from memory import SlowMemory, blocks, ceil_div


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """Bc, Br of line 1: Q_i, K_j, V_j, O_i take M together; S_ij and temporaries come on top."""
    Bc = ceil_div(M, 4 * d)
    return Bc, min(Bc, d)


def forward(hbm: SlowMemory, M: int, tau: float) -> None:
    """Algorithm 1. Read Q, K, V [N, d]; leave O [N, d] and l, m [N, 1]."""
    N, d = hbm["Q"].shape
    Bc, Br = block_sizes(M, d)  # line 1
    hbm.create("O", N, d, fill=0.0)  # line 2
    hbm.create("l", N, 1, fill=0.0)
    hbm.create("m", N, 1, fill=-torch.inf)

    with hbm.fast:
        for cols in blocks(N, Bc):  # lines 3, 5
            Kj, Vj = hbm.load("K", cols), hbm.load("V", cols)  # line 6  [Bc, d]
            for rows in blocks(N, Br):  # lines 4, 7
                Qi, Oi = hbm.load("Q", rows), hbm.load("O", rows)  # line 8  [Br, d]
                li, mi = hbm.load("l", rows), hbm.load("m", rows)  # [Br, 1]

                Sij = (Qi @ Kj.T).mul_(tau)  # line 9  [Br, Bc]
                m_tile = Sij.amax(dim=1, keepdim=True)  # line 10  m̃ij [Br, 1]
                Pij = Sij.sub_(m_tile).exp_()  # P̃ij, in the place of Sij
                l_tile = Pij.sum(dim=1, keepdim=True)

                m_new = torch.maximum(mi, m_tile)  # line 11
                old = (mi - m_new).exp() * li
                new = (m_tile - m_new).exp()
                l_new = old + new * l_tile

                Oi.mul_(old).add_((Pij @ Vj).mul_(new)).div_(l_new)  # line 12
                hbm.store("O", Oi, rows)
                hbm.store("l", l_new, rows)  # line 13
                hbm.store("m", m_new, rows)
                del Qi, Oi, Sij, Pij


def backward(hbm: SlowMemory, M: int, tau: float) -> None:
    """Algorithm 4. Read dO and what `forward` left; leave dQ, dK, dV [N, d]."""
    N, d = hbm["Q"].shape
    Bc, Br = block_sizes(M, d)  # line 2
    for name in ("dQ", "dK", "dV"):  # line 5
        hbm.create(name, N, d, fill=0.0)

    with hbm.fast:
        for cols in blocks(N, Bc):  # lines 3, 6
            Kj, Vj = hbm.load("K", cols), hbm.load("V", cols)  # line 7  [Bc, d]
            dKj, dVj = torch.zeros_like(Kj), torch.zeros_like(Vj)  # line 8
            for rows in blocks(N, Br):  # lines 4, 9
                Qi, Oi = hbm.load("Q", rows), hbm.load("O", rows)  # line 10  [Br, d]
                dOi, dQi = hbm.load("dO", rows), hbm.load("dQ", rows)
                li, mi = hbm.load("l", rows), hbm.load("m", rows)  # [Br, 1]

                Sij = (Qi @ Kj.T).mul_(tau)  # line 11  [Br, Bc]
                Pij = Sij.sub_(mi).exp_().div_(li)  # line 13, in the place of Sij
                dVj += Pij.T @ dOi  # line 16
                dPij = dOi @ Vj.T  # line 17  [Br, Bc]
                Di = Oi.mul_(dOi).sum(dim=1, keepdim=True)  # line 19  [Br, 1]
                dSij = dPij.sub_(Di).mul_(Pij)  # line 20, in the place of dPij
                dQi += (dSij @ Kj).mul_(tau)  # line 21
                hbm.store("dQ", dQi, rows)
                dKj += (dSij.T @ Qi).mul_(tau)  # line 22
                del Qi, Oi, dOi, dQi, Sij, Pij, dPij, dSij
            hbm.store("dK", dKj, cols)  # line 24
            hbm.store("dV", dVj, cols)
            del Kj, Vj, dKj, dVj


def forward_cost(N: int, d: int, M: int) -> int:
    """Elements moved: every key block loads Q and loads and stores O, l, m in full."""
    Tc = ceil_div(N, block_sizes(M, d)[0])
    initial = N * d + 2 * N  # line 2
    return initial + 2 * N * d + Tc * (3 * N * d + 4 * N)  # = 12 N²d²/M and lower terms


def backward_cost(N: int, d: int, M: int) -> int:
    """Elements moved: every key block loads Q, O, dO, dQ, l, m and stores dQ in full."""
    Tc = ceil_div(N, block_sizes(M, d)[0])
    initial = 3 * N * d  # line 5
    return initial + 4 * N * d + Tc * (5 * N * d + 2 * N)  # = 20 N²d²/M and lower terms
