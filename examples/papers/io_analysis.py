"""Measure the elements moved by three attentions and hold them against the papers' formulas.

    python examples/papers/io_analysis.py [--quick] [--out demo-out]

Each algorithm runs for real on the machine of `memory.py`, forward and backward, in fp64. Checked
on every run: output and gradients equal dense attention, the counters equal the closed formulas
beside each algorithm, and the fast memory in use stays within a fixed multiple of M. Printed and
drawn: the moves against Θ(N² d² / M) for FlashAttention and Θ(N d + N²) for standard attention.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import flash1
import flash2
import standard
import torch
from memory import SlowMemory
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

ALGORITHMS: dict[str, ModuleType] = {
    "standard": standard,
    "flash1": flash1,
    "flash2": flash2,
}

# Room in fast memory, as multiples of M. The paper sizes Q_i, K_j, V_j and O_i to fill M; the
# score tile, one product and the statistics come on top forward, and the gradients of the four
# blocks with one more tile backward. The papers say O(M): these are the constants.
FORWARD_ROOM, BACKWARD_ROOM = 2, 3

Size = tuple[int, int, int]  # N, d, M


@dataclass(frozen=True)
class Measurement:
    """What one algorithm did at one size."""

    algorithm: str
    size: Size
    forward: int  # elements moved
    backward: int
    stores_of_o: int
    forward_room: float  # most elements in fast memory at once, in units of M
    backward_room: float
    error: float  # worst difference from dense attention, over that tensor's largest entry

    @property
    def forward_ratio(self) -> float:
        """Elements moved per unit of the paper's formula."""
        return self.forward / theory(self.algorithm, self.size)

    @property
    def backward_ratio(self) -> float:
        """The same for the backward pass."""
        return self.backward / theory(self.algorithm, self.size)


def theory(algorithm: str, size: Size) -> float:
    """What stands inside Θ( ) in Theorem 2 (forward) and Theorem 5 (backward) of 2205.14135."""
    N, d, M = size
    return N * d + N * N if algorithm == "standard" else N * N * d * d / M


def dense(Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, tau: float) -> dict[str, Tensor]:
    """Output and gradients of attention as one writes it down, by autograd."""
    Q, K, V = (t.clone().requires_grad_() for t in (Q, K, V))
    O = (tau * Q @ K.T).softmax(dim=1) @ V
    dQ, dK, dV = torch.autograd.grad(O, (Q, K, V), dO)
    return {"O": O.detach(), "dQ": dQ, "dK": dK, "dV": dV}


def measure(algorithm: str, size: Size) -> Measurement:
    """Run one algorithm; raise if it is inexact, moves what it should not, or needs more room."""
    N, d, M = size
    module, tau = ALGORITHMS[algorithm], d**-0.5
    generator = torch.Generator().manual_seed(0)
    Q, K, V, dO = torch.randn(4, N, d, dtype=torch.float64, generator=generator)
    hbm = SlowMemory(capacity=FORWARD_ROOM * M, Q=Q, K=K, V=V, dO=dO)

    module.forward(hbm, M, tau)
    forward, forward_peak, stores_of_o = hbm.moved, hbm.fast.peak, hbm.stores["O"]
    hbm.fast.capacity, hbm.fast.peak = BACKWARD_ROOM * M, 0
    module.backward(hbm, M, tau)
    backward = hbm.moved - forward

    expected = dense(Q, K, V, dO, tau)
    error = max(
        ((hbm[name] - t).abs().max() / t.abs().max()).item() for name, t in expected.items()
    )
    checks = {
        # A sum of N terms in any order: at most N roundings, each of half an eps, on either side.
        f"error {error:.1e}": error <= N * torch.finfo(torch.float64).eps,
        f"forward moved {forward}": forward == module.forward_cost(N, d, M),
        f"backward moved {backward}": backward == module.backward_cost(N, d, M),
    }
    for claim, holds in checks.items():
        if not holds:
            raise AssertionError(f"{algorithm} at N, d, M = {size}: {claim} is not as expected")
    return Measurement(
        algorithm,
        size,
        forward,
        backward,
        stores_of_o,
        forward_peak / M,
        hbm.fast.peak / M,
        error,
    )


