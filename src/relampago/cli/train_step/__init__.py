"""`relampago train-step`: what a training step of a 7B model costs with standard attention, SDPA and relampago."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from relampago.cli.console import console, progress

if TYPE_CHECKING:
    from relampago.cli.train_step.cell import Cell

FILE = "train-step.json"
LENGTHS = {"cuda": "2k,4k,8k,16k,32k", "cpu": "256,512,1k"}


def train_step(
    model: Annotated[
        str | None, typer.Option(help="llama-7b, mistral-7b; on a CPU tiny, tiny-mistral")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="tokens, comma-separated: 2k,4k,8k")] = None,
    attention: Annotated[
        str, typer.Option(help="comma-separated: eager, sdpa, relampago, without")
    ] = "eager,sdpa,relampago,without",
    layers: Annotated[int | None, typer.Option(min=1, help="fewer than the model has")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="what the backward makes again: full, attention (all but it), most, none"
        ),
    ] = "full",
    optimiser: Annotated[
        str, typer.Option(help="AdamW in fp32 (moments and master weights) or bf16 (moments)")
    ] = "fp32",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="each layer by torch.compile: fewer passes over memory"),
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, help="for all; what is not reached says so")
    ] = 540,
    repeats: Annotated[int, typer.Option(min=1, help="steps measured, after a warm-up")] = 3,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one")] = None,
    out: Annotated[Path, typer.Option(help="folder for numbers and plot")] = Path("train-step-out"),
) -> None:
    """Forward, backward and AdamW of a Llama- or Mistral-shaped model on real text: time, MFU, and memory's parts."""
    from relampago.cli import machine

    started = time.perf_counter()
    where = _device(device)
    shared = {
        "checkpoint": checkpoint,
        "optimiser": optimiser,
        "repeats": repeats,
        "compiled": compiled,
    }
    cells = _cells(model, lengths, attention, layers, shared, where)
    facts = machine.facts() | {"transformers": machine.version("transformers")}
    record: dict[str, Any] = {"machine": facts, "seconds": seconds, "cells": []}
    out.mkdir(parents=True, exist_ok=True)
    _print_head(cells[0], facts)
    for entry in _measured(cells, started + seconds):
        record["cells"].append(entry)
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        (out / FILE).write_text(text, encoding="utf-8")
    show(record, out)


def _device(device: str | None) -> str:
    from relampago.cli import machine
    from relampago.cli.demo.finding import missing
    from relampago.errors import InvalidInput, Unsupported

    where = device or machine.best_device()
    if where not in ("cpu", machine.best_device()):
        raise InvalidInput(f"--device is {where!r}; expected cpu, or cuda where there is a GPU")
    if absent := missing({"transformers": "transformers", "tokenizers": "tokenizers"}):
        raise Unsupported(f"{', '.join(absent)} not installed: pip install 'relampago[hf]'")
    return where


def _cells(
    model: str | None,
    lengths: str | None,
    attention: str,
    layers: int | None,
    shared: dict[str, Any],
    where: str,
) -> list[Cell]:
    """What to measure, in order; `shared` are the words of `Cell` that all have."""
    from relampago.cli import machine
    from relampago.cli.bench import words
    from relampago.cli.train_step.cell import Cell
    from relampago.cli.train_step.optimiser import OPTIMISERS, held_per_parameter
    from relampago.cli.train_step.order import KINDS, order
    from relampago.cli.train_step.shapes import CHECKPOINTS, SHAPES

    name = model or ("llama-7b" if where == "cuda" else "tiny")
    one_of(name, SHAPES, "model")
    kinds = words(attention, KINDS, "attention")
    one_of(shared["checkpoint"], CHECKPOINTS, "checkpoint")
    one_of(shared["optimiser"], OPTIMISERS, "optimiser")
    first = Cell(name, layers, 1, kinds[0], device=where, **shared)
    room = None
    if gpus := machine.gpus() if where == "cuda" else []:
        room = gpus[0]["memory"] - held_per_parameter(first.optimiser) * first.shape.parameters
    counts = parse_lengths(lengths or LENGTHS[where])
    return [
        dataclasses.replace(first, length=length, attention=kind)
        for length, kind in order(counts, kinds, first.shape, room)
    ]


def one_of(word: str, known: Collection[str], option: str) -> None:
    """Refuse a word that is not known."""
    from relampago.errors import InvalidInput

    if word not in known:
        raise InvalidInput(f"--{option} is {word!r}; expected one of {', '.join(known)}")


def parse_lengths(text: str) -> list[int]:
    """`2k,512` as [512, 2048]."""
    from relampago.errors import InvalidInput

    found = []
    for word in (w.strip().lower() for w in text.split(",")):
        digits, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        if not digits.isdigit() or int(digits) < 1:
            raise InvalidInput(
                f"--lengths has {word!r}; expected counts of tokens such as 512 or 8k"
            )
        found.append(int(digits) * factor)
    return sorted(set(found))


def _measured(cells: list[Cell], end: float) -> Any:
    """Each cell with its result, as they come."""
    from relampago.cli.train_step.workers import Workers

    with Workers(ahead=cells[0].device == "cuda") as workers, progress() as bar:
        task = bar.add_task("", total=len(cells))
        for cell in cells:
            name = f"{cell.attention}, {cell.length} tokens"
            left = end - time.perf_counter()
            if left <= 0:
                result: dict[str, Any] = {"not_reached": "in the time given"}
            else:
                result = workers.measure(
                    cell,
                    left,
                    lambda stage, name=name: bar.update(task, description=f"{name}: {stage}"),
                )
            bar.advance(task)
            yield dataclasses.asdict(cell) | {"result": result}


def show(record: dict[str, Any], out: Path) -> None:
    """Print a record's table and gains, and draw its plot.

    Args:
        record: as in the JSON.
        out: folder.
    """
    from relampago.cli.demo.finding import missing
    from relampago.cli.train_step import plot, rows, table

    shape, made = rows.of_record(record)
    console.print(table.table(made, shape, rows.peak_flops(record)))
    for row in made:
        if row.said:
            console.print(Text(f"{row.length} tokens, {row.kind}: {row.said}", style="dim"))
    for said in rows.gains(made):
        console.print(Text(said, style="bold"))
    if missing({"matplotlib": "matplotlib"}):
        console.print("no plot: matplotlib not installed: pip install 'relampago[bench]'")
        return
    plot.draw(record, out / FILE.replace(".json", ".png"))
    console.print(f"wrote {out / FILE} and its plot beside it")


def _print_head(cell: Cell, facts: dict[str, Any]) -> None:
    chip = facts["gpus"][0]["name"] if cell.device == "cuda" else facts["cpu"]
    shape = cell.shape
    console.print(
        f"{cell.model}, {shape.layers} layers, {shape.parameters / 1e9:.3g} billion parameters ({shape.source}), bf16, "
        f"random weights; AdamW: {cell.optimiser}; checkpoints: {cell.checkpoint}; "
        f"{'compiled; ' if cell.compiled else ''}{chip}, torch {facts['torch']}"
    )
