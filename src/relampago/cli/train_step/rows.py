"""From results to rows: ratios, the split of the peak, and estimates for what ran out of memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relampago.cli.train_step.cell import WITHOUT
from relampago.cli.train_step.shapes import Shape, shape_of
from relampago.explain import PEAKS

Results = Mapping[tuple[int, str], Mapping[str, Any]]
STATIC = ("weights", "gradients", "optimiser")


@dataclass(frozen=True)
class Row:
    """One line of the table; figures are None where they are not known.

    Args:
        length: tokens.
        kind: of attention.
        seconds: of a step, the median.
        peak: bytes allocated at the peak.
        split: bytes of weights, gradients, optimiser, activations (the growth of a step without attention) and
            attention (what it adds to that).
        estimate: whether the figures are extrapolated from a shorter length of the same run.
        said: why there is no measurement.
    """

    length: int
    kind: str
    seconds: float | None = None
    peak: int | None = None
    split: Mapping[str, int] | None = None
    estimate: bool = False
    said: str = ""

    @property
    def short(self) -> str:
        """`said` in a word or three."""
        return self.said.split(":")[0]

    @property
    def beyond(self) -> int | None:
        """Bytes beyond weights, gradients and optimiser."""
        if self.peak is None or self.split is None:
            return None
        return self.peak - sum(self.split[name] for name in STATIC)

    def utilisation(self, shape: Shape, peak_flops: float | None) -> float | None:
        """MFU: the model's FLOPs over what the chip could do in that time."""
        if self.seconds is None or peak_flops is None or self.kind == WITHOUT:
            return None
        return shape.model_flops(self.length) / self.seconds / peak_flops


def of_record(record: Mapping[str, Any]) -> tuple[Shape, list[Row]]:
    """The model and the rows of a JSON file."""
    first = record["cells"][0]
    shape = shape_of(first["model"], first["layers"])
    results = {(cell["length"], cell["attention"]): cell["result"] for cell in record["cells"]}
    return shape, rows(results, shape)


def peak_flops(record: Mapping[str, Any]) -> float | None:
    """Dense bf16 FLOP/s of the record's GPU by its data sheet; None on a CPU or where it is not known."""
    if record["cells"][0]["device"] != "cuda":
        return None
    peaks = PEAKS.get(record["machine"]["gpus"][0]["arch"])
    return None if peaks is None else peaks[0]


def rows(results: Results, shape: Shape) -> list[Row]:
    """In order of length, then as measured."""
    known = {key: _measured(key, results) for key, found in results.items() if "samples" in found}
    made = []
    for (length, kind), found in results.items():
        row = known.get((length, kind))
        made.append(row if row else _missing(length, kind, found, known, shape))
    return sorted(made, key=lambda row: row.length)


def _measured(key: tuple[int, str], results: Results) -> Row:
    length, kind = key
    found = results[key]
    split = dict(found["bytes"])
    bare = results.get((length, WITHOUT), {}).get("beyond")
    if found["beyond"] is not None and bare is not None:
        split |= {"activations": bare, "attention": max(0, found["beyond"] - bare)}
    return Row(length, kind, statistics.median(found["samples"]), found["peak"], split)


def _missing(
    length: int,
    kind: str,
    found: Mapping[str, Any],
    known: Mapping[tuple[int, str], Row],
    shape: Shape,
) -> Row:
    if "out_of_memory" not in found:
        word = next(name for name in ("stopped", "failed", "not_reached") if name in found)
        return Row(length, kind, said=f"{word.replace('_', ' ')}: {found[word]}")
    said = f"out of memory: while {found['stage']}, {found['out_of_memory']}"
    shorter = max((n for n, k in known if k == kind and (n, WITHOUT) in known), default=None)
    bare = known.get((length, WITHOUT))
    if shorter is None or bare is None:
        return Row(length, kind, said=said)
    return _estimate(known[shorter, kind], known[shorter, WITHOUT], bare, shape, said)


def _estimate(row: Row, least: Row, bare: Row, shape: Shape, said: str) -> Row:
    """What `row.kind` would take at `bare.length`, by what it adds to a step without attention at its own length.

    Scores grow with the square of the length. Only sdpa under a causal mask has none: its time grows with the visible
    pairs, its memory with the length.
    """
    assert row.seconds is not None
    assert least.seconds is not None
    assert bare.seconds is not None
    longer = bare.length / row.length
    tiled = row.kind != "eager" and shape.window is None
    pairs = shape.attention(bare.length).pairs / shape.attention(row.length).pairs
    seconds = bare.seconds + (pairs if tiled else longer**2) * (row.seconds - least.seconds)
    if row.split is None or bare.split is None or bare.peak is None or "attention" not in row.split:
        return Row(bare.length, row.kind, seconds, estimate=True, said=said)
    attention = int((longer if tiled else longer**2) * row.split["attention"])
    split = {**bare.split, "attention": attention}
    return Row(bare.length, row.kind, seconds, bare.peak + attention, split, True, said)


def gains(made: list[Row]) -> list[str]:
    """What relampago gains over each other kind at the longest length where both were measured, in words."""
    measured = [row for row in made if row.seconds is not None and not row.estimate]
    ours = {row.length: row for row in measured if row.kind == "relampago"}
    said = []
    for kind in ("eager", "sdpa"):
        common = [row for row in measured if row.kind == kind and row.length in ours]
        if not common:
            continue
        theirs = max(common, key=lambda row: row.length)
        mine = ours[theirs.length]
        assert theirs.seconds is not None
        assert mine.seconds is not None
        words = f"{theirs.length} tokens: {theirs.seconds / mine.seconds:.2f}× the speed of {kind}"
        if mine.beyond is not None and theirs.beyond:
            words += f", {_fewer(mine.beyond, theirs.beyond)} memory beyond weights, gradients and optimiser"
        if mine.peak is not None and theirs.peak:
            words += f" ({_fewer(mine.peak, theirs.peak)} in all)"
        said.append(words)
    return said


def _fewer(mine: int, theirs: int) -> str:
    share = f"{abs(1 - mine / theirs):.0%}"
    return "as much" if share == "0%" else f"{share} {'less' if mine < theirs else 'more'}"
