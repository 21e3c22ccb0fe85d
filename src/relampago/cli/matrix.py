"""`relampago matrix`: which backend can do what on which architecture, asked of `why_not` itself; needs no GPU.

Rows are features, dtypes and head dims; columns are backends and architectures, those that say the same in every row
together. The README's table and tests/support_matrix.txt are this command's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from relampago.cli.console import console

if TYPE_CHECKING:
    from relampago.problem import Device, Problem

BOTH, FORWARD, NEITHER = "yes", "forward", "-"
SIGNS = {BOTH: "✓", FORWARD: "forward", NEITHER: "-"}
TITLE = "yes: forward and backward. forward: no gradients. -: refused."


class Row(NamedTuple):
    """A line of the table.

    Args:
        group: "feature", "dtype" or "head dim".
        label: what is asked.
        facts: fields of the `Problem` that differ from a plain causal bf16 one of head dim 128.
        backward: fields that only its backward has.
    """

    group: str
    label: str
    facts: dict[str, Any]
    backward: dict[str, Any] = {}  # noqa: RUF012

    def problems(self, device: Device) -> tuple[Problem, Problem]:
        """What is asked of a backend there: forward and backward."""
        from dataclasses import replace

        from relampago.problem import Problem

        plain = Problem(
            device=device, batch=2, heads_q=8, heads_kv=8, len_q=1024, len_k=1024, dim=128, dim_v=128,
            dtype="bf16", right=True,
        )  # fmt: skip
        forward = replace(plain, **self.facts)
        return forward, replace(forward.backward(), **self.backward)


class Column(NamedTuple):
    """What a backend says on some architectures, and why it refuses there."""

    backend: str
    archs: tuple[str, ...]
    cells: tuple[str, ...]
    reasons: tuple[str | None, ...]

    @property
    def everywhere(self) -> bool:
        """Whether it says the same on all architectures that are asked for."""
        from relampago.cli.machine import ARCHITECTURES

        return len(self.archs) == len(ARCHITECTURES)

    @property
    def name(self) -> str:
        """The backend, with its architectures where it has several columns or odd ones."""
        plain = self.everywhere or self.archs == (self.backend,)
        return self.backend if plain else f"{self.backend} on {self.place}"

    @property
    def place(self) -> str:
        """The architectures, in words."""
        return "everywhere" if self.everywhere else " ".join(self.archs)


def matrix(
    markdown: Annotated[bool, typer.Option("--markdown", help="for README and docs")] = False,
    text: Annotated[
        bool, typer.Option("--text", help="plain, as tests/support_matrix.txt")
    ] = False,
) -> None:
    """Print which backend can do what, on which architecture."""
    if markdown:
        print(as_markdown())
    elif text:
        print(as_text())
    else:
        console.print(_as_rich())
        for line in notes():
            console.print(Text(line, style="dim"))


def rows() -> list[Row]:
    """All lines of the table."""
    from relampago.problem import Layout

    capped, sloped, plain, flat = _mods()
    features = [
        Row("feature", "full", {"right": False}),
        Row("feature", "causal", {}),
        Row("feature", "fewer kv heads (GQA, MQA)", {"heads_kv": 2}),
        Row("feature", "dim of v unlike that of q", {"dim": 192}),
        Row("feature", "window", {"left": True}),
        Row("feature", "prefix", {"prefix": True}),
        Row("feature", "documents", {"tables": True}),
        Row("feature", "BlockSparse, mask functions", {"blocks": True}),
        Row("feature", "dense masks", {"mask": True}),
        Row("feature", "softcap", {"mods": capped}),
        Row("feature", "ALiBi", {"mods": sloped}),
        Row("feature", "score mods", {"mods": plain}),
        Row("feature", "score mods, tables with gradients", {"mods": plain}, {"mod_grads": True}),
        Row("feature", "score mods without dfn", {"mods": flat}),
        Row("feature", "bias, with its gradient", {"bias": True}, {"bias_grad": True}),
        Row("feature", "sinks", {"sinks": True}),
        Row("feature", "dropout", {"dropout": True}),
        Row("feature", "deterministic", {"deterministic": True}),
        Row("feature", "batch-invariant", {"batch_invariant": True}),
        Row("feature", "tangents; second derivatives", {"moving": True}),
        Row("feature", "max logits", {"statistic": "max logits"}, {"statistic": ""}),
        Row("feature", "row statistics", {"statistic": "row statistics"}),
        Row("feature", "column sums", {"statistic": "column sums"}),
        Row("feature", "packed sequences", {"layout_q": Layout.RAGGED, "layout_k": Layout.RAGGED}),
        Row("feature", "keys in a cache", {"layout_k": Layout.CACHE, "len_q": 1}),
        Row("feature", "keys in pages", {"layout_k": Layout.PAGED, "len_q": 1}),
        Row("feature", "FP8 products", {"fp8": "products"}, {"fp8": ""}),
        Row("feature", "FP8 keys in pages", {"layout_k": Layout.PAGED, "len_q": 1, "fp8": "cache"}),
    ]
    dtypes = [Row("dtype", name, {"dtype": name}) for name in ("bf16", "fp16", "fp32", "fp64")]
    dims = [
        Row("head dim", str(n), {"dim": n, "dim_v": n})
        for n in (16, 32, 40, 64, 80, 96, 128, 192, 256, 512)
    ]
    return features + dtypes + dims


def _mods() -> list[tuple[str, ...]]:
    """What a Problem carries for softcap, ALiBi, a user's mod and one without a derivative."""
    import torch

    import relampago as rl
    from relampago.cli.machine import ARCHITECTURES

    def twice(score, q, k, head, args, math):
        return 2 * score

    def two(score, q, k, head, args, math):
        return 2

    q = torch.empty(1, 8, 2, 16, device="meta")
    calls: list[dict[str, Any]] = [
        {"softcap": 30.0},
        {"alibi_slopes": torch.empty(2, device="meta")},
        {"score_mod": rl.ScoreMod(twice, two)},
        {"score_mod": rl.ScoreMod(twice)},
    ]
    device = ARCHITECTURES["cpu"]
    return [rl.explain(q, q, q, device=device, **options).problem.mods for options in calls]


