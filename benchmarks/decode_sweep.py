"""Flash decoding on this GPU: tiles, warps, stages and splits, beside PyTorch's SDPA, as replays of CUDA graphs.

    python benchmarks/decode_sweep.py [--out DIR] [--limit 170] [--quick] [--dry]

bf16, 32 query heads on 8 kv heads of dim 128, one query. What is timed walks sets of keys and values that add up to
more than 1 GB, so nothing is found in the L2 cache; GB/s counts each key and value once and nothing else. Results are
verified first, against attention in fp32, with all that the kernels allocate filled with NaN. `--dry` runs the script's
own logic on tiny shapes in Triton's interpreter (set TRITON_INTERPRET=1), with no GPU.

Columns: dense = (B, L, G, D) without lengths, where no tile is masked; cache = the same with lengths on the device,
where every tile is; pNN = pages of NN tokens in random order. sdpa_* are fed (B, G, L, D), the layout they like best.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from relampago.backends.triton import decode as kernels  # noqa: E402
from relampago.cache import KVCache, PagedKVCache  # noqa: E402
from relampago.lower import prepare  # noqa: E402
from relampago.op import arrays_of  # noqa: E402
from relampago.options import Options  # noqa: E402
from relampago.plan import Plan  # noqa: E402
from relampago.problem import Device  # noqa: E402

DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
H, G, D = (4, 2, 16) if DRY else (32, 8, 128)
SHAPES = [(1, 64), (3, 96)] if DRY else [(b, kv) for kv in (8192, 32768) for b in (1, 8, 64)]
PAGES = (16,) if DRY else (16, 64, 256)
WORKERS = max(1, min(12, (os.cpu_count() or 2) - 2))
FULL = 1 << 30 if not DRY else 1  # bytes that one replay walks at least
DTYPE = torch.float32 if DRY else torch.bfloat16
PLANS = (
    [Plan(block_q=16, block_k=16)]
    if DRY
    else [
        Plan(block_q=16, block_k=block_k, warps=warps, stages=stages)
        for block_k, warps, stages in (
            (64, 4, 4), (64, 4, 3), (64, 4, 5), (64, 2, 4), (64, 8, 4),
            (32, 4, 4), (32, 4, 6), (32, 2, 6), (128, 4, 3), (128, 8, 3), (128, 4, 2),
        )
    ]
)  # fmt: skip
SDPA = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}


def name_of(plan: Plan) -> str:
    return f"k{plan.block_k}w{plan.warps}s{plan.stages}"


class Report:
    """Rows so far; written at the end, or when time is up."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.limit, self.start = out, limit, time.time()
        self.rows: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.facts: dict[str, Any] = {"torch": torch.__version__}
        timer = threading.Timer(limit, self._give_up)
        timer.daemon = True
        timer.start()

    def left(self) -> float:
        return self.limit - (time.time() - self.start)

    def add(self, **row: Any) -> None:
        self.rows.append(row)

    @contextlib.contextmanager
    def guarded(self, what: str):
        try:
            yield
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {str(error)[:200]}"
            self.errors.append(text)
            if "illegal" in text or "launch failure" in text:  # the context is gone
                self.finish()
                os._exit(3)

    def finish(self) -> None:
        self.facts["seconds"] = round(time.time() - self.start, 1)
        self.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"facts": self.facts, "rows": self.rows, "errors": self.errors}, indent=0)
        (self.out / "decode_sweep.json").write_text(text)
        print_tables(self)
        sys.stdout.flush()

    def _give_up(self) -> None:
        print(f"stopped by the watchdog after {self.limit} s")
        self.finish()
        os._exit(2)


