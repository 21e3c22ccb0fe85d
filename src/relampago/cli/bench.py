"""`relampago bench`: backends side by side with torch's SDPA in one run, as a table and as JSON with its provenance."""

from __future__ import annotations

import fnmatch
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from relampago.cli.console import between, console, progress, seconds, size

if TYPE_CHECKING:
    from relampago.cases import Case

DIRECTIONS = ("forward", "both")
SLOW = 1.0  # seconds; a call that takes longer has warmed up by the one that gave its results


class Setting(NamedTuple):
    """What one race is run with."""

    case: Case
    dtype: str
    direction: str
    device: str
    repeats: int
    budget: float
    memory: bool


def bench(
    case: Annotated[
        list[str] | None, typer.Option(help="names or globs from cases.BENCH; may be repeated")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="comma-separated; all but reference if not given")
    ] = None,
    dtype: Annotated[str, typer.Option(help="comma-separated: fp32, bf16, fp16, fp64")] = "",
    direction: Annotated[str, typer.Option(help="forward, both, or forward,both")] = "forward",
    repeats: Annotated[int, typer.Option(min=1, help="samples of each contestant")] = 10,
    budget: Annotated[
        float, typer.Option(help="seconds a race may take; three rounds at least")
    ] = 60,
    memory: Annotated[
        bool, typer.Option(help="peak memory on the CPU too, in processes of its own")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one")] = None,
    out: Annotated[
        Path | None, typer.Option(help="write JSON, or the report's folder, here")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="no race: a page of the committed measurements")
    ] = False,
) -> None:
    """Race backends against torch's SDPA: time, peak memory and error of each."""
    from relampago.cli import machine
    from relampago.errors import InvalidInput

    if report:
        _report(out or Path("report-out"))
        return
    where = device or machine.best_device()
    if where not in ("cpu", machine.best_device()):
        raise InvalidInput(f"--device is {where!r}; expected cpu, or cuda where there is a GPU")
    races = [
        Setting(one, kind, way, where, repeats, budget, memory)
        for one in _cases(case)
        for kind in words(dtype or ("bf16" if where == "cuda" else "fp32"), ("bf16", "fp16", "fp32", "fp64"), "dtype")
        for way in words(direction, DIRECTIONS, "direction")
    ]  # fmt: skip
    names = _backends(backends)
    rows: list[dict[str, Any]] = []
    facts = machine.facts()
    chip = (
        facts["gpus"][0]["name"]
        if where == "cuda"
        else f"{facts['cpu']}, {facts['threads']} threads"
    )
    console.print(
        Text(
            f"{chip}, torch {facts['torch']}, up to {repeats} samples in alternating order",
            style="dim",
        )
    )
    with progress() as bar:
        task = bar.add_task("", total=len(races) * repeats)
        for done, setting in enumerate(races):
            bar.update(task, description=f"{setting.case.name} {setting.dtype} {setting.direction}")
            entries = race(setting, names, lambda: bar.advance(task))
            bar.update(task, completed=(done + 1) * repeats)
            console.print(_table(entries))
            for row in entries:
                if "refused" in row:
                    console.print(Text(f"{row['backend']}: {row['refused']}", style="dim"))
            rows += entries
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": facts, "device": where, "protocol": _protocol(where), "rows": rows}
        out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"wrote {out}")


def _report(out: Path) -> None:
    """Pictures, `index.html`, and the pages' tables as Markdown."""
    from relampago.cli.report import results

    results.require()
    from relampago.cli.report import html
    from relampago.cli.report.tables import TABLES

    page = html.write(out)
    made = [make() for file, make in TABLES.values() if not file or results.there(file)]
    (out / "tables.md").write_text("\n\n".join(made) + "\n", encoding="utf-8")
    console.print(f"wrote {page} and tables.md beside it")


def _protocol(where: str) -> dict[str, Any]:
    """What else a reader of the figures must know: the pause before a sample, and this process's priority."""
    if where == "cuda":
        return {"order": "alternating"}
    from relampago.cli import timing

    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    return {
        "order": "alternating",
        "pause_seconds": timing.PAUSE,
        "real_time_priority": policy in (1, 2),  # SCHED_FIFO, SCHED_RR: neighbours wait
    }


