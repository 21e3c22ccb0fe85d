"""The tables of README and docs, each made from a committed JSON file, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from relampago.cli.console import seconds, size
from relampago.cli.report import features
from relampago.cli.report.markdown import markdown
from relampago.cli.report.results import load, there
from relampago.plan import Plan, table
from relampago.problem import Device, Layout, Problem


def cpu() -> str:
    """Ratios to SDPA by case, dtype and direction."""
    data = load("cpu/bench.json")
    found: dict[str, dict[tuple[str, str], float]] = {}
    for row in data["rows"]:
        if row["backend"] == "cpu" and "seconds" in row:
            found.setdefault(row["case"], {})[row["dtype"], row["direction"]] = row["speed_vs_sdpa"]
    columns = [("fp32", "forward"), ("fp32", "both"), ("bf16", "forward"), ("bf16", "both")]
    rows = [
        [case, *(f"{ratios[c]:.2f}×" if ratios.get(c) else "–" for c in columns)]
        for case, ratios in found.items()
    ]
    facts = data["machine"]
    note = (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}; speed relative to "
        "`F.scaled_dot_product_attention`, medians in alternating order, each sample after a pause in which torch's "
        f"OpenMP threads stop spinning{at_priority(data)} (`cpu/bench.json`).{at_ordinary_priority(columns)}"
    )
    head = ["CPU, 8 heads", "fp32 forward", "fp32 fwd+bwd", "bf16 forward", "bf16 fwd+bwd"]
    return markdown("CPU: speed against SDPA", head, rows, note)


def at_priority(data: Any) -> str:
    """How the process was kept from its neighbours, if it was."""
    real_time = data.get("protocol", {}).get("real_time_priority")
    return ", at real-time priority on a shared machine" if real_time else ""


def at_ordinary_priority(columns: list[tuple[str, str]]) -> str:
    """The short cases as a user meets them: where waking threads costs most."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    data = load("cpu/bench-1k.json")
    for row in data["rows"]:
        if row["backend"] == "cpu":
            found.setdefault(row["case"], {})[row["dtype"], row["direction"]] = row["speed_vs_sdpa"]
    cases = (
        f"{case} {', '.join(f'{ratios[c]:.2f}×' for c in columns)}"
        for case, ratios in found.items()
    )
    return f" At ordinary priority on a quiet machine: {'; '.join(cases)} (`cpu/bench-1k.json`)."


def memory() -> str:
    """Peak memory beside the inputs by length, on the CPU."""
    data = load("cpu/bench.json")
    found: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
    for row in data["rows"]:
        kind, length = row["case"].rsplit("-", 1)
        if kind in ("full-d64", "causal-d64") and row["dtype"] == "fp32" and row.get("peak_bytes"):
            found.setdefault((kind, length), {})[row["backend"], row["direction"]] = row[
                "peak_bytes"
            ]
    columns = [(who, way) for way in ("forward", "both") for who in ("cpu", "sdpa")]
    rows = [
        [f"{kind} {length}", *(size(peaks[c]) if c in peaks else "–" for c in columns)]
        for (kind, length), peaks in found.items()
    ]
    head = ["peak beside the inputs", "forward", "SDPA", "fwd+bwd", "SDPA fwd+bwd"]
    facts = data["machine"]
    note = (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, fp32, 8 heads; growth of a "
        "process of its own (`cpu/bench.json`)."
    )
    return markdown("CPU: memory by length", head, rows, note)


