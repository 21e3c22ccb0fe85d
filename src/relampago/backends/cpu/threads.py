"""Tasks over threads: one Python thread per core, each with single-threaded torch operators.

One parallel region per call, and not one per operator: tiles are small, and a barrier after each of many operators
makes an engine ten times slower as soon as a neighbour takes a core (benchmarks/notes/cpu.md, entry 12).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Task = TypeVar("Task")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


def run(
    fn: Callable[[Task], None],
    tasks: Iterable[Task],
    *,
    serial: bool = False,
    pooled: bool = False,
) -> None:
    """Call fn on every task, on as many threads as torch uses.

    In order and on this thread if serial. A single task stays on this thread too, whose operators may use several,
    unless pooled.
    """
    waiting = deque(tasks)
    workers = torch.get_num_threads()
    if serial or workers == 1 or len(waiting) < (1 if pooled else 2):
        for task in waiting:
            fn(task)
        return

    def work() -> None:
        with torch.no_grad(), contextlib.suppress(_Empty):  # grad mode belongs to a thread
            while True:
                fn(_next(waiting))

    pool = _workers(workers)
    shares = [pool.submit(work) for _ in range(min(workers, len(waiting)))]
    try:
        wait(shares)  # all, since they write to what the caller holds
    finally:
        waiting.clear()  # an interrupt leaves no work behind
    for share in shares:
        share.result()


class _Empty(Exception):
    """No task is left."""


def _next(waiting: deque[Task]) -> Task:
    try:
        return waiting.popleft()
    except IndexError:
        raise _Empty from None


def _workers(size: int) -> ThreadPoolExecutor:
    global _pool, _size
    with _lock:
        if _pool is None or _size != size:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _size = _start(size), size
        return _pool


def _start(size: int) -> ThreadPoolExecutor:
    """Start all threads at once: torch.set_num_threads also changes what later threads begin with, so restore it."""
    ready = threading.Barrier(size + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first question resets its number to the process's: ask before setting it
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(size, thread_name_prefix="relampago", initializer=begin)
    for _ in range(size):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(size)
    return pool


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