def words(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """An option's comma-separated words, each one of those known."""
    from relampago.errors import InvalidInput

    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found or [""]:
        if word not in known:
            raise InvalidInput(f"--{option} has {word!r}; expected some of {', '.join(known)}")
    return found


def _cases(globs: list[str] | None) -> list[Case]:
    from relampago.cases import BENCH
    from relampago.errors import InvalidInput

    for glob in globs or []:
        if not any(fnmatch.fnmatchcase(one.name, glob) for one in BENCH):
            known = ", ".join(one.name for one in BENCH)
            raise InvalidInput(f"--case {glob!r} matches nothing; expected some of {known}")
    return [
        one for one in BENCH
        if not globs or any(fnmatch.fnmatchcase(one.name, glob) for glob in globs)
    ]  # fmt: skip


def _backends(text: str | None) -> list[str]:
    from relampago.select import names

    if text is None:
        return [name for name in names() if name != "reference"]
    return words(text, names(), "backends")


def race(setting: Setting, names: list[str], tick: Any = lambda: None) -> list[dict[str, Any]]:
    """All contestants of one setting: a row each, the refused ones with their reason."""
    from relampago.cli import accuracy, timing
    from relampago.cli.contestants import SDPA, contestant, gradient
    from relampago.cli.explain import torch_dtype
    from relampago.errors import Unsupported

    case = setting.case
    tensors, options = case.make(torch_dtype(setting.dtype), setting.device)
    dout = gradient(tensors, setting.direction)
    oracle = accuracy.Oracle(case, tensors, options, dout)
    runners, rows = {}, []
    slowest = 0.0
    for name in (*names, SDPA):
        row: dict[str, Any] = {
            "case": case.name, "dtype": setting.dtype, "direction": setting.direction, "backend": name,
        }  # fmt: skip
        rows.append(row)
        try:
            entrant = contestant(name, case, tensors, options, dout)
            started = time.perf_counter()
            results = entrant.call() if entrant else None
            slowest = max(slowest, time.perf_counter() - started)
        except Unsupported as refusal:
            row["refused"] = str(refusal).splitlines()[-1].split(name, 1)[-1].strip()
            continue
        if entrant is None or results is None:
            row["refused"] = "cannot say what the case asks"
            continue
        runners[name] = entrant
        row |= {"note": entrant.note, "error": oracle.errors(entrant, results)}
    times = timing.alternate(
        {name: runner.call for name, runner in runners.items()},
        device=setting.device,
        repeats=setting.repeats,
        budget=setting.budget,
        warm=slowest < SLOW,
        tick=tick,
    )
    flops = _flops(case, tensors, options, setting.direction)
    peaks = _peaks(setting, runners)
    for row in rows:
        if (name := row["backend"]) in times:
            row["seconds"] = times[name].record()
            row["flops"] = flops
            row["peak_bytes"] = peaks.get(name)
            row["speed_vs_sdpa"] = (
                times[SDPA].median / times[name].median if SDPA in times else None
            )
    return rows


def _flops(case: Case, tensors: Any, options: dict[str, Any], direction: str) -> int:
    """By FlashAttention-2's formulas, over the pairs that the band shows."""
    import relampago as rl

    mask = {name: options[name] for name in ("causal", "window") if name in options}
    parts = [tensors]
    if isinstance(case.len_q, tuple) and isinstance(case.len_k, tuple):
        cut = [
            t.split(n) for t, n in zip(tensors, (case.len_q, case.len_k, case.len_k), strict=True)
        ]
        parts = [tuple(t[None] for t in one) for one in zip(*cut, strict=True)]
    works = [rl.explain(*(t.to("meta") for t in part), **mask).work for part in parts]
    return sum(w.forward_flops + (w.backward_flops if direction == "both" else 0) for w in works)


def _peaks(setting: Setting, runners: dict[str, Any]) -> dict[str, int | None]:
    from relampago.cli import memory

    if setting.device == "cuda":
        return {name: memory.on_gpu(runner.call) for name, runner in runners.items()}
    if not setting.memory:
        return {}
    jobs = [
        {"case": setting.case.name, "name": name, "dtype": setting.dtype, "direction": setting.direction}
        for name in runners
    ]  # fmt: skip
    found = memory.on_cpu("relampago.cli.contestants:for_memory", jobs)
    return dict(zip(runners, found, strict=True))


def _table(rows: list[dict[str, Any]]) -> Table:
    """One race."""
    first = rows[0]
    way = "forward and backward" if first["direction"] == "both" else first["direction"]
    table = Table(
        title=f"{first['case']}, {first['dtype']}, {way}", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for name in ("median", "min to max", "TFLOP/s", "vs SDPA", "peak mem", "max error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "seconds" in row:
            table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[Text]:
    name = f"{row['backend']} ({row['note']})" if row.get("note") else row["backend"]
    took, ratio = row["seconds"], row["speed_vs_sdpa"]
    error = row["error"].get("out")
    style = "" if ratio is None or row["backend"] == "sdpa" else "green" if ratio >= 1 else "yellow"
    return [
        Text(name),
        Text(seconds(took["median"])),
        Text(between(took["min"], took["max"])),
        Text(f"{row['flops'] / took['median'] / 1e12:.3g}"),
        Text("-" if ratio is None else f"{ratio:.2f}x", style=style),
        Text(size(row["peak_bytes"])),
        Text("-" if error is None else f"{error['max']:.1e}"),
    ]