def triton() -> str:
    """The portable kernels on the H200 through the public API, beside SDPA's backends in the same run."""
    data = load("h200/triton.json")
    measured = [row for row in data["rows"] if row["what"] == "16k"]
    peers = {
        name: label
        for name, label in (("flash", "FA2"), ("cudnn", "cuDNN"), ("flex", "flex"))
        if any(name in row[way] for row in measured for way in ("forward", "backward"))
    }  # who failed is left out of a row
    rows = []
    for row in measured:
        cells = [f"d {row['dim']} {'causal' if row['causal'] else 'full'}"]
        for rates in (row["forward"], row["backward"]):
            ours = rates["triton"]
            cells += [f"{rates[n]:.0f}" if n in rates else "–" for n in ("triton", *peers)]
            cells.append(f"{ours / rates['flash']:.2f}×" if "flash" in rates else "–")
        rows.append(cells)
    rows.sort(key=lambda cells: int(cells[0].split()[1]))
    missing = [
        d for d in (64, 128, 256) if not any(cells[0].startswith(f"d {d} ") for cells in rows)
    ]
    head = ["TFLOP/s"]
    for way in ("forward", "backward"):
        head += [way, *peers.values(), "/ FA2"]
    note = (
        f"{data['machine']}, torch {data['torch']}, Triton {data['triton']}, bf16, 16k tokens, heads = 2048 / d, "
        f"{data['date']}; FA2, cuDNN: SDPA's, in the same run (`h200/triton.json`).{_others(data['rows'])}"
    ) + "".join(f" d {d} was not reached in this run." for d in missing)
    return markdown("Portable Triton kernels on the H200", head, rows, note)


def _others(rows: list[dict[str, Any]]) -> str:
    """Window and memory in a sentence each. (Host time has a run of its own, `host-time.json`.)"""
    found = {row["what"]: row for row in rows}
    peaks = [row for row in rows if row["what"] == "memory"]
    text = ""
    if window := found.get("window 1024 at 32k"):
        text += f" Window 1024 at 32k: {window['ratio']:.1f}× faster than full causal."
    if peaks:
        sizes = ", ".join(f"{row['mib']:.0f} MiB at {row['length'] // 1024}k" for row in peaks)
        text += f" Peak memory of forward and backward beyond the inputs, 8 heads, d 64: {sizes}."
    return text


def decode() -> str:
    """Decoding with the tables' plans, KV bytes per second."""
    data = load("h200/decode-sweep.json")
    shapes = [(b, kv) for kv in (8192, 32768) for b in (1, 8, 64)]
    kinds = {
        "relampago, contiguous": ("dense", Layout.DENSE), "relampago, cache": ("cache", Layout.CACHE),
        **{f"relampago, pages of {n}": (f"p{n}", Layout.PAGED) for n in (16, 64, 256)},
    }  # fmt: skip
    rows = []
    for label in ("SDPA cuDNN", *kinds):
        best: dict[tuple[int, int], float] = {}
        for r in data["rows"]:
            shape = (r["b"], r["kv"])
            if label in kinds:
                kind, layout = kinds[label]
                fits = (r.get("kind"), r.get("plan")) == (kind, decoding_plan(layout, *shape))
            else:
                fits = r["impl"] == "sdpa_cudnn"
            if fits and r.get("auto", True) and r.get("chained") is not False and "gbs" in r:
                best[shape] = max(best.get(shape, 0.0), r["gbs"])
        rows.append([label, *(f"{best[s]:.0f}" if s in best else "–" for s in shapes)])
    head = ["GB/s of keys and values", *(f"b {b}, {kv // 1024}k" for b, kv in shapes)]
    note = "NVIDIA H200, 32/8 heads, d 128, bf16, CUDA graph, 2026-12-01, one run (`h200/decode-sweep.json`)."
    return markdown("Decoding on the H200", head, rows, note)


def decoding_plan(layout: Layout, batch: int, keys: int) -> str:
    """What sm90.toml has for a shape of the run, by the run's name."""
    p = Problem(
        device=Device("cuda", "sm90", 132), batch=batch, heads_q=32, heads_kv=8, len_q=1, len_k=keys, dim=128,
        dim_v=128, dtype="bf16", layout_k=layout,
    )  # fmt: skip
    plan = next(row.plan for row in table("sm90")["triton.decode"] if row.matches(p))
    return f"k{plan.block_k}w{plan.warps}s{plan.stages}"


