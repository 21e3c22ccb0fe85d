"""`relampago explain --measure`: bytes and time of real kernels by the GPU's counters, beside the formulas.

Each contestant and direction runs in a process of its own under ncu; only the call itself is profiled, after a first
one that compiles. Without counters torch's profiler gives the time of kernels, and bytes stay unknown.

This file is also the program that is profiled: `python -m relampago.cli.measured` with a job as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from relampago.cli import counters
from relampago.cli.console import progress, seconds, size
from relampago.work import Work

STANDARD = "standard"
LIMIT = 150.0  # seconds one process may take
DIRECTIONS = ("forward", "backward")
HEAD = (
    "", "read", "written", "both", "formula", "both / formula", "time", "TFLOP/s", "of roofline",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One call to profile.

    Args:
        contestant: "standard", or a backend's name.
        direction: "forward" or "backward".
        q: (B, Lq, H, D).
        k: (B, Lk, G, D).
        v: (B, Lk, G, E).
        dtype: torch's name.
        causal: whether later keys are masked.
        window: as `relampago.attention`'s.
        softcap: likewise.
    """

    contestant: str
    direction: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: str
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None

    def hidden(self, device: str) -> Tensor | None:
        """Bool (Lq, Lk), True where a row may not see a key: no part of the call. None if all is seen."""
        from relampago.cli.contestants import band

        if not self.causal and self.window is None:
            return None
        return ~band(self.q[1], self.k[1], self.causal, self.window or (None, None), device)

    def call(self, device: str) -> Callable[[], object]:
        """The forward, or the backward of a forward made once."""
        import relampago as rl

        generator = torch.Generator(device).manual_seed(0)
        tensors = [
            torch.randn(
                shape, generator=generator, device=device, dtype=getattr(torch, self.dtype)
            ).requires_grad_(self.direction == "backward")
            for shape in (self.q, self.k, self.v)
        ]
        hidden = self.hidden(device) if self.contestant == STANDARD else None

        def forward() -> Tensor:
            if self.contestant == STANDARD:
                q, k, v = tensors
                return standard(q, k, v, hidden, self.softcap)
            return rl.attention(
                *tensors, causal=self.causal, window=self.window, softcap=self.softcap, backend=self.contestant
            )  # fmt: skip

        if self.direction == "forward":
            return forward
        out = forward()
        dout = torch.randn(out.shape, generator=generator, device=device, dtype=out.dtype)
        return lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)


def standard(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention as the formula reads, in the inputs' dtype: S and P are written and read."""
    shared = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(shared, 2) if shared > 1 else t for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def measure(jobs: list[Job]) -> tuple[list[dict[str, Any]], str]:
    """Each job's kernels, and why there are no bytes ("" where there are)."""
    found, why = [], ""
    with progress() as bar:
        task = bar.add_task("", total=len(jobs))
        for job in jobs:
            bar.update(task, description=f"{job.contestant} {job.direction}")
            entry: dict[str, Any] = {"contestant": job.contestant, "direction": job.direction}
            if not why:
                try:
                    kernels = counters.profile(command(job), LIMIT, os.environ)
                    entry["kernels"] = [asdict(kernel) for kernel in kernels]
                except counters.NoCounters as reason:
                    why = str(reason)
            if why:
                entry |= _timed_only(job)
            found.append(entry)
            bar.advance(task)
    return found, why


def command(job: Job) -> list[str]:
    """The program to profile."""
    return [sys.executable, "-m", "relampago.cli.measured", json.dumps(asdict(job))]


def _timed_only(job: Job) -> dict[str, Any]:
    """Kernels by torch's profiler: names and times, no bytes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    try:
        call = job.call("cuda")
        call()
        torch.cuda.synchronize()
        with torch_profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"kernels": [], "failed": "out of memory"}
    return {
        "kernels": [
            {"name": event.name, "read": None, "written": None, "seconds": event.device_time_total / 1e6}
            for event in seen.events() or []
            if event.device_time_total
        ]
    }  # fmt: skip


def formulas(work: Work, contestant: str, direction: str, itemsize: int) -> dict[str, int]:
    """FLOPs and bytes that the papers count for a contestant."""
    if direction == "forward":
        standard_bytes, flash_bytes = work.standard_bytes(itemsize), work.flash_bytes(itemsize)
        flops = work.forward_flops
    else:
        standard_bytes = work.standard_backward_bytes(itemsize)
        flash_bytes = work.flash_backward_bytes(itemsize)
        flops = work.backward_flops
    return {
        "flops": flops,
        "bytes": standard_bytes if contestant == STANDARD else flash_bytes,
    }


def summarise(
    entry: dict[str, Any], work: Work, itemsize: int, peaks: tuple[float, float, str] | None
) -> dict[str, Any]:
    """Sums over an entry's kernels, the formulas, the FLOP rate, and the fraction of the roofline."""
    kernels = entry["kernels"]
    took = sum(kernel["seconds"] for kernel in kernels)
    known = bool(kernels) and all(kernel["read"] is not None for kernel in kernels)
    moved = sum(k["read"] + k["written"] for k in kernels) if known else None
    expected = formulas(work, entry["contestant"], entry["direction"], itemsize)
    floor = None if peaks is None else max(expected["flops"] / peaks[0], expected["bytes"] / peaks[1])  # fmt: skip
    return entry | {
        "seconds": took or None,
        "read": sum(k["read"] for k in kernels) if known else None,
        "written": sum(k["written"] for k in kernels) if known else None,
        "moved": moved,
        "formula": expected,
        "flops_per_second": expected["flops"] / took if took else None,
        "of_roofline": floor / took if took and floor is not None else None,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """A line per contestant and direction."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="device memory", title_justify="left")
    for place, name in enumerate(HEAD):
        view.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        view.add_row(f"{row['contestant']} {row['direction']}", *cells(row))
    return view


def cells(row: dict[str, Any]) -> list[str]:
    """A row's figures in words; a dash where nothing was measured."""
    moved, rate, part = row["moved"], row["flops_per_second"], row["of_roofline"]
    return [
        size(row["read"]),
        size(row["written"]),
        size(moved),
        size(row["formula"]["bytes"]),
        "-" if moved is None else f"{moved / row['formula']['bytes']:.2f}",
        "-" if row["seconds"] is None else seconds(row["seconds"]),
        "-" if rate is None else f"{rate / 1e12:.0f}",
        "-" if part is None else f"{part:.0%}",
    ]


def main() -> None:
    """Make a job's call once to compile, and once between the profiler's start and stop."""
    words = json.loads(sys.argv[1])
    call = Job(**words).call("cuda")
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
