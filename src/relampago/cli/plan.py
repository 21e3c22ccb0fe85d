"""`relampago plan`: what each way to spread a long sequence would cost, on machines that nobody has here."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from relampago.cli.console import console, seconds, size
from relampago.cli.explain import parse_window


def plan(
    seq: Annotated[int, typer.Option(help="tokens of the whole sequence")] = 131072,
    gpus: Annotated[int, typer.Option(help="ranks")] = 8,
    heads: Annotated[int, typer.Option(help="query heads")] = 32,
    kv_heads: Annotated[int, typer.Option(help="key heads")] = 8,
    dim: Annotated[int, typer.Option(help="head dim")] = 128,
    batch: Annotated[int, typer.Option(help="sequences")] = 1,
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="mask later keys, or none")
    ] = True,
    window: Annotated[
        str | None, typer.Option(help='keys seen before and after, such as "1023,0"')
    ] = None,
    layout: Annotated[str, typer.Option(help="zigzag, striped or contiguous")] = "zigzag",
    chunk: Annotated[int, typer.Option(help="kv heads that all-gather fetches at a time")] = 1,
    machine: Annotated[str, typer.Option(help="h200, h100 or cpu")] = "h200",
) -> None:
    """Print modelled time, bytes, memory and efficiency of one layer's attention, per strategy, best first."""
    from relampago.distributed.model import MACHINES, Shape, plans
    from relampago.distributed.sight import Sight
    from relampago.errors import InvalidInput

    if machine not in MACHINES:
        raise InvalidInput(f"machine is {machine!r}; expected one of {', '.join(MACHINES)}")
    for name, value in (("seq", seq), ("gpus", gpus), ("heads", heads), ("kv_heads", kv_heads), ("dim", dim),
                        ("batch", batch), ("chunk", chunk)):  # fmt: skip
        if value < 1:
            raise InvalidInput(f"{name} is {value}; expected at least 1")
    if heads % kv_heads:
        raise InvalidInput(f"kv_heads is {kv_heads}; expected a divisor of the {heads} heads")
    shape = Shape(heads, kv_heads, dim, dim, 2, batch)
    sight = Sight.of(seq, causal=causal, window=parse_window(window))
    found = plans(gpus, seq, shape, sight, MACHINES[machine], chunk, layout)
    table = Table(box=None, header_style="bold")
    table.add_column("strategy")
    for title in ("forward", "backward", "sent", "sent back", "calls", "memory", "efficiency"):
        table.add_column(title, justify="right")
    for e in found:
        table.add_row(
            e.strategy, seconds(e.forward), seconds(e.backward), size(e.forward_bytes), size(e.backward_bytes),
            f"{e.forward_calls}+{e.backward_calls}", size(e.memory) + ("" if e.fits else " !"),
            f"{e.efficiency[0]:.0%} / {e.efficiency[1]:.0%}",
        )  # fmt: skip
    console.print(table)
    best = found[0]
    console.print(
        Text(f"best: {best.strategy}, {seconds(best.seconds)} per layer, forward and backward")
    )
    console.print(
        Text(f"projected by a model of {gpus} × {machine}, bf16; not measured", style="dim")
    )
