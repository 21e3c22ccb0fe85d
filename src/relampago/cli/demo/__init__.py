"""`relampago demo`: real models on real text, and what length costs; within three minutes on two cores."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel
from rich.text import Text

from relampago.cli.console import console

if TYPE_CHECKING:
    from relampago.cli.demo.finding import Finding


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="short lengths, no decoder")] = False,
    out: Annotated[Path, typer.Option(help="folder for plot and numbers")] = Path("demo-out"),
) -> None:
    """Compare relampago with standard attention in real models, then draw time and memory against length."""
    started = time.perf_counter()
    from relampago.cli import machine
    from relampago.cli.demo import decoder, encoder

    device = machine.best_device()
    chip = machine.gpus()[0]["name"] if device == "cuda" else machine.cpu_model()
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"relampago {machine.version('relampago')} on {chip}")
    parts = [("1  A real encoder", lambda: encoder.run(device, quick))]
    if not quick:
        parts.append(("2  A real decoder", lambda: decoder.run(device)))
    parts.append(
        (f"{len(parts) + 1}  The cost of length", lambda: _sweep(device, quick, out, chip))
    )
    found, took = [], []
    for title, part in parts:
        console.rule(f"[bold]{title}", align="left", style="dim")
        begun = time.perf_counter()
        found.append(part())
        took.append(time.perf_counter() - begun)
        if found[-1].holds is None:
            console.print(Text(f"left out: {found[-1].said}", style="yellow"))
    parts_took = " + ".join(f"{seconds:.0f}" for seconds in took)
    console.print(
        _summary(found, out, f"{time.perf_counter() - started:.0f} s in all ({parts_took})")
    )
    if any(finding.holds is False for finding in found):
        raise typer.Exit(1)


def _sweep(device: str, quick: bool, out: Path, chip: str) -> Finding:
    import torch

    from relampago.cli import machine
    from relampago.cli.demo import plot, sweep
    from relampago.cli.demo.finding import Finding, missing

    points = sweep.run(device, sweep.QUICK if quick else sweep.LENGTHS)
    console.print(sweep.table(points, device))
    record = {"machine": machine.facts(), "points": [point._asdict() for point in points]}
    (out / "sweep.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if missing({"matplotlib": "matplotlib"}):
        console.print("no plot: matplotlib not installed: pip install 'relampago[demo]'")
    else:
        threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
        caption = (
            f"{chip}{threads}; torch {torch.__version__}; batch 1, {sweep.HEADS} heads of {sweep.DIM}, causal, "
            f"{sweep.dtype_on(device)}, forward; hollow points are estimates"
        )
        plot.draw(points, out / "attention.png", caption)
    return Finding("length", sweep.gains(points), True)


def _summary(found: list[Finding], out: Path, took: str) -> Panel:
    text = Text()
    signs = {True: ("✓ ", "green"), False: ("✗ ", "red"), None: ("- ", "yellow")}
    for finding in found:
        text.append(*signs[finding.holds])
        text.append(f"{finding.title:8}", style="bold")
        text.append(f" {finding.said}\n")
    files = sorted(path for path in (out / "attention.png", out / "sweep.json") if path.exists())
    text.append(f"\nfiles: {', '.join(map(str, files))}\n{took}", style="dim")
    return Panel(text, title="what this showed", title_align="left", border_style="bright_black")