def sweeps(quick: bool) -> dict[str, list[Size]]:
    """Sizes to run: one of N, M and d varies at a time."""
    if quick:
        return {
            "N": [(N, 16, 1024) for N in (64, 128, 256)],
            "M": [(256, 16, M) for M in (512, 1024, 2048)],
        }
    return {
        "N": [(N, 32, 4096) for N in (256, 512, 1024, 2048)],
        "M": [(1024, 32, M) for M in (2048, 4096, 8192, 16384)],
        "d": [(1024, d, 8192) for d in (16, 32, 64)],
    }


def tabulate(varied: str, rows: list[Measurement]) -> Table:
    """One line per run; `ratio` is moved elements over formula, which the theorems bound."""
    title = f"Thousands of elements moved ({at_fixed(varied, rows[0].size)})"
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (varied, "forward", "ratio", "backward", "ratio", "O stored", "room / M"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, m in enumerate(rows):
        table.add_row(
            m.algorithm,
            str(m.size["NdM".index(varied)]),
            f"{m.forward / 1000:,.1f}",
            f"{m.forward_ratio:.2f}",
            f"{m.backward / 1000:,.1f}",
            f"{m.backward_ratio:.2f}",
            f"{m.stores_of_o / 1000:,.1f}",
            f"{m.forward_room:.2f}, {m.backward_room:.2f}",
            end_section=i + 1 == len(rows) or rows[i + 1].algorithm != m.algorithm,
        )
    return table


def at_fixed(varied: str, size: Size) -> str:
    """Say which of N, d, M stand still, and where."""
    return ", ".join(f"{n} = {s}" for n, s in zip("NdM", size, strict=True) if n != varied)


def draw(results: dict[str, list[Measurement]], path: Path) -> None:
    """Moves against N and against M, with the formulas as dashed lines of the same colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, varied in zip(axes, ("N", "M"), strict=True):
        column = "NdM".index(varied)
        for algorithm in ALGORITHMS:
            runs = [m for m in results[varied] if m.algorithm == algorithm]
            x = [m.size[column] for m in runs]
            (line,) = axis.loglog(x, [m.forward for m in runs], "o-", label=algorithm)
            scale = runs[-1].forward_ratio
            formula = [scale * theory(algorithm, m.size) for m in runs]
            axis.loglog(x, formula, "--", color=line.get_color(), alpha=0.6)
        axis.set_xlabel(f"{varied}   ({at_fixed(varied, runs[0].size)})")
        axis.set_xticks(x, [str(value) for value in x], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("elements moved, forward")
    axes[0].plot([], [], "k--", alpha=0.6, label="N² + Nd, N² d² / M (scaled)")
    axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Run all sweeps, print the tables and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the plot goes")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the blocks are tiny: a second thread would only wait
    console = Console()
    results = {}
    for varied, sizes in sweeps(options.quick).items():
        results[varied] = [measure(name, size) for name in ALGORITHMS for size in sizes]
        console.print(tabulate(varied, results[varied]))
    worst = max(m.error for runs in results.values() for m in runs)
    console.print(
        f"Output and gradients equal dense attention in fp64: relative error {worst:.0e}.\n"
        "Every counter equals its closed formula. Room: below 2 M forward, 3 M backward.\n"
        "Ratio: to N d + N² for standard attention, to N² d² / M for the other two.\n"
        "Its limits for large N, forward: 4 + 8 d² / M (≤ 12, as M ≥ d²), 12 + 16 / d, 8."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    draw(results, options.out / "io_analysis.png")
    console.print(f"Plot: {options.out / 'io_analysis.png'}")


if __name__ == "__main__":
    main()
