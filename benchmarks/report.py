"""Write the tables of README and docs from the committed JSON: python benchmarks/report.py [--check].

Each table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. With --check nothing is written, and the exit
code is 1 if a table is not what the JSON says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "README.es.md", "docs/benchmarks.md", "docs/hopper.md")


def load(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def markdown(title: str, head: list[str], rows: list[list[str]], note: str) -> str:
    """A titled table and a line below it."""
    lines = [
        f"**{title}**",
        "",
        "| " + " | ".join(head) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", note])


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
        "`F.scaled_dot_product_attention`, medians in alternating order (`cpu/bench.json`)."
    )
    head = ["CPU, 8 heads", "fp32 forward", "fp32 fwd+bwd", "bf16 forward", "bf16 fwd+bwd"]
    return markdown("CPU: speed against SDPA", head, rows, note)


def triton() -> str:
    """The portable kernels on the H200."""
    data = load("h200/triton.json")
    rows = []
    for row in data["rows"]:
        if row["what"] == "16k":
            mask = "causal" if row["causal"] else "full"
            rows.append(
                [f"d {row['d']} {mask}"]
                + [
                    f"{row[n]:.0f}"
                    for n in ("fwd", "flash_f", "cudnn_f", "bwd", "flash_b", "cudnn_b")
                ]
                + [f"{row['fwd_x']:.2f}×", f"{row['bwd_x']:.2f}×"]
            )
    head = [
        "TFLOP/s",
        "forward",
        "FA2",
        "cuDNN",
        "backward",
        "FA2",
        "cuDNN",
        "fwd / FA2",
        "bwd / FA2",
    ]
    note = (
        f"{data['machine']}, torch {data['torch']}, bf16, 16k tokens, heads = 2048 / d, {data['date']}; FA2 and "
        "cuDNN are SDPA's backends in the same run (`h200/triton.json`)."
    )
    return markdown("Portable Triton kernels on the H200", head, rows, note)


def decode() -> str:
    """Decoding with the tables' plans, KV bytes per second."""
    data = load("h200/decode-sweep.json")
    shapes = [(b, kv) for kv in (8192, 32768) for b in (1, 8, 64)]
    wanted = {
        "SDPA cuDNN": lambda r: r["impl"] == "sdpa_cudnn",
        "relampago, contiguous": lambda r: (r.get("kind"), r.get("plan")) == ("dense", "k128w4s3"),
        "relampago, cache": lambda r: (r.get("kind"), r.get("plan")) == ("cache", "k128w4s3"),
        **{
            f"relampago, pages of {n}": lambda r, n=n: (
                (r.get("kind"), r.get("plan")) == (f"p{n}", "k64w4s4")
            )
            for n in (16, 64, 256)
        },
    }
    rows = []
    for label, fits in wanted.items():
        best: dict[tuple[int, int], float] = {}
        for r in data["rows"]:
            if fits(r) and r.get("auto", True) and r.get("chained") is not False and "gbs" in r:
                shape = (r["b"], r["kv"])
                best[shape] = max(best.get(shape, 0.0), r["gbs"])
        rows.append([label, *(f"{best[s]:.0f}" if s in best else "–" for s in shapes)])
    head = ["GB/s of keys and values", *(f"b {b}, {kv // 1024}k" for b, kv in shapes)]
    note = "NVIDIA H200, 32/8 heads, d 128, bf16, CUDA graph, 2026-12-01, one run (`h200/decode-sweep.json`)."
    return markdown("Decoding on the H200", head, rows, note)


def gluon() -> str:
    """The Hopper forward."""
    data = load("h200/gluon.json")
    rows = [
        [f"d {row['d']} {row['mask']}"]
        + [
            f"{ours:.0f} ({ours / peer:.2f}×)"
            for ours, peer in zip(row["ours"], row["cudnn"], strict=True)
        ]
        for row in data["rows"]
    ]
    head = ["TFLOP/s (ratio to cuDNN)", *data["shapes"]]
    note = (
        f"{data['machine']}, torch {data['torch']}, bf16, heads = 2048 / d, CUDA graph, "
        f"{data['date']}; {data['note']}"
    )
    return markdown("Hopper forward in Gluon on the H200", head, rows, note)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "cpu": ("cpu/bench.json", cpu),
    "triton": ("h200/triton.json", triton),
    "decode": ("h200/decode-sweep.json", decode),
    "gluon": ("h200/gluon.json", gluon),
}


def rendered(text: str) -> str:
    """A page with every table made anew; one without its JSON is left empty."""
    for name, (file, make) in TABLES.items():
        table = make() if (RESULTS / file).exists() else ""
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        text = pattern.sub(
            lambda m, table=table: f"{m[1]}{table}\n{m[2]}" if table else f"{m[1]}{m[2]}", text
        )
    return text


def main() -> int:
    """Write or check every page."""
    stale = []
    for page in PAGES:
        path = ROOT / page
        if not path.exists():
            continue
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        if before != after:
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
