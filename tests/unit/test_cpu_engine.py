"""The CPU engine's manners: global switches restored, threads that fork, memory that does not grow as N²."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import relampago as rl
from relampago.backends.cpu import precision, threads, tile


def mode() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def switch(monkeypatch):
    """As on a machine where the fast product passes its self-check."""
    monkeypatch.setattr(precision, "available", lambda: True)


def test_the_switch_is_restored(switch) -> None:
    before = mode()
    with precision.fast_fp32():
        assert mode() == "bf16"
        with precision.fast_fp32():
            assert mode() == "bf16"
        assert mode() == "bf16"
    assert mode() == before
    with pytest.raises(RuntimeError, match="inside"), precision.fast_fp32():
        raise RuntimeError("inside")
    assert mode() == before


def test_the_switch_is_restored_with_overlapping_users(switch) -> None:
    before = mode()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with precision.fast_fp32():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with precision.fast_fp32():
        thread.start()
        inside.wait(10)
    assert mode() == "bf16"  # the other is still inside
    leave.set()
    thread.join()
    assert mode() == before


def test_the_switch_can_be_turned_off(monkeypatch) -> None:
    monkeypatch.setenv("RELAMPAGO_CPU_FAST_FP32", "0")
    precision.available.cache_clear()
    try:
        with precision.fast_fp32():
            assert mode() != "bf16"
    finally:
        precision.available.cache_clear()


def test_attention_leaves_global_state_alone() -> None:
    before = (mode(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state())
    q = torch.randn(1, 300, 4, 16, requires_grad=True)
    rl.attention(q, q, q, causal=True).sum().backward()
    after = (mode(), torch.get_num_threads(), torch.is_grad_enabled())
    assert after == before[:3]
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [torch.get_num_threads()], "a new thread inherited the workers' setting"


def test_concurrent_callers_get_their_own_results() -> None:
    inputs = [torch.randn(1, 200, 2, 16) for _ in range(6)]
    want = [rl.attention(q, q, q, causal=True) for q in inputs]
    got: list[torch.Tensor | None] = [None] * 6

    def work(i: int) -> None:
        for _ in range(5):
            got[i] = rl.attention(inputs[i], inputs[i], inputs[i], causal=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_can_attend() -> None:
    code = """
import os, torch, relampago as rl
q = torch.randn(1, 700, 4, 16)
rl.attention(q, q, q)
pid = os.fork()
if pid == 0:
    torch.set_num_threads(1)
    rl.attention(q, q, q)
    os._exit(7)
raise SystemExit(0 if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 else 1)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120)
    assert done.returncode == 0


# Not ru_maxrss: a child inherits the greatest size of the process that started it, which may be larger than its own.
MEMORY = """
import torch, relampago as rl
from relampago.cli.memory import growth
torch.manual_seed(0)
n = {n}
q, k, v = (torch.randn(1, n, 2, 32, requires_grad=True) for _ in range(3))
small = torch.randn(1, 64, 2, 32, requires_grad=True)
def step(q, k, v):
    rl.attention(q, k, v, causal=True, backend="{backend}").sum().backward()
print(growth(lambda: step(small, small, small), lambda: step(q, k, v)))
"""


def growth(n: int, backend: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(n=n, backend=backend)],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="measured as Linux measures it"
)
def test_no_n_by_n_array_forward_or_backward() -> None:
    n, few = 6144, 2048
    matrix = 2 * n * n * 4  # the scores of 2 heads in fp32: 302 MB
    assert growth(n, "cpu") < matrix / 3
    assert growth(few, "reference") > 2 * few * few * 4  # so the measurement would see one


def test_workers_run_single_threaded_operators() -> None:
    """torch hands a thread's first operator the process's number of threads: it must have been asked before."""
    workers = threads._start(2)
    try:
        for _ in range(2):
            numbers = [workers.submit(torch.get_num_threads) for _ in range(4)]
            assert [n.result() for n in numbers] == [1] * 4
            workers.submit(lambda: torch.randn(1 << 18).exp()).result()
    finally:
        workers.shutdown()


@pytest.mark.parametrize("factor", [1.0, 5.0, 1e4])
@pytest.mark.parametrize("causal", [False, True])
def test_with_and_without_a_running_maximum(factor, causal, monkeypatch) -> None:
    """Where a bound lets the forward skip the maximum, output and LSE are what the maximum gives."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, 2, 32, generator=generator) for _ in range(3))
    q = q * factor
    skipped = rl.attention(q, k, v, causal=causal, return_lse=True, backend="cpu")
    monkeypatch.setattr(tile, "SMALL", -1.0)
    shifted = rl.attention(q, k, v, causal=causal, return_lse=True, backend="cpu")
    for one, other in zip(skipped, shifted, strict=True):
        torch.testing.assert_close(one, other)


def test_the_maximum_is_skipped_for_small_scores_only(monkeypatch) -> None:
    found = []
    small = tile.Tile.small
    monkeypatch.setattr(tile.Tile, "small", lambda *a: found.append(small(*a)) or found[-1])
    q, k, v = (torch.randn(1, 128, 1, 32) for _ in range(3))
    for poisoned in (k, k * 1e4, k.index_fill(1, torch.tensor(5), math.inf),
                     k.index_fill(1, torch.tensor(5), math.nan)):  # fmt: skip
        rl.attention(q, poisoned, v, backend="cpu")
    assert found == [True, False, False, False]


def test_large_values_stay_finite_without_a_maximum() -> None:
    q, k = (torch.randn(1, 256, 1, 32) for _ in range(2))
    out = rl.attention(q, k, torch.full((1, 256, 1, 32), 1e20), backend="cpu")
    torch.testing.assert_close(out, torch.full_like(out, 1e20))


def test_buffers_keep_no_input_alive() -> None:
    q, k, v = (torch.randn(1, 256, 2, 32) for _ in range(3))
    kept = weakref.ref(k.untyped_storage())
    rl.attention(q, k, v, backend="cpu")
    del k
    gc.collect()
    assert kept() is None


def test_a_failing_task_is_reported() -> None:
    def fail(task: int) -> None:
        raise RuntimeError(f"task {task}")

    with pytest.raises(RuntimeError, match="task"):
        threads.run(fail, range(5))
