"""`relampago doctor`: what this machine is, which backends run on it, why the others do not, and what would help."""

from __future__ import annotations

import os
import platform

from rich.table import Table
from rich.text import Text

from relampago.cli.console import console, size


def doctor() -> None:
    """Say what runs on this machine, why the rest does not, and what would help."""
    import torch

    from relampago.backends.cpu import precision
    from relampago.cli import machine

    console.print(_grid(_facts()))
    console.print()
    console.print(_backends())
    console.print()
    fast = precision.available()
    console.print(
        "[green]✓[/] fast fp32 products on this CPU: full precision by self-check, and faster"
        if fast
        else "[yellow]-[/] fast fp32 products on this CPU: not taken (off, not exact, or no gain here)"
    )
    for hint in hints(
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        gpus=len(machine.gpus()),
        triton=machine.version("triton"),
    ):
        console.print(Text(f"hint: {hint}", style="yellow"))


def _facts() -> list[tuple[str, str]]:
    import torch

    from relampago.cli import machine

    rows = [
        ("relampago", f"{machine.version('relampago')}  {machine.commit() or ''}".strip()),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("triton", machine.version("triton") or "not installed"),
        (
            "cpu",
            f"{machine.cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        ),
        ("memory", f"{size(machine.memory_total())}, {size(machine.memory_available())} available"),
    ]
    for gpu in machine.gpus():
        rows.append(("gpu", f"{gpu['name']} ({gpu['arch']}), {size(gpu['memory'])}"))
    if driver := machine.driver():
        rows.append(("driver", driver))
    if not machine.gpus():
        rows.append(("gpu", "none that torch can see"))
    return rows


def _grid(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def _backends() -> Table:
    """One row per device and backend: a small causal problem, and what the backend says to it."""
    import torch

    from relampago.problem import Device, Problem
    from relampago.select import refusals

    devices = {Device.of(torch.device("cpu")): "fp32"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        devices[Device.of(torch.device("cuda", index))] = "bf16"
    table = Table("device", "backend", "can run", "why not", title="backends, in order of choice")
    for device, dtype in devices.items():
        problem = Problem(
            device=device, batch=1, heads_q=8, heads_kv=8, len_q=1024, len_k=1024, dim=64, dim_v=64,
            dtype=dtype, right=True,
        )  # fmt: skip
        for backend, reason in refusals(problem).items():
            state = Text("✓", style="green") if reason is None else Text("-", style="yellow")
            table.add_row(str(device), backend, state, Text(reason or ""))
    return table


def hints(*, threads: int, cores: int, gpus: int, triton: str | None) -> list[str]:
    """What would help, given what there is."""
    found = []
    if threads < cores:
        found.append(f"torch uses {threads} of {cores} cores: OMP_NUM_THREADS or set_num_threads")
    if gpus and triton is None:
        found.append("a GPU but no triton: pip install triton")
    if not gpus:
        found.append("no GPU: attention runs on the CPU; see `relampago explain --device sm90`")
    return found
