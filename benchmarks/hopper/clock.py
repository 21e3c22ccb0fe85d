"""Times in CUDA-graph replay: what the table chooses, a few variants, and the peers, in shuffled order."""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.hopper.watched import Rows, say
from relampago.masks.rules import Band
from relampago.plan import Plan
from relampago.problem import Arrays, Device, Problem
from relampago.select import by_name

Call = Callable[[], Any]
SHAPES = ((16, 1024), (4, 4096), (1, 16384), (1, 32768))  # batch, length: 16k or 32k tokens
DIMS = ((64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (192, 192))
ROUNDS = 2
WIDTH = 2048  # heads times dim, as the papers have it


class Variant(NamedTuple):
    """A plan that is timed beside the table's."""

    name: str
    dims: tuple[int, int]
    plan: Plan
    causal: tuple[bool, ...] = (False, True)


def _plan(block_q: int, block_k: int, stages: int, **more: int) -> Plan:
    return Plan(block_q=block_q, block_k=block_k, warps=4, stages=stages, schedule=2, **more)


FULL = (False,)
VARIANTS = (
    Variant("rotate", (64, 64), _plan(192, 128, 4, pin=1, rotate=1), FULL),
    Variant("turns", (64, 64), _plan(192, 128, 4, pingpong=1), FULL),
    Variant("rotate", (128, 128), _plan(128, 128, 2, rotate=1), FULL),
    Variant("turns", (128, 128), _plan(128, 128, 2, pingpong=1), (True,)),
    Variant("rotate", (256, 256), _plan(128, 64, 2, rotate=1), FULL),
    Variant("turns", (96, 96), _plan(128, 128, 3, pingpong=1)),
    Variant("pin", (96, 96), _plan(128, 128, 3, pin=1)),
    Variant("192 rows", (96, 96), _plan(192, 64, 4, pin=1)),
    Variant("turns", (192, 128), _plan(128, 128, 2, pingpong=1)),
    Variant("pin", (192, 128), _plan(128, 128, 2, pin=1)),
    Variant("pin", (192, 192), _plan(128, 64, 2, pin=1)),
)


class Cell(NamedTuple):
    """One shape."""

    dim: int
    dim_v: int
    causal: bool
    batch: int
    length: int

    @property
    def heads(self) -> int:
        """As many as make the width."""
        return max(1, WIDTH // self.dim)

    @property
    def flops(self) -> float:
        """Of both products; half if causal."""
        pairs = self.batch * self.heads * self.length**2
        return 2 * pairs * (self.dim + self.dim_v) * (0.5 if self.causal else 1.0)

    def arrays(self) -> Arrays:
        """Random queries, keys and values in bf16."""
        shape = (self.batch, self.length, self.heads)
        q, k, v = (
            torch.randn(*shape, d, device="cuda", dtype=torch.bfloat16)
            for d in (self.dim, self.dim, self.dim_v)
        )
        band = Band(0, None, 0 if self.causal else None)
        n = self.length
        return Arrays(q=q, k=k, v=v, scale=self.dim**-0.5, band=band, len_q=n, len_k=n)

    def plans(self) -> dict[str, Plan]:
        """The table's, and those variants that differ."""
        p = Problem(
            device=Device("cuda", "sm90", 132), batch=self.batch, heads_q=self.heads, heads_kv=self.heads,
            len_q=self.length, len_k=self.length, dim=self.dim, dim_v=self.dim_v, dtype="bf16",
            right=self.causal,
        )  # fmt: skip
        plans = {"table": by_name("gluon_sm90").plan(p)}
        for variant in VARIANTS:
            fits = variant.dims == (self.dim, self.dim_v) and self.causal in variant.causal
            if fits and variant.plan not in plans.values():
                plans[variant.name] = variant.plan
        return plans

    def ours(self) -> None:
        """Launch each plan once."""
        small = self._replace(batch=1)
        for plan in self.plans().values():
            _forward(plan, small.arrays())


def cells() -> Iterator[Cell]:
    """All shapes; of the dims that no paper has, two lengths."""
    for dim, dim_v in DIMS:
        for causal in (False, True):
            for batch, length in SHAPES if dim == dim_v and dim & (dim - 1) == 0 else SHAPES[1:3]:
                yield Cell(dim, dim_v, causal, batch, length)


def _forward(plan: Plan, x: Arrays) -> Any:
    from relampago.backends.gluon import launch

    return launch.forward(plan, x, torch.cuda.get_device_properties(0).multi_processor_count)


def import_peers(names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """FA3 and FA4 as `fn(q, k, v, causal=…)`, where their modules have been unpacked."""
    site = Path(tempfile.gettempdir()) / "peers_site"
    paths = {"fa3": ["fa3"], "fa4": ["fa4", "fa4/nvidia_cutlass_dsl/dsl_packages"]}
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        sys.path[:0] = [str(site / path) for path in paths[name]]
        try:
            if name == "fa3":
                from fa3_fwd_interface import flash_attn_func  # type: ignore[import-not-found]
            else:
                from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
            found[name] = flash_attn_func
        except Exception as fault:
            say("note", name=name, why=f"{type(fault).__name__}: {str(fault)[-200:]}")
    return found


def contestants(cell: Cell, x: Arrays, peers: dict[str, Callable[..., Any]]) -> dict[str, Call]:
    """Everything that is timed for a shape, by name."""
    transposed = [t.transpose(1, 2) for t in (x.q, x.k, x.v)]

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
            return F.scaled_dot_product_attention(*transposed, is_causal=cell.causal)

    calls: dict[str, Call] = {"cudnn": cudnn}
    for name, fn in peers.items():
        calls[name] = lambda fn=fn: fn(x.q, x.k, x.v, causal=cell.causal)
    for name, plan in cell.plans().items():
        calls[name] = lambda plan=plan: _forward(plan, x)
    return calls


def replays(fn: Call, lasting: float = 35.0) -> Callable[[], float]:
    """A call that takes the median time of fn in CUDA-graph replays, a few calls in each; milliseconds.

    Args:
        fn: what is timed.
        lasting: how long a take is to last, in milliseconds; four replays at least.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def span(run: Call) -> float:
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    span(fn)
    once = max(span(fn), 0.02)
    calls = max(1, min(10, int(4 / once)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    count = max(4, int(lasting / (calls * once)))

    def take() -> float:
        span(graph.replay)
        return statistics.median(span(graph.replay) / calls for _ in range(count))

    return take


def milliseconds(fn: Call) -> float:
    """Its first take."""
    return replays(fn)()


def clock(seconds: float, *names: str) -> None:
    """All cells, twice, each time in another order."""
    until, chance = time.time() + seconds, random.Random(0)
    peers = import_peers(names)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    say("ceiling", tflops=2 * 8192**3 / milliseconds(lambda: a @ b) * 1e-9)
    for turn in range(ROUNDS):
        todo = list(cells())
        chance.shuffle(todo)
        for cell in todo:
            jobs = list(contestants(cell, cell.arrays(), peers).items())
            chance.shuffle(jobs)
            for name, fn in jobs:
                if time.time() > until:
                    return
                row = {"turn": turn, "name": name, **cell._asdict()}
                try:
                    ms = milliseconds(fn)
                    say("time", ms=ms, tflops=cell.flops / ms * 1e-9, **row)
                except Exception as fault:
                    say("note", why=f"{type(fault).__name__}: {str(fault)[-200:]}", **row)


def report(rows: Rows) -> None:
    """TFLOP/s of both rounds, and the ratio of the table's choice to the best peer."""
    for row in rows:
        if row["kind"] in ("note", "ceiling"):
            print(row)
    timed = [row for row in rows if row["kind"] == "time"]
    for dims in DIMS:
        mine = [r for r in timed if (r["dim"], r["dim_v"]) == dims]
        shapes = sorted({(r["causal"], -r["batch"], r["length"]) for r in mine})
        heads = [f"{'causal' if c else 'full'} {-b}x{n // 1024}k" for c, b, n in shapes]
        print(f"\nd{dims[0]}/{dims[1]}".ljust(16) + "".join(f"{head:>14}" for head in heads))
        best: dict[str, list[float]] = {}
        for name in dict.fromkeys(["cudnn", "fa3", "fa4", "table", *(r["name"] for r in mine)]):
            found = [
                [r["tflops"] for r in mine
                 if r["name"] == name and (r["causal"], -r["batch"], r["length"]) == shape]
                for shape in shapes
            ]  # fmt: skip
            if any(found):
                best[name] = [statistics.median(x) if x else 0.0 for x in found]
                texts = ["/".join(f"{x:.0f}" for x in xs) or "-" for xs in found]
                print(f"{name:16}" + "".join(f"{text:>14}" for text in texts))
        with contextlib.suppress(KeyError, ValueError):
            ratios = [
                own / max(best[p][i] for p in ("cudnn", "fa3", "fa4") if p in best)
                for i, own in enumerate(best["table"])
            ]
            print(f"{'table / best':16}" + "".join(f"{ratio:>14.3f}" for ratio in ratios))
