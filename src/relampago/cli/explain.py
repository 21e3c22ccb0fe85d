"""`relampago explain`: what a call would do on a machine you name, and what it costs, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relampago.cli.console import console, seconds, size

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def explain(
    batch: Annotated[int, typer.Option(help="sequences")] = 1,
    len_q: Annotated[int, typer.Option(help="queries in each")] = 4096,
    len_k: Annotated[int | None, typer.Option(help="keys in each; as many as queries")] = None,
    heads: Annotated[int, typer.Option(help="query heads")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="key heads; as many as query heads")] = None,
    dim: Annotated[int, typer.Option(help="head dim of q and k")] = 64,
    dim_v: Annotated[int | None, typer.Option(help="head dim of v; that of q")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64")] = "bf16",
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="mask later keys, or none")
    ] = True,
    window: Annotated[
        str | None, typer.Option(help='keys seen before and after, such as "1023,0"; "none,0" too')
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="c of c·tanh(score/c)")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or sm80, sm90, gfx942, …")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="insist on this backend")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="also run it on this GPU under Nsight Compute")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="write what was measured here, as JSON")] = None,
) -> None:
    """Print backend, plan, FLOPs, bytes, memory and the roofline's floor of a call, and who refused it."""
    import torch

    import relampago as rl
    from relampago.cli.machine import device_named

    named = torch_dtype(dtype)
    _check(batch=batch, len_q=len_q, len_k=len_k, heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v)  # fmt: skip
    keys, kv = len_q if len_k is None else len_k, heads if kv_heads is None else kv_heads
    shapes = ((batch, len_q, heads, dim), (batch, keys, kv, dim), (batch, keys, kv, dim_v or dim))
    q, k, v = (torch.empty(shape, dtype=named, device="meta") for shape in shapes)
    found = rl.explain(
        q,
        k,
        v,
        device=device_named(device),
        causal=causal,
        window=parse_window(window),
        softcap=softcap,
        backend=backend,
    )
    console.print(_table(found))
    for name, why in found.refused.items():
        console.print(Text(f"not {name}: {why}", style="yellow"))
    if measure:
        options = {"causal": causal, "window": parse_window(window), "softcap": softcap}
        _measure(found, [tuple(shape) for shape in shapes], DTYPES[dtype], options, out)


def _measure(
    found: Any,
    shapes: list[tuple[int, ...]],
    dtype: str,
    options: dict[str, Any],
    out: Path | None,
) -> None:
    """Run standard attention and every GPU backend that takes the call, and print counters beside formulas."""
    import torch

    from relampago.cli import machine, measured
    from relampago.errors import InvalidInput
    from relampago.explain import PEAKS
    from relampago.select import refusals

    device = found.problem.device
    if not torch.cuda.is_available() or device.arch != machine.gpus()[0]["arch"]:
        raise InvalidInput(
            f"--measure with --device {device.arch}; expected cuda, on a machine with a GPU"
        )
    able = [n for n, why in refusals(found.problem).items() if why is None and n != "reference"]
    backward = refusals(found.problem.backward())
    q, k, v = shapes
    jobs = [
        measured.Job(who, way, q, k, v, dtype, **options)
        for who in (measured.STANDARD, *able)
        for way in measured.DIRECTIONS
        if way == "forward" or backward.get(who) is None
    ]
    entries, why = measured.measure(jobs)
    peaks = PEAKS.get(device.arch)
    rows = [measured.summarise(entry, found.work, found.itemsize, peaks) for entry in entries]
    console.print(measured.table(rows))
    if why:
        console.print(Text(f"no bytes: {why}; times are torch's profiler's", style="yellow"))
    if out is not None:
        asked = {"q": q, "k": k, "v": v, "dtype": dtype, **options}
        record = {"machine": machine.facts(), "asked": asked, "no_counters": why, "rows": rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"wrote {out}")


def torch_dtype(name: str) -> Any:
    """The torch dtype that a short name means."""
    import torch

    from relampago.errors import InvalidInput

    if name not in DTYPES:
        raise InvalidInput(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[name])


def parse_window(text: str | None) -> tuple[int | None, int | None] | None:
    """`1023,0` as (1023, 0); a side may be `none`."""
    from relampago.errors import InvalidInput

    if text is None:
        return None
    sides = [side.strip().lower() for side in text.replace(" ", ",").split(",") if side.strip()]
    if len(sides) != 2 or not all(side == "none" or side.isdigit() for side in sides):
        raise InvalidInput(f'window is {text!r}; expected two counts such as "1023,0" or "none,0"')
    left, right = (None if side == "none" else int(side) for side in sides)
    return left, right


def _check(**sizes: int | None) -> None:
    from relampago.errors import InvalidInput

    for name, value in sizes.items():
        least = 0 if name in ("batch", "len_q", "len_k") else 1
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise InvalidInput(f"--{option} is {value}; expected at least {least}")


def _table(found: Any) -> Table:
    from relampago.explain import PEAKS, quantity
    from relampago.select import choose

    work, item, problem = found.work, found.itemsize, found.problem
    backward = choose(problem.backward())
    arch = problem.device.arch
    table = Table(show_header=True, title=str(problem), title_justify="left")
    table.add_column("", style="bold")
    table.add_column("flash attention")
    table.add_column("standard attention")
    held = item * (work.dim + work.dim_v) * (work.rows + work.keys)
    tiles = f"{found.plan.block_q} queries x {found.plan.block_k} keys"
    dense = found.backend == "reference"
    table.add_row("backend", f"{found.backend}, {backward.name} backward", "")
    table.add_row("plan", "no tiles, dense" if dense else tiles, "")
    table.add_row("FLOPs forward", quantity(work.forward_flops), "the same")
    table.add_row("FLOPs backward", quantity(work.backward_flops), "the same, less S again")
    moved = "bytes moved forward"
    table.add_row(moved, size(work.flash_bytes(item)), size(work.standard_bytes(item)))
    table.add_row("q, k, v and output", size(held), size(held))
    extra = "memory beside them"
    table.add_row(extra, size(work.flash_extra_memory()), size(work.standard_extra_memory(item)))
    if found.floor_seconds is None:
        table.add_row("floor", f"not known: no data sheet for {problem.device}", "")
    else:
        floor = f"{seconds(found.floor_seconds)} ({PEAKS[arch][2]})"
        table.add_row("floor forward", floor, "")
    return table
