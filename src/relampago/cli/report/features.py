"""Tables of what stands around the kernels: statistics, derivatives, batch invariance, ring, models, drop-ins."""

from __future__ import annotations

from typing import Any

from relampago.cli.report.markdown import markdown
from relampago.cli.report.results import load, there

MIB = 2**20


def statistics_on_cpu() -> str:
    """What statistics cost beside a forward, on a CPU."""
    return _statistics("cpu/statistics.json", "CPU", "fp32, CPU seconds of two threads")


def statistics_on_gpu() -> str:
    """What statistics cost beside a forward, on a card."""
    return _statistics("h200/statistics.json", "H200", "bf16, backend `triton`")


def _statistics(file: str, where: str, how: str) -> str:
    data = load(file)
    columns = [(r["length"], r["causal"], r["of a forward"]) for r in data["rows"]]
    longest = max(length for length, _, _ in columns)
    head = ["of a forward"]
    head += [f"{length // 1024}k {'causal' if causal else 'full'}" for length, causal, _ in columns]
    head += [f"peak memory beyond the inputs, {longest // 1024}k"]
    rows = [
        [name, *(f"{found[name]:.2f}" for _, _, found in columns), f"{peak / MIB:.1f} MiB"]
        for name, peak in data["peak bytes"].items()
    ]
    note = f"8 heads, d 64, {how}, torch {data['torch']}, medians in alternating order (`{file}`)."
    return markdown(f"What statistics cost: {where}", head, rows, note)


def derivatives() -> str:
    """What higher derivatives cost beside the forward and the backward, and beside materialised attention."""
    head = ["", "tokens", "jvp / forward", "double backward / backward", "materialised jvp / ours",
            "materialised double backward / ours", "peak MiB: jvp, double backward", "materialised"]  # fmt: skip
    rows = []
    for where, file in (("CPU, fp32", "cpu/derivatives.json"), ("H200, bf16", "h200/derivatives.json")):  # fmt: skip
        for r in load(file)["rows"] if there(file) else []:
            ratios, peaks = r["ratios"], r.get("peak MiB", {})
            found = [
                ratios.get(name)
                for name in ("relampago jvp / forward", "relampago double backward / backward",
                             "materialised / relampago, jvp", "materialised / relampago, double backward")
            ]  # fmt: skip
            cells = [f"{x:.2f}" if x is not None else "–" for x in found]
            rows.append([where, str(r["length"]), *cells,
                         *(_peaks(peaks.get(n)) for n in ("relampago", "materialised"))])  # fmt: skip
    note = (
        "8 heads, d 64, causal, the backends that are chosen (`cpu`; on the H200 `gluon_sm90` for forward and "
        "backward, `triton` for derivatives), "
        "medians in alternating order (`cpu/derivatives.json`, `h200/derivatives.json`)."
    )
    return markdown("Higher derivatives", head, rows, note)


def _peaks(found: Any) -> str:
    if not isinstance(found, dict):
        return found or "–"
    return ", ".join(f"{peak:,.0f}" for peak in found.values())


def ring() -> str:
    """All steps of all virtual ranks on one card, against one call."""
    data = load("h200/ring-one-gpu.json")
    head = ["ranks", "tokens", "forward: one call", "all ranks", "ratio", "backward: one call",
            "all ranks", "ratio", "together"]  # fmt: skip
    rows = []
    for r in data["rows"]:
        one, total = r["one_ms"], r["sum"]
        cells = [
            cell
            for way in ("forward", "backward")
            for cell in (f"{one[way]:.1f} ms", f"{total[f'{way}_ms']:.1f} ms", f"{total[f'{way}_ratio']:.2f}")
        ]  # fmt: skip
        window = f", window {r['window']}" if r["window"] else ""
        together = f"{total['ratio']:.2f}"
        rows.append([f"{r['strategy']} × {r['ranks']}", f"{r['tokens']}{window}", *cells, together])
    note = (
        f"{data['machine']}, {data['date'][:10]}; {data['shape']}; kernel efficiency: no links "
        "(`h200/ring-one-gpu.json`)."
    )
    return markdown("The ring's kernels on one H200", head, rows, note)


