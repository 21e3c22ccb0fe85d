"""Standard attention: Algorithms 0 and 3 of FlashAttention (arXiv 2205.14135, sections 2.2 and B.4).

S and P, both N x N, are written to slow memory and read back. The products read their operands
"by blocks" as the paper says, one block of rows per operand, so that they too fit the fast memory.
"""

from __future__ import annotations

from memory import SlowMemory, blocks, ceil_div


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """Rows of the operand that stays and of the one that streams past it."""
    stay = ceil_div(M, 4 * d)
    return stay, min(stay, d)


def forward(hbm: SlowMemory, M: int, tau: float) -> None:
    """Read Q, K, V [N, d]; leave S, P [N, N] and O [N, d]."""
    N, d = hbm["Q"].shape
    hbm.create("S", N, N)
    hbm.create("P", N, N)
    hbm.create("O", N, d)

    rows_times_rows(hbm, "S", "Q", "K", M, tau)  # line 1: S = τ Q Kᵀ, write S to HBM
    for rows in blocks(N, rows_of_scores(M, N)):  # line 2: read S, P = softmax(S), write P
        with hbm.fast:
            hbm.store("P", hbm.load("S", rows).softmax(dim=1), rows)
    matrix_times_rows(hbm, "O", "P", "V", M)  # line 3: O = P V, write O to HBM


def backward(hbm: SlowMemory, M: int, tau: float) -> None:
    """Read P and dO too; leave dP, dS [N, N] and dQ, dK, dV [N, d]."""
    N, d = hbm["Q"].shape
    for name in ("dP", "dS"):
        hbm.create(name, N, N)
    for name in ("dQ", "dK", "dV"):
        hbm.create(name, N, d)

    matrix_times_rows(hbm, "dV", "P", "dO", M, transposed=True)  # line 1: dV = Pᵀ dO
    rows_times_rows(hbm, "dP", "dO", "V", M)  # line 2: dP = dO Vᵀ
    for rows in blocks(N, rows_of_scores(M, N)):  # line 3: dS = P ∘ (dP - rowsum(P ∘ dP))
        with hbm.fast:
            P, dP = hbm.load("P", rows), hbm.load("dP", rows)  # [r, N]
            dS = dP.sub_((P * dP).sum(dim=1, keepdim=True)).mul_(P)
            hbm.store("dS", dS, rows)
            del P, dP, dS
    matrix_times_rows(hbm, "dQ", "dS", "K", M, tau)  # line 4: dQ = τ dS K
    matrix_times_rows(hbm, "dK", "dS", "Q", M, tau, transposed=True)  # line 5: dK = τ dSᵀ Q


def forward_cost(N: int, d: int, M: int) -> int:
    """S is written and read, P is written and read: 4 N². K and V pass by once per block of rows."""
    T = ceil_div(N, block_sizes(M, d)[0])
    return 4 * N * N + 2 * N * d + 2 * T * N * d


def backward_cost(N: int, d: int, M: int) -> int:
    """P is read twice, dP is written and read, dS is written and read twice: 7 N²."""
    T = ceil_div(N, block_sizes(M, d)[0])
    return 7 * N * N + 4 * N * d + 4 * T * N * d


def rows_of_scores(M: int, N: int) -> int:
    """How many whole rows of an N x N matrix are worked on at once."""
    return max(1, M // (4 * N))


def rows_times_rows(
    hbm: SlowMemory, out: str, left: str, right: str, M: int, factor: float = 1.0
) -> None:
    """out [N, N] = factor * left [N, d] right [N, d]ᵀ."""
    N, d = hbm[left].shape
    stay, stream = block_sizes(M, d)
    with hbm.fast:
        for rows in blocks(N, stay):
            Li = hbm.load(left, rows)  # [stay, d]
            for cols in blocks(N, stream):
                Rj = hbm.load(right, cols)  # [stream, d]
                hbm.store(out, (Li @ Rj.T).mul_(factor), rows, cols)


def matrix_times_rows(
    hbm: SlowMemory,
    out: str,
    matrix: str,
    right: str,
    M: int,
    factor: float = 1.0,
    transposed: bool = False,
) -> None:
    """out [N, d] = factor * matrix [N, N] right [N, d], or the matrix's transpose times right."""
    N, d = hbm[right].shape
    stay, stream = block_sizes(M, d)
    with hbm.fast:
        for rows in blocks(N, stay):
            Oi = hbm[out].new_zeros(rows.stop - rows.start, d)  # [stay, d]
            for cols in blocks(N, stream):
                tile = (cols, rows) if transposed else (rows, cols)
                Mij = hbm.load(matrix, *tile)
                Rj = hbm.load(right, cols)  # [stream, d]
                Oi += (Mij.T if transposed else Mij) @ Rj
            hbm.store(out, Oi.mul_(factor), rows)
