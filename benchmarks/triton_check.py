"""The portable kernels on a GPU, through the public API:  python benchmarks/triton_check.py [budget_s]

1 compiles (14 processes), 2 forward and backward at 16k tokens beside SDPA's backends and compiled flex_attention, in
alternating order, 3 a window at 32k, 4 host time of a call, 5 peak memory by length. Who fails is left out, and why is
written down. Writes $OUT/triton.json; `report.py` makes a table of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "triton_check_cache"))

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import relampago as rl

START = time.time()
LENGTH, WIDTH = 16384, 2048  # tokens; heads times head dim
CELLS = [(dim, causal) for dim in (128, 256, 64) for causal in (False, True)]
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PROCESSES = 14


def tensors(length: int, heads: int, dim: int, grad: bool = True) -> list[Tensor]:
    """q, k, v, (1, length, heads, dim) in bf16."""
    shape = (1, length, heads, dim)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
        for _ in range(3)
    ]


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The call that is measured."""
    return rl.attention(q, k, v, causal=causal, backend="triton")


def peer(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    """SDPA's backend, with relampago's layout."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            turned = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(*turned, is_causal=causal).transpose(1, 2)

    return call


def not_after(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """The causal mask, in flex_attention's words."""
    return row >= key


def flex(length: int, causal: bool, device: str = "cuda") -> Callable[..., Tensor]:
    """Compiled flex_attention, with relampago's layout; the mask's tiles are known beforehand."""
    torch._dynamo.reset()  # else all cells share one limit of recompilations
    mask = create_block_mask(not_after, None, None, length, length, device) if causal else None
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(*turned, block_mask=mask).transpose(1, 2)

    return call


def able(made: dict[str, Callable[[], Any]], failed: dict[str, str]) -> dict[str, Any]:
    """What each makes; of one that cannot, why."""
    found = {}
    for name, make in made.items():
        try:
            found[name] = make()
        except Exception as error:  # a peer that cannot takes nobody else's time
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return found


def milliseconds(call: Callable[[], Any], target: float = 12.0) -> float:
    """Mean time of a call among as many as fill about `target` ms."""
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    n = max(1, min(20, int(target / max(start.elapsed_time(end), 1e-3))))
    start.record()
    for _ in range(n):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / n


def race(calls: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of each, in alternating order."""
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(reversed(calls))
        for name in order:
            found[name].append(milliseconds(calls[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def cell(dim: int, causal: bool) -> dict[str, Any]:
    """Rates of forward and backward in TFLOP/s (backward counted as 2.5 forwards)."""
    heads = WIDTH // dim
    q, k, v = tensors(LENGTH, heads, dim)
    dout = torch.randn_like(q)
    flops = 4 * LENGTH**2 * WIDTH * (0.5 if causal else 1) / 1e9
    failed: dict[str, str] = {}
    forward: dict[str, Callable[..., Tensor]] = {"triton": lambda q, k, v: ours(q, k, v, causal)}
    forward |= {name: peer(backend, causal) for name, backend in PEERS.items()}
    forward |= able({"flex": lambda: flex(LENGTH, causal)}, failed)
    outs = able({name: lambda call=call: call(q, k, v) for name, call in forward.items()}, failed)
    with torch.no_grad():
        calls = {name: lambda name=name: forward[name](q, k, v) for name in outs}
        times = race({name: calls[name] for name in able(calls, failed)})
    calls = {
        name: lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for name, out in outs.items()
    }
    back = race({name: calls[name] for name in able(calls, failed)})
    return {
        "what": "16k", "dim": dim, "causal": causal,
        "forward": {name: flops / ms for name, ms in times.items()},
        "backward": {name: 2.5 * flops / ms for name, ms in back.items()},
        "failed": failed,
    }  # fmt: skip


def window() -> dict[str, Any]:
    """Window 1024 against full causal at 32k tokens."""
    q, k, v = tensors(32768, 16, 128, grad=False)
    times = race(
        {
            "causal": lambda: ours(q, k, v, True),
            "window": lambda: rl.attention(
                q, k, v, causal=True, window=(1023, 0), backend="triton"
            ),
        }
    )
    return {"what": "window 1024 at 32k", **times, "ratio": times["causal"] / times["window"]}


@triton.jit
def empty(x) -> None:
    """What a launch alone costs."""


def host() -> list[dict[str, Any]]:
    """Microseconds of Python per warm call, forward, no gradient; the GPU is never the bottleneck here."""
    q, k, v = tensors(64, 4, 64, grad=False)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    x = torch.empty(1, device="cuda")

    def microseconds(call: Callable[[], Any], n: int = 200) -> float:
        best = float("inf")
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            best = min(best, (time.perf_counter() - start) / n)
        return best * 1e6

    calls: dict[str, Callable[[], Any]] = {
        "empty launch": lambda: empty[(1,)](x),
        "triton": lambda: ours(q, k, v, True),
        rl.explain(q, k, v, causal=True).backend: lambda: rl.attention(q, k, v, causal=True),
        "SDPA": lambda: F.scaled_dot_product_attention(*turned, is_causal=True),
    }
    with torch.no_grad():
        return [
            {"what": "host", "call": name, "microseconds": microseconds(call)}
            for name, call in calls.items()
        ]


def memory() -> list[dict[str, Any]]:
    """Peak bytes of forward and backward beyond the inputs, by length."""
    rows = []
    for length in (16384, 32768, 65536):
        q, k, v = tensors(length, 8, 64)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = ours(q, k, v, True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        rows.append({"what": "memory", "length": length, "mib": peak / 2**20})
    return rows


def compile_flex(dim: int, causal: bool) -> None:
    """At the length that is measured: its kernels are made for one."""
    q, k, v = tensors(LENGTH, WIDTH // dim, dim)
    call = flex(LENGTH, causal)
    torch.autograd.grad(call(q, k, v), (q, k, v), torch.ones_like(q))
    with torch.no_grad():
        call(q, k, v)


def compile_share(share: int) -> None:
    """What this process compiles for all."""
    for dim, causal in CELLS[share::PROCESSES]:
        q, k, v = tensors(512, 2, dim)
        torch.autograd.grad(ours(q, k, v, causal), (q, k, v), torch.ones_like(q))
        able({"flex": lambda dim=dim, causal=causal: compile_flex(dim, causal)}, {})
    if share == len(CELLS):
        q, k, v = tensors(4096, 2, 128, grad=False)
        rl.attention(q, k, v, causal=True, window=(1023, 0), backend="triton")


def main(budget: float) -> None:
    """Measure until the budget is spent, print each line as it comes, write JSON."""
    sharers = [
        subprocess.Popen([sys.executable, __file__, "--share", str(share)])
        for share in range(len(CELLS) + 1)
    ]
    for sharer in sharers:
        sharer.wait()
    print(f"compiled at {time.time() - START:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    jobs: list[Callable[[], Any]] = [host, window, memory]
    jobs += [lambda dim=dim, causal=causal: cell(dim, causal) for dim, causal in CELLS]
    for job in jobs:
        if time.time() - START > budget:
            print("the budget is spent")
            break
        found = job()
        for row in found if isinstance(found, list) else [found]:
            rows.append(row)
            print(short(row), flush=True)
    record = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "rows": rows,
    }  # fmt: skip
    folder = Path(os.environ.get("OUT", "."))
    (folder / "triton.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def short(row: dict[str, Any]) -> str:
    """A line to read."""

    def of(value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(f"{name} {of(one)}" for name, one in value.items())
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "  ".join(f"{name}: {of(value)}" for name, value in row.items())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--share"]:
        compile_share(int(sys.argv[2]))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 100.0)
