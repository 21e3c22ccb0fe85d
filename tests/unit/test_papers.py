"""examples/papers: the papers' algorithms are exact and move what their theorems say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest
import torch

PAPERS = Path(__file__).parents[2] / "examples" / "papers"
sys.path.insert(0, str(PAPERS))
memory, standard, flash1, flash2, io_analysis = (
    importlib.import_module(name)
    for name in ("memory", "standard", "flash1", "flash2", "io_analysis")
)
sys.path.remove(str(PAPERS))

ALGORITHMS = pytest.mark.parametrize(
    "algorithm", [standard, flash1, flash2], ids=lambda module: module.__name__
)
SIZES = pytest.mark.parametrize(
    ("N", "d", "M"),
    [
        (96, 16, 1024),  # Bc = d: square score tiles
        (96, 16, 2048),  # Bc > d, and the last block is shorter
        (96, 16, 512),  # Bc < d
        (100, 16, 1000),  # no block divides N, and 4d does not divide M
        (16, 16, 4096),  # one key block holds everything
        (1, 8, 128),
    ],
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The blocks are tiny; a second thread only waits, and waits long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def machine(N: int, d: int, capacity: int | None = None) -> memory.SlowMemory:
    Q, K, V, dO = torch.randn(4, N, d, dtype=torch.float64)
    return memory.SlowMemory(capacity, Q=Q, K=K, V=V, dO=dO)


def run(algorithm, hbm: memory.SlowMemory, M: int) -> None:
    tau = hbm["Q"].shape[1] ** -0.5
    algorithm.forward(hbm, M, tau)
    algorithm.backward(hbm, M, tau)


def assert_equal_to_rounding(got: torch.Tensor, expected: torch.Tensor, N: int) -> None:
    """Sums of N terms in two orders: at most N roundings of half an eps each, on either side."""
    error = (got - expected).abs().max().item()
    assert error <= N * torch.finfo(torch.float64).eps * expected.abs().max().item()


@ALGORITHMS
@SIZES
def test_output_and_gradients_equal_dense_attention(algorithm, N, d, M):
    hbm = machine(N, d)
    run(algorithm, hbm, M)
    expected = io_analysis.dense(hbm["Q"], hbm["K"], hbm["V"], hbm["dO"], d**-0.5)
    for name, tensor in expected.items():
        # One query has P = 1: its dS, dQ and dK are zero in the dense result, to rounding here.
        if N == 1 and name in ("dQ", "dK"):
            assert hbm[name].abs().max() <= 8 * torch.finfo(torch.float64).eps
        else:
            assert_equal_to_rounding(hbm[name], tensor, N)


def test_large_scores_do_not_overflow():
    hbm = machine(64, 16)
    hbm["Q"].mul_(1e4)
    for algorithm in (flash1, flash2):
        run(algorithm, hbm, 512)
        expected = (hbm["Q"] @ hbm["K"].T / 4).softmax(dim=1) @ hbm["V"]
        assert_equal_to_rounding(hbm["O"], expected, N=10**4 * 64)  # scores of 1e4 round so


@SIZES
def test_statistics_are_the_logsumexp(N, d, M):
    hbm = machine(N, d)
    expected = (hbm["Q"] @ hbm["K"].T * d**-0.5).logsumexp(dim=1, keepdim=True)
    flash1.forward(hbm, M, d**-0.5)
    assert_equal_to_rounding(hbm["m"] + hbm["l"].log(), expected, N)
    flash2.forward(hbm, M, d**-0.5)
    assert_equal_to_rounding(hbm["L"], expected, N)


@ALGORITHMS
@SIZES
def test_counters_equal_the_closed_formulas(algorithm, N, d, M):
    hbm = machine(N, d)
    algorithm.forward(hbm, M, 1.0)
    assert hbm.moved == algorithm.forward_cost(N, d, M)
    algorithm.backward(hbm, M, 1.0)
    assert hbm.moved == algorithm.forward_cost(N, d, M) + algorithm.backward_cost(N, d, M)


def test_standard_writes_and_reads_the_scores():
    N, d, M = 128, 16, 1024
    hbm = machine(N, d)
    run(standard, hbm, M)
    for name, loads in (("S", 1), ("P", 3), ("dP", 1), ("dS", 2)):
        assert hbm.stores[name] == N * N
        assert hbm.loads[name] == loads * N * N


def test_flash1_moves_o_at_each_key_block_and_flash2_once():
    N, d, M = 128, 16, 1024
    Tc = ceil(N / ceil(M / (4 * d)))
    first, second = machine(N, d), machine(N, d)
    flash1.forward(first, M, 1.0)
    flash2.forward(second, M, 1.0)

    assert first.stores["O"] == (1 + Tc) * N * d  # 1: line 2 writes the zeros
    assert first.loads["O"] == Tc * N * d
    assert first.loads["K"] == first.loads["V"] == N * d
    assert first.loads["Q"] == Tc * N * d

    assert second.stores["O"] == N * d
    assert second.loads["O"] == 0
    assert second.loads["Q"] == N * d
    assert second.loads["K"] == second.loads["V"] == Tc * N * d  # M is one and so Tr = Tc
    assert second.moved < first.moved


@ALGORITHMS
@SIZES
def test_fast_memory_stays_within_its_room(algorithm, N, d, M):
    hbm = machine(N, d, capacity=io_analysis.FORWARD_ROOM * M)  # beyond it, MemoryError
    algorithm.forward(hbm, M, 1.0)
    hbm.fast.capacity = io_analysis.BACKWARD_ROOM * M
    algorithm.backward(hbm, M, 1.0)
    assert hbm.fast.live == 0


@pytest.mark.parametrize("algorithm", [flash1, flash2], ids=["flash1", "flash2"])
def test_flash_needs_the_same_room_at_any_length(algorithm):
    peaks = set()
    for N in (64, 128, 256):
        hbm = machine(N, 16)
        run(algorithm, hbm, 1024)
        peaks.add(hbm.fast.peak)
    assert len(peaks) == 1


@ALGORITHMS
def test_too_little_room_is_refused(algorithm):
    hbm = machine(64, 16, capacity=256)
    with pytest.raises(MemoryError, match="room for 256"):
        algorithm.forward(hbm, 1024, 1.0)


@pytest.mark.parametrize(
    ("algorithm", "forward", "backward"), [(flash1, 12, 20), (flash2, 8, 16)], ids=["one", "two"]
)
def test_flash_moves_a_constant_times_the_theorem(algorithm, forward, backward):
    d = 64
    for N in (1 << 14, 1 << 16, 1 << 18):
        for M in (1 << 12, 1 << 14, 1 << 16):
            theory = N * N * d * d / M
            low = 4 * M / (N * d) + 16 / d  # single passes over N d, and the vectors of length N
            assert 0 <= algorithm.forward_cost(N, d, M) / theory - forward <= low
            assert 0 <= algorithm.backward_cost(N, d, M) / theory - backward <= 4 * low


def test_standard_moves_a_constant_times_the_theorem():
    d = 64
    for N in (1 << 14, 1 << 16, 1 << 18):
        for M in (1 << 12, 1 << 14, 1 << 16):  # from d² on
            theory = N * N + N * d
            assert 3.9 <= standard.forward_cost(N, d, M) / theory <= 12
            assert 6.9 <= standard.backward_cost(N, d, M) / theory <= 23


@pytest.mark.parametrize("algorithm", [flash1, flash2], ids=["one", "two"])
def test_measured_moves_scale_as_the_theorem(algorithm):
    def moved(N, M):
        hbm = machine(N, 16)
        algorithm.forward(hbm, M, 1.0)
        return hbm.moved

    assert moved(128, 512) == pytest.approx(4 * moved(64, 512), rel=0.1)  # N²
    assert moved(128, 512) == pytest.approx(2 * moved(128, 1024), rel=0.1)  # 1 / M


def test_fast_memory_counts_what_is_alive():
    fast = memory.FastMemory()
    outside = torch.ones(5, 2)
    with fast:
        a = outside * 2
        assert fast.live == 10
        a.add_(1)
        view = a.T[0]
        assert fast.live == 10  # neither in-place work nor a view takes room
        b = a @ a.T
        assert fast.live == 35
        del a, b
        assert fast.live == 10  # the view keeps its tensor
        del view
    assert (fast.live, fast.peak) == (0, 35)


def test_the_script_prints_and_draws(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    sizes = {"N": [(64, 16, 1024), (128, 16, 1024)], "M": [(64, 16, 1024), (64, 16, 512)]}
    monkeypatch.setattr(io_analysis, "sweeps", lambda quick: sizes)
    io_analysis.main(["--out", str(tmp_path)])
    assert (tmp_path / "io_analysis.png").stat().st_size > 10_000
    assert "flash2" in capsys.readouterr().out


def test_a_wrong_count_is_reported(monkeypatch):
    monkeypatch.setattr(flash2, "forward_cost", lambda N, d, M: 0)
    with pytest.raises(AssertionError, match="forward moved"):
        io_analysis.measure("flash2", (64, 16, 1024))