SHAPES = {(16, 1024): "16 × 1k", (4, 4096): "4 × 4k", (1, 16384): "1 × 16k", (1, 32768): "1 × 32k"}
FORWARD = tuple(  # a cell is of the first that has it
    f"h200/hopper-{run}.json" for run in ("masks", "tall", "softmax", "halves", "chain", "forward")
)
WIDTH = 2048  # heads times dim
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def chosen(
    dim: int, dim_v: int, causal: bool, batch: int, length: int, kernel: str = "forward"
) -> Plan:
    """What sm90.toml has for a shape of the run."""
    p = Problem(
        device=Device("cuda", "sm90", 132), batch=batch, heads_q=WIDTH // dim, heads_kv=WIDTH // dim, len_q=length,
        len_k=length, dim=dim, dim_v=dim_v, dtype="bf16", right=causal,
    )  # fmt: skip
    return next(row.plan for row in table("sm90")[f"gluon_sm90.{kernel}"] if row.matches(p))


def forward_rates(file: str) -> dict[tuple[Any, ...], float]:
    """TFLOP/s by (name, dim, dim_v, causal, batch, length), medians; "ours" is the variant that the table has."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for r in load(file)["rows"]:
        if r["kind"] == "time":
            where = (r["dim"], r["dim_v"], r["causal"], r["batch"], r["length"])
            plan = asdict(chosen(*where))
            if r["causal"]:  # blocks come in order there, whatever the plan says
                plan["rotate"] = r.get("plan", plan)["rotate"]
            # a run may know switches that plans no longer have
            is_ours = "plan" in r and all(plan.get(name, 0) == n for name, n in r["plan"].items())
            found.setdefault(("ours" if is_ours else r["name"], *where), []).append(r["tflops"])
    return {key: statistics.median(values) for key, values in found.items()}


def of_first_run(*where: Any) -> dict[str, float]:
    """TFLOP/s of one shape by name, from the first run that has the table's plan; none, if no run has."""
    for file in FORWARD:
        rates = forward_rates(file)
        if ("ours", *where) in rates:
            return {name: rate for (name, *at), rate in rates.items() if tuple(at) == where}
    return {}


def gluon() -> str:
    """The Hopper forward beside the best of FA3 and cuDNN in the same run."""
    rows = []
    for dim, dim_v in DIMS:
        for causal in (False, True):
            cells = [
                f"d {dim if dim == dim_v else f'{dim}/{dim_v}'} {'causal' if causal else 'full'}"
            ]
            for shape in SHAPES:
                rates = of_first_run(dim, dim_v, causal, *shape)
                rate = rates.get("ours")
                peers = [rates[p] for p in ("cudnn", "fa3") if p in rates]
                cells.append(f"{rate:.0f} ({rate / max(peers):.2f}×)" if rate else "–")
            rows.append(cells)
    head = ["TFLOP/s (ratio to the best of FA3 and cuDNN)", *SHAPES.values()]
    said = []
    for file in FORWARD:
        data = load(file)
        ceiling = [f", cuBLAS {r['tflops']:.0f}" for r in data["rows"] if r["kind"] == "ceiling"]
        said.append(f"commit {data['commit']}, {data['date']}{''.join(ceiling)} (`{file}`)")
    note = (
        f"{data['machine']}, bf16, heads = 2048 / d, CUDA graph, medians of four or five rounds in shuffled "
        f"order, plans as chosen since from the same run: {said[0]}; what that run left out is of "
        f"{'; or of '.join(said[1:])}."
    )
    return markdown("Hopper forward in Gluon on the H200", head, rows, note)


_FUSED = Plan(block_q=64, block_k=128, fused=1)
BACKWARD_NAMES = {  # the run's name of a plan over keys: what it wrote down has no plans
    (64, replace(_FUSED, stages=4, ahead=2, pingpong=1, schedule=2)): "d64-q64-f2n-drawn",
    (64, replace(_FUSED, stages=4, ahead=2, pingpong=1)): "d64-q64-f2n",
    (128, _FUSED): "d128-f0",
    (128, replace(_FUSED, schedule=2)): "d128-f0-drawn",
    (128, replace(_FUSED, ahead=2, pingpong=1, schedule=2)): "d128-f2n-drawn",
    (128, replace(_FUSED, ahead=3, pingpong=1)): "d128-f3n",
    (128, replace(_FUSED, ahead=3, pingpong=1, schedule=2)): "d128-f3n-drawn",
    (256, Plan(block_q=64, block_k=64)): "d256-twins1p",
}
BACKWARD = {  # by (d, causal), for each of SHAPES: the run's name of what sm90.toml chooses, "" if it was not in it
    (dim, causal): tuple(
        BACKWARD_NAMES.get((dim, chosen(dim, dim, bool(causal), *shape, "backward")), "")
        for shape in SHAPES
    )
    for dim in (64, 128, 256)
    for causal in (0, 1)
}
BACKWARD_RUNS = ("h200/gluon-backward-drawn.json", "h200/gluon-backward.json")