def columns() -> list[Column]:
    """A column per backend and set of architectures on which it says the same; none where it refuses everything."""
    from relampago.backends import BACKENDS
    from relampago.cli.machine import ARCHITECTURES

    asked, found = rows(), []
    for backend in BACKENDS:
        groups: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
        for arch, device in ARCHITECTURES.items():
            said = tuple(_cell(backend, *row.problems(device)) for row in asked)
            groups.setdefault(said, []).append(arch)
        for said, archs in groups.items():
            cells, reasons = zip(*said, strict=True)
            if set(cells) != {NEITHER}:
                found.append(Column(backend.name, tuple(archs), cells, reasons))
    return found


def _cell(backend: Any, forward: Problem, backward: Problem) -> tuple[str, str | None]:
    if (reason := backend.why_not(forward)) is not None:
        return NEITHER, reason
    reason = backend.why_not(backward)
    return (BOTH, None) if reason is None else (FORWARD, reason)


def notes() -> list[str]:
    """Each reason once: who gives it, and for which rows."""
    asked, cols = rows(), columns()
    given: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for column in cols:
        reasons: dict[str, list[str]] = {}
        for row, reason in zip(asked, column.reasons, strict=True):
            if reason is not None:
                reasons.setdefault(reason, []).append(row.label)
        for reason, labels in reasons.items():
            given.setdefault((reason, tuple(labels)), []).append(column.name)
    return [
        f"{', '.join(labels)}: {reason} ({'all' if len(who) == len(cols) else ', '.join(who)})"
        for (reason, labels), who in given.items()
    ]


def as_text() -> str:
    """Plain text, aligned."""
    cols = columns()
    head = [["", "", *(c.backend for c in cols)], ["", "", *(c.place for c in cols)]]
    lines = head + [
        [row.group, row.label, *(c.cells[i] for c in cols)] for i, row in enumerate(rows())
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    aligned = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([TITLE, "", *aligned, "", *notes()])


def as_markdown() -> str:
    """A Markdown table and its notes."""
    cols = columns()
    head = ["", *(f"{c.backend}<br>{c.place}" for c in cols)]
    lines = [_line(head), _line(["---"] + [":-:"] * len(cols))]
    group = None
    for i, row in enumerate(rows()):
        label = row.label if row.group == "feature" else f"{row.group} {row.label}"
        if row.group != group and group is not None:
            lines.append(_line([f"**{row.group}**"] + [""] * len(cols)))
        group = row.group
        lines.append(_line([label, *(SIGNS[c.cells[i]] for c in cols)]))
    return "\n".join([*lines, "", *(f"- {note}" for note in notes())])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _as_rich() -> Table:
    table = Table(title=TITLE, title_justify="left")
    table.add_column("")
    cols = columns()
    for column in cols:
        table.add_column(f"{column.backend}\n{column.place}", justify="center")
    styles = {BOTH: "green", FORWARD: "yellow", NEITHER: "dim"}
    group = None
    for i, row in enumerate(rows()):
        if row.group != group and group is not None:
            table.add_section()
        group = row.group
        label = row.label if row.group == "feature" else f"{row.group} {row.label}"
        cells = [Text(SIGNS[c.cells[i]], style=styles[c.cells[i]]) for c in cols]
        table.add_row(label, *cells)
    return table
