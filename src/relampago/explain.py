"""explain: what a call would do and what it costs, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from relampago.lower import prepare
from relampago.op import problem_of
from relampago.options import Options
from relampago.plan import Plan
from relampago.problem import Device, Facts, Problem
from relampago.select import choose, refusals
from relampago.work import Work

# Dense bf16 matrix FLOP/s and memory bytes/s by data sheet: for the floor of the roofline only.
PEAKS = {
    "sm80": (312e12, 2.0e12, "A100 data sheet"),
    "sm89": (165e12, 1.0e12, "RTX 4090 data sheet"),
    "sm90": (989e12, 4.8e12, "H200 data sheet"),
    "sm100": (2250e12, 8.0e12, "B200 data sheet"),
    "gfx942": (1307e12, 5.3e12, "MI300X data sheet"),
    "gfx950": (2300e12, 8.0e12, "MI355X data sheet"),
}


@dataclass(frozen=True)
class Explanation:
    """A call's problem, who would run it and how, who refused and why, and its costs."""

    problem: Problem
    backend: str
    plan: Plan
    refused: dict[str, str]
    work: Work
    itemsize: int

    @property
    def floor_seconds(self) -> float | None:
        """The roofline: no kernel on this architecture can be faster. None where the peaks are not known."""
        peaks = PEAKS.get(self.problem.device.arch)
        if peaks is None:
            return None
        flops, bytes_per_second, _ = peaks
        return max(
            self.work.forward_flops / flops, self.work.flash_bytes(self.itemsize) / bytes_per_second
        )

    def rows(self) -> list[tuple[str, str]]:
        """What to print, label and value."""
        w, size = self.work, self.itemsize
        rows = [
            ("problem", str(self.problem)),
            ("backend", self.backend),
            ("plan", f"{self.plan.block_q} queries x {self.plan.block_k} keys"),
            (
                "FLOPs",
                f"{quantity(w.forward_flops)} forward, {quantity(w.backward_flops)} backward",
            ),
            (
                "bytes moved",
                f"{quantity(w.flash_bytes(size))}B flash, {quantity(w.standard_bytes(size))}B standard",
            ),
            (
                "extra memory",
                f"{quantity(w.flash_extra_memory())}B flash, {quantity(w.standard_extra_memory(size))}B standard",
            ),
        ]
        if self.floor_seconds is not None:
            source = PEAKS[self.problem.device.arch][2]
            rows.append(("floor", f"{self.floor_seconds * 1e3:.3f} ms forward ({source})"))
        return rows + [(f"not {name}", why) for name, why in self.refused.items()]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:{width}}  {value}" for label, value in rows)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, device: Device | None = None, **options: Any
) -> Explanation:
    """Say which backend would run `attention(q, k, v, **options)`, with which plan and at what cost.

    Args:
        q: (B, Lq, H, D); meta tensors will do.
        k: (B, Lk, G, D).
        v: (B, Lk, G, E).
        device: the machine to assume; q's own if None.
        options: those of `attention`, without return_lse.

    Returns:
        An `Explanation`; print it.

    Raises:
        InvalidInput: as `attention`.
        Unsupported: no backend can run the call there.
    """
    call = prepare(q, k, v, Options(**options))
    problem, facts = problem_of(call, device), Facts.decode(call.facts)
    backend = choose(problem, facts.backend)
    refused = {name: why for name, why in refusals(problem).items() if why is not None}
    plan = Plan(**dict(facts.plan)) if facts.plan else backend.plan(problem)
    sizes = (call.sizes[0], call.sizes[1], call.sizes[2])
    work = Work.of_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape), sizes, facts)
    return Explanation(problem, backend.name, plan, refused, work, q.element_size())


def quantity(n: float) -> str:
    """1234567 as 1.23 M."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= factor:
            return f"{n / factor:.3g} {letter}"
    return f"{n:.3g} "