def backward_rates(file: str) -> dict[tuple[Any, ...], float]:
    """TFLOP/s by (dim, causal, batch, length, name)."""
    return {(r["d"], r["causal"], r["b"], r["n"], r["name"]): r["tf"] for r in load(file)["rows"]}


def gluon_backward() -> str:
    """The Hopper backward with the table's plans beside cuDNN, FlashAttention-2 and Triton in the same run."""
    runs = [backward_rates(file) for file in BACKWARD_RUNS]
    rows = []
    for (dim, is_causal), names in BACKWARD.items():
        cells = [f"d {dim} {'causal' if is_causal else 'full'}"]
        for shape, name in zip(SHAPES, names, strict=True):
            where = (dim, is_causal, *shape)
            rates = next((run for run in runs if (*where, name) in run), {})
            ours, *peers = (rates.get((*where, who)) for who in (name, "cudnn", "flash", "triton"))
            if ours is None or peers[0] is None:
                cells.append("–")
                continue
            others = " / ".join("–" if rate is None else f"{rate:.0f}" for rate in peers)
            cells.append(f"{ours:.0f} ({ours / peers[0]:.2f}×) / {others}")
        rows.append(cells)
    head = ["ours (ratio to cuDNN) / cuDNN / FA2 / Triton", *SHAPES.values()]
    said = "; d 256: ".join(
        f"{data['date']}, {data['checks']} checks of gradients against fp64, {data['failed']} failed (`{file}`)"
        for file in BACKWARD_RUNS
        for data in [load(file)]
    )
    note = (
        f"{load(BACKWARD_RUNS[0])['machine']}, bf16, TFLOP/s of the whole backward, heads = 2048 / d, CUDA graph, "
        f"one run each: {said}, with dQ's softmax pinned, as the table no longer has it. FlashAttention-4 was in "
        "neither."
    )
    return markdown("Hopper backward in Gluon on the H200", head, rows, note)


TRAINING = tuple(f"h200/train-step{run}.json" for run in ("", "-bf16", "-compiled", "-mistral"))


TRAINING_ON_CPU = "cpu/train-step.json"


def training() -> str:
    """The training step of 7 billion parameters: each run that there is."""
    return "\n\n".join(training_run(file) for file in TRAINING if there(file))


def training_on_cpu() -> str:
    """The same step of a tiny model, where there is no GPU."""
    return training_run(TRAINING_ON_CPU)


def training_run(file: str) -> str:
    """One run: its lengths and kinds of attention."""
    from relampago.cli.train_step import rows, table

    record = load(file)
    shape, made = rows.of_record(record)
    peak = rows.peak_flops(record)
    lines = [table.cells(row, shape, peak) for row in made]
    first, facts = record["cells"][0], record["machine"]
    one = facts.get("threads") == 1
    chip = (
        facts["gpus"][0]["name"]
        if first["device"] == "cuda"
        else f"{facts['cpu']}, {facts['threads']} thread{'' if one else 's'}"
    )
    note = (
        f"{chip}, torch {facts['torch']}, {facts['date'][:10]}, {first['model']}, {shape.layers} "
        f"layers, checkpoints: {first['checkpoint']}, AdamW: {first['optimiser']}; ~: estimates "
        f"(`{file}`). {' '.join(f'{said}.' for said in rows.gains(made))}"
        f"{' In this run: ' + record['remark'] + '.' if 'remark' in record else ''}"
    )
    how = ", layers compiled" if first.get("compiled") else ""
    title = f"A training step: {first['model']}, AdamW in {first['optimiser']}{how}"
    return markdown(title, list(table.HEAD), lines, note)