class Pool:
    """One block of random numbers; sets of keys and values are views of it."""

    def __init__(self) -> None:
        most = max(2 * b * kv * G * D for b, kv in SHAPES)
        self.data = torch.empty(2 * most + FULL // 2, dtype=DTYPE, device=DEVICE)
        step = 1 << 28
        for i in range(0, self.data.numel(), step):
            self.data[i : i + step].normal_()

    def sets(self, b: int, kv: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Flat keys and values of as many calls as make up FULL bytes; two at least, 40 at most."""
        n = b * kv * G * D
        count = max(2, min(40, -(-FULL // (2 * n * DTYPE.itemsize))))
        count = min(count, self.data.numel() // (2 * n))
        flat = [self.data[i * n : (i + 1) * n] for i in range(2 * count)]
        return list(zip(flat[::2], flat[1::2], strict=True))


def arrays(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: int) -> Any:
    """A call on flat keys and values, laid out as `kind` says; every sequence has all kv keys."""
    b = q.shape[0]
    if kind == "dense":
        shape = (b, kv, G, D)
        return arrays_of(prepare(q, k.view(shape), v.view(shape), Options(causal=True)))
    if kind == "cache":
        cache = KVCache(b, 1, G, D, dtype=DTYPE, device=DEVICE)
        cache.k, cache.v, cache.room = k.view(b, kv, G, D), v.view(b, kv, G, D), kv
    else:
        page = int(kind[1:])
        pages = b * kv // page
        cache = PagedKVCache(b, 1, page, G, D, most=kv // page, dtype=DTYPE, device=DEVICE)
        cache.k, cache.v = k.view(pages, page, G, D), v.view(pages, page, G, D)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        cache.page_table = order.view(b, -1).to(device=DEVICE, dtype=torch.int32)
    cache.lengths = torch.full((b,), kv, dtype=torch.int32, device=DEVICE)
    return arrays_of(prepare(q, cache.k, cache.v, Options(causal=True), cache=cache))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Attention in fp32 of one sequence, q (Lq, H, D) at the end of k (L, G, D)."""
    q, k, v = q.float(), k.float(), v.float()
    rows, keys = q.shape[0], k.shape[0]
    grouped = q.view(rows, G, H // G, D)
    s = torch.einsum("qgrd,kgd->grqk", grouped, k) * D**-0.5
    seen = torch.arange(keys, device=q.device) <= (
        torch.arange(rows, device=q.device)[:, None] + keys - rows
    )
    s = s.masked_fill(~seen, -torch.inf)
    out = torch.einsum("grqk,kgd->qgrd", torch.softmax(s, -1).nan_to_num(0.0), v)
    return out.reshape(rows, H, D), torch.logsumexp(s, -1).reshape(H, rows)


@contextlib.contextmanager
def poisoned():
    """Inside, torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison(x: Any, lengths: tuple[int, ...]) -> None:
    """NaN in all keys and values beyond the lengths."""
    for t, (b, n) in itertools.product((x.k, x.v), enumerate(lengths)):
        if x.page_table is None:
            t[b, n:] = torch.nan
            continue
        page, table = t.shape[1], x.page_table[b].long()
        t[table[-(-n // page) :]] = torch.nan
        if n % page:
            t[table[n // page], n % page :] = torch.nan


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm() / want.norm().clamp(min=1e-30)).item()


def verify(plan: Plan, kind: str) -> float:
    """The worst relative error with odd lengths, one empty, one and five queries, few and many splits."""
    lengths, room, worst = (37, 0, 64) if DRY else (4001, 0, 5120), 64 if DRY else 5120, 0.0
    g = torch.Generator(device=DEVICE).manual_seed(0)
    for rows, splits in itertools.product((1, 5), (1, 2, 7, None)):
        q = torch.randn(3, rows, H, D, device=DEVICE, generator=g).to(DTYPE)
        k, v = (
            torch.randn(3 * room * G * D, device=DEVICE, generator=g).to(DTYPE) for _ in range(2)
        )
        x = arrays(kind, q, k, v, room)
        if x.lens_k is not None:
            x.lens_k = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
            poison(x, lengths)
        with poisoned():
            out, lse = kernels.decode(x, plan, splits=splits)
        for b in range(3):
            n = room if x.lens_k is None else lengths[b]
            if x.page_table is None:
                keys, values = x.k[b, :n], x.v[b, :n]
            else:
                table = x.page_table[b].long()
                keys, values = (t[table].flatten(0, 1)[:n] for t in (x.k, x.v))
            want, want_lse = reference(q[b], keys, values)
            if n == 0:
                if out[b].abs().max().item() != 0 or not bool((lse[b] == -torch.inf).all()):
                    raise AssertionError("an empty sequence is not 0 and -inf")
                continue
            errors = (relative(out[b], want), (lse[b] - want_lse).abs().max().item())
            if not max(errors) < 1e-2:
                raise AssertionError(f"wrong: rows {rows} splits {splits} b {b}: {errors}")
            worst = max(worst, errors[0])
    return worst


def timed(calls: list[Callable[[], Any]]) -> float:
    """Milliseconds of one call: the median of replays of a graph that walks all of them."""
    if DRY:
        start = time.time()
        for call in calls:
            call()
        return (time.time() - start) * 1e3 / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    graph.replay()
    events[1].record()
    events[1].synchronize()
    once = events[0].elapsed_time(events[1])
    times = []
    for _ in range(max(5, min(50, int(15 / max(once, 1e-3))))):
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times) / len(calls)


def measure_sdpa(report: Report, pool: Pool, b: int, kv: int) -> None:
    sets = pool.sets(b, kv)
    q = torch.randn(b, H, 1, D, dtype=DTYPE, device=DEVICE)
    nbytes = 2 * b * kv * G * D * DTYPE.itemsize
    for name, backend in SDPA.items():

        def call(k, v, backend=backend):
            with sdpa_kernel(SDPBackend.MATH if DRY else backend):
                shape = (b, G, kv, D)
                return F.scaled_dot_product_attention(
                    q, k.view(shape), v.view(shape), enable_gqa=True
                )

        with report.guarded(f"{name} {b}x{kv}"), torch.no_grad():
            ms = timed([lambda k=k, v=v: call(k, v) for k, v in sets])
            report.add(impl=name, b=b, kv=kv, us=ms * 1e3, gbs=nbytes / ms / 1e6)


def measure(
    report: Report, pool: Pool, b: int, kv: int, kind: str, plan: Plan, **how: Any
) -> float:
    """GB/s of one way to decode; checks the first sequence of what it timed."""
    nbytes = 2 * b * kv * G * D * DTYPE.itemsize
    q = torch.randn(b, 1, H, D, dtype=DTYPE, device=DEVICE)
    gbs = 0.0
    with report.guarded(f"{kind} {name_of(plan)} {b}x{kv} {how}"), torch.no_grad():
        xs = [arrays(kind, q, k, v, kv) for k, v in pool.sets(b, kv)]
        out, _ = kernels.decode(xs[0], plan, **how)
        if xs[0].page_table is None:
            keys, values = xs[0].k[0], xs[0].v[0]
        else:
            table = xs[0].page_table[0].long()
            keys, values = (t[table].flatten(0, 1) for t in (xs[0].k, xs[0].v))
        error = relative(out[0], reference(q[0], keys, values)[0])
        if not error < 1e-2:
            raise AssertionError(f"wrong: relative error {error}")
        ms = timed([lambda x=x: kernels.decode(x, plan, **how) for x in xs])
        gbs = nbytes / ms / 1e6
        report.add(
            impl="relampago", kind=kind, plan=name_of(plan), b=b, kv=kv, us=ms * 1e3, gbs=gbs,
            splits=how.get("splits") or chosen(b, kv, kind, plan), auto=how.get("splits") is None,
            chained=how.get("chained"), error=error,
        )  # fmt: skip
    return gbs


def chosen(b: int, kv: int, kind: str, plan: Plan) -> int:
    """The splits that the library takes by itself."""
    device = Device.of(torch.device(DEVICE))
    tile = plan.block_k * 2 * D * DTYPE.itemsize
    slots = device.multiprocessors * kernels.resident(device, plan, tile)
    return kernels.splits_for(b * G, -(-kv // plan.block_k), slots, kind != "dense")


def print_tables(report: Report) -> None:
    print(json.dumps(report.facts))
    shapes = [s for s in SHAPES if any((r["b"], r["kv"]) == s for r in report.rows)]
    print("GB/s (us), decode " + "".join(f"{f'b{b} kv{kv}':>20}" for b, kv in shapes))

    def line(label: str, pick: Callable[[dict[str, Any]], bool], detail: bool = False) -> None:
        cells = []
        for b, kv in shapes:
            rows = [r for r in report.rows if (r["b"], r["kv"]) == (b, kv) and pick(r)]
            best = max(rows, key=lambda r: r["gbs"], default=None)
            text = "-" if best is None else f"{best['gbs']:.0f} ({best['us']:.1f})"
            if detail and best is not None:
                text = f"{best['gbs']:.0f} {best['plan']}/{best['splits']}"
            cells.append(f"{text:>20}")
        if any(c.strip() != "-" for c in cells):
            print(f"{label:18}" + "".join(cells))

    for name in SDPA:
        line(name, lambda r, name=name: r["impl"] == name)
    kinds = ["dense", "cache", *(f"p{page}" for page in PAGES)]
    for kind in kinds:
        line(f"{kind} best", lambda r, kind=kind: r.get("kind") == kind)
        line("  plan/splits", lambda r, kind=kind: r.get("kind") == kind, True)
    for kind in kinds:
        for plan in PLANS:
            same = lambda r, kind=kind, plan=plan: (  # noqa: E731
                r.get("kind") == kind and r.get("plan") == name_of(plan) and r["auto"]
            )
            line(f"{kind} {name_of(plan)} auto", lambda r, f=same: f(r) and r["chained"] is None)
            line("  not chained", lambda r, f=same: f(r) and r["chained"] is False)
    for error in report.errors:
        print("!", error)


def compile_part(part: int) -> None:
    """Compile one worker's share of the kernels, for Triton's cache on disk."""
    work = list(itertools.product(PLANS, ["dense", "cache", *(f"p{page}" for page in PAGES)]))
    room = 5120
    for plan, kind in work[part::WORKERS]:
        for rows in (1, 5):
            with contextlib.suppress(Exception):
                q = torch.randn(3, rows, H, D, dtype=DTYPE, device=DEVICE)
                k, v = torch.randn(2, 3 * room * G * D, dtype=DTYPE, device=DEVICE)
                x = arrays(kind, q, k, v, room)
                for splits in (1, 2):
                    kernels.decode(x, plan, splits=splits)
    torch.cuda.synchronize()


def sweep(report: Report, quick: bool) -> None:
    kinds = ["dense", "cache", *(f"p{page}" for page in PAGES)]
    sound: dict[str, list[Plan]] = {kind: [] for kind in kinds}
    errors = []
    plans = PLANS[:3] if quick else PLANS
    for kind, plan in itertools.product(kinds, plans):
        with report.guarded(f"verify {kind} {name_of(plan)}"):
            errors.append(verify(plan, kind))
            sound[kind].append(plan)
    report.facts["verified"] = f"{len(errors)} of {len(kinds) * len(plans)}"
    report.facts["worst relative error"] = max(errors, default=None)
    report.facts["verify seconds"] = round(time.time() - report.start, 1)
    print(json.dumps(report.facts), flush=True)
    pool = Pool()
    for b, kv in SHAPES:
        measure_sdpa(report, pool, b, kv)
        for kind in ("dense", "cache"):
            found = {}
            for plan in sound[kind]:
                if report.left() > 45:
                    found[plan] = measure(report, pool, b, kv, kind, plan)
            for plan in sorted(found, key=found.__getitem__, reverse=True)[:3]:
                auto = chosen(b, kv, kind, plan)
                others = {1, auto // 2, auto * 3 // 4, auto * 3 // 2, auto * 2, auto * 4, auto * 8}
                for splits in sorted(others - {0, auto}):
                    if report.left() > 45 and splits <= min(256, kv // plan.block_k):
                        measure(report, pool, b, kv, kind, plan, splits=splits)
                if report.left() > 45:
                    measure(report, pool, b, kv, kind, plan, chained=False)
            sound[kind].sort(key=lambda p: -found.get(p, 0.0))
    best = sound["cache"][:4]
    for (b, kv), page in itertools.product(SHAPES, PAGES):
        for plan in best:
            if plan in sound[f"p{page}"] and report.left() > 8:
                measure(report, pool, b, kv, f"p{page}", plan)
    for b, kv in SHAPES:
        if report.left() > 6:
            measure_sdpa(report, pool, b, kv)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", str(HERE / "results")))
    parser.add_argument("--limit", type=float, default=170.0)
    parser.add_argument("--quick", action="store_true", help="three plans only")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile-part", type=int)
    args = parser.parse_args()
    if args.compile_part is not None:
        compile_part(args.compile_part)
        return
    report = Report(Path(args.out), args.limit)
    if not DRY:
        report.facts["device"] = torch.cuda.get_device_name()
        own = [sys.executable, __file__, "--compile-part"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        parts = [subprocess.Popen([*own, str(i)], **quiet) for i in range(WORKERS)]
        until = time.time() + 60
        for part in parts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.wait(max(1.0, until - time.time()))
            if part.poll() is None:
                part.kill()
                report.errors.append("compiling ahead took over 60 s; the rest compiles one by one")
        report.facts["compile seconds"] = round(time.time() - report.start, 1)
    sweep(report, args.quick)
    report.finish()


if __name__ == "__main__":
    main()