def ring_errors() -> str:
    """Errors by the number of ranks, and what bf16 messages would make of them."""
    data = load("cpu/ring-errors.json")
    names = list(data["rows"][0]["errors"])
    rows = []
    for r in data["rows"]:
        name = "one device" if r["ranks"] == 1 else f"ring, {r['ranks']} ranks"
        narrow = "" if r["travel"] == "fp32" else ", dk and dv travel in bf16"
        rows.append([name + narrow, *(f"{r['errors'][n]:.2e}" for n in names)])
    alone, *_, last = (r["errors"] for r in data["rows"])
    facts, example = data["machine"], data["example"]
    heads = "/".join(map(str, data["heads"]))
    note = (
        f"{facts['cpu']}, torch {facts['torch']}, {facts['date'][:10]}, virtual ranks; causal, bf16, {data['length']} "
        f"tokens, heads {heads}, dim {data['dim']}. Messages in bf16 would make dk's error at "
        f"{data['rows'][-1]['ranks']} ranks {last['dk'] / alone['dk']:.1f} times one device's. With fp64 inputs the "
        f"ring is within {max(data['fp64'].values()):.1e} of one device, relative to the largest value; the loss of "
        f"`train_llama.py` on {example['processes']} processes within {example['difference']:.1e} of one's in "
        f"{example['steps']} steps (`cpu/ring-errors.json`)."
    )
    return markdown("Relative RMS errors against fp64", ["", *names], rows, note)


def outliers() -> str:
    """FP8's errors in the paper's outlier test, by the CPU's emulation."""
    data = load("cpu/fp8-accuracy.json")
    head = ["head dim", "keys", "rows", "bf16", "plain", "rotation alone", "ours", "plain / ours"]
    names = ("bf16", "per tensor", "per tensor, rotated", "per block, rotated")
    rows = [
        [str(r["dim"]), str(r["keys"]), str(r["rows"]), *(f"{r['rmse'][n]:.2e}" for n in names), f"{r['ratio']:.2f}"]
        for r in data["outliers"]
    ]  # fmt: skip
    facts = data["machines"]["outliers"]
    note = (
        f"RMSE against fp64; {facts['cpu']}, torch {facts['torch']}, {facts['date'][:10]}, emulated "
        "(`cpu/fp8-accuracy.json`)."
    )
    return markdown("FP8 with outliers", head, rows, note)


def models() -> str:
    """Prefill and decoding of a model in Transformers."""
    data = load("h200/transformers-speed.json")
    prefill, decode = data["prefill_tokens_per_s"], data["decode_tokens_per_s"]
    rows = [[name, f"{prefill[name]:,.0f}", f"{decode[name]:.1f}"] for name in prefill]
    note = (
        f"{data['machine']}, torch {data['torch']}, Transformers {data['transformers']}, {data['date']}, "
        f"{data['parameters'] / 1e9:.2f} billion parameters like Llama's, random weights, bf16, batch 1, "
        f"a context of {data['length']}; medians of {data['rounds']} alternating rounds "
        "(`h200/transformers-speed.json`)."
    )
    head = ["attn_implementation", "prefill, tokens/s", "decoding, tokens/s"]
    return markdown("A model in Transformers", head, rows, note)


def overhead() -> str:
    """Host time of a call by each door."""
    rows, notes = [], []
    for device, file in (
        ("cpu", "cpu/dropin-overhead.json"),
        ("cuda", "h200/dropin-overhead.json"),
    ):
        data = load(file)
        notes.append(f"{data['machine']}, torch {data['torch']}, {data['date']} (`{file}`)")
        for r in (r for r in data["results"] if r["device"] == device):
            where = f"{r['device']}, {'with' if r['grad'] else 'no'} graph"
            rows.append([where, *(f"{us:.0f}" for us in r["us"].values())])
    head = ["µs a call", *data["results"][0]["us"]]
    note = (
        f"Tensors (1, 2, 16, 64), where a call is all host; medians in turns. {'; '.join(notes)}."
    )
    return markdown("Host time by each door", head, rows, note)


def invariance() -> str:
    """The price of batch invariance on a card."""
    data = load("h200/batch-invariance.json")
    rows = []
    for r in data["prices"]:
        decodes = r["kind"] == "decode"
        size = f"{r['batch']} × {r['keys']} keys" if decodes else f"{r['length']} tokens"
        window = f", window {r['window'][0]}" if r.get("window") else ""
        chosen = r.get("chosen_ms")
        rows.append(
            [r["kind"], f"{size}, heads {r['heads']}/{r['kv_heads']}, d {r['dim']}{window}", f"{r['ratio']:.2f}",
             f"{r['invariant_ms'] / chosen:.2f}" if chosen else "–"]
        )  # fmt: skip
    note = (
        f"{data['machine']}, torch {data['torch']}, {data['date']}, bf16, CUDA graphs, medians of rounds; beside "
        "Triton's free way, and for prefill beside the backend that is chosen without batch invariance "
        "(`h200/batch-invariance.json`)."
    )
    head = ["", "problem", "to Triton's", "to the chosen"]
    return markdown("The price of batch invariance on the H200", head, rows, note)