def moved() -> str:
    """Bytes by hardware counters beside the formulas."""
    from relampago.cli import measured

    record = load("h200/io.json")
    lines = [[f"{r['contestant']} {r['direction']}", *measured.cells(r)] for r in record["rows"]]
    facts, asked = record["machine"], record["asked"]
    blind = record["no_counters"]
    note = (
        f"{facts['gpus'][0]['name']}, {facts['date'][:10]}, q {asked['q']}, {asked['dtype']}, "
        f"{'causal' if asked['causal'] else 'full'}{f'; no bytes: {blind}' if blind else ''} (`h200/io.json`)."
        f"{of_the_mask(record['rows'])}"
    )
    return markdown("Device memory, by counters", list(measured.HEAD), lines, note)


def of_the_mask(rows: list[dict[str, Any]]) -> str:
    """What of standard attention's forward was the making of its mask, where the run made it in the call."""
    kernels = next(
        (
            r["kernels"]
            for r in rows
            if (r["contestant"], r["direction"]) == ("standard", "forward")
        ),
        [],
    )
    names = [k["name"] for k in kernels]
    made = [i for i, name in enumerate(names) if "arang" in name or "bitwise_not" in name]
    if not made:
        return ""
    part = kernels[made[0] : made[-1] + 1]
    read, written, took = (sum(k[what] for k in part) for what in ("read", "written", "seconds"))
    return (
        f" Standard forward made its causal mask in the call: {size(read)} read, {size(written)} written, "
        f"{seconds(took)} of the above; the formula has none of it. The command makes the mask before the call since."
    )  # fmt: skip


CURVES = ("cpu/train-tiny.json", "h200/train-tiny.json")


def curves() -> str:
    """The loss curves of one seed, on each machine that has some."""
    return "\n\n".join(curves_of(file) for file in CURVES if there(file))


def curves_of(file: str) -> str:
    """Those of one run."""
    record = load(file)
    lines = [
        [kind, f"{run['losses'][0]:.4f}", f"{run['losses'][-1]:.4f}",
         f"{record['gaps'][kind]:.1e}" if kind in record["gaps"] else "–"]
        for kind, run in record["runs"].items()
    ]  # fmt: skip
    facts, done = record["machine"], record["settings"]
    note = (
        f"{facts['gpus'][0]['name'] if facts['gpus'] else facts['cpu']}, torch {facts['torch']}, {facts['date'][:10]}, "
        f"{done['steps']} steps of {done['batch']} × {done['length']} bytes, {done['dtype']} (`{file}`)."
    )
    head = ["one seed", "first loss", "last loss", "greatest distance from eager in any step"]
    return markdown("Loss curves", head, lines, note)


def support() -> str:
    """What runs where, by the backends' own words."""
    from relampago.cli.matrix import as_markdown

    return as_markdown()


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "cpu": ("cpu/bench.json", cpu),
    "memory": ("cpu/bench.json", memory),
    "triton": ("h200/triton.json", triton),
    "decode": ("h200/decode-sweep.json", decode),
    "gluon": (FORWARD[0], gluon),
    "gluon-backward": (BACKWARD_RUNS[0], gluon_backward),
    "train-step": (TRAINING[0], training),
    "train-step-cpu": (TRAINING_ON_CPU, training_on_cpu),
    "io": ("h200/io.json", moved),
    "train-tiny": (CURVES[0], curves),
    "statistics-cpu": ("cpu/statistics.json", features.statistics_on_cpu),
    "statistics": ("h200/statistics.json", features.statistics_on_gpu),
    "derivatives": ("h200/derivatives.json", features.derivatives),
    "invariance": ("h200/batch-invariance.json", features.invariance),
    "ring": ("h200/ring-one-gpu.json", features.ring),
    "ring-errors": ("cpu/ring-errors.json", features.ring_errors),
    "fp8-accuracy": ("cpu/fp8-accuracy.json", features.outliers),
    "models": ("h200/transformers-speed.json", features.models),
    "overhead": ("h200/dropin-overhead.json", features.overhead),
    "support": ("", support),
}
