"""Accuracy of FP8 attention by the CPU's emulation: the paper's outlier test, real activations, sums, gradients.

    python -m benchmarks.fp8_accuracy [outliers|sums|gradients|activations] …     # no GPU; all if none is named

Writes benchmarks/results/cpu/fp8-accuracy.json; a part that is not run keeps what an earlier run wrote.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import relampago as rl
from relampago import quant
from relampago.cli import machine

TARGET = Path(__file__).parent / "results" / "cpu" / "fp8-accuracy.json"
SHAPES = (
    (64, 16384),
    (128, 1024),
    (128, 4096),
    (128, 16384),
    (256, 1024),
    (256, 4096),
    (256, 16384),
)
DRAWS = 24  # outliers are rare, so are the rows that decide
ROWS = 256
BITS = 14  # of the tensor cores' sums of e4m3 products, as DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) reports


def outliers(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001) (arXiv 2407.08608, section 4.3)."""
    plain, large = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return (plain + 10 * large * (torch.rand(shape, generator=g) < 0.001)).bfloat16()


def cast(q: Tensor, k: Tensor, v: Tensor, per: Any, rotated: bool) -> tuple[Any, dict[str, Any]]:
    """Operands in e4m3 and their scales."""
    turned = [quant.rotate(t.float()) if rotated else t for t in (q, k)]
    found = [quant.quantise(t, per=per) for t in (*turned, v)]
    scales = {f"{n}_descale": one.scales for n, one in zip("qkv", found, strict=True)}
    return [one.values for one in found], scales


def errors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Mean square errors: bf16's, plain FP8's, and with rotation and blocks each alone and together."""
    oracle = rl.attention(q.double(), k.double(), v.double())
    found = {"bf16": rl.attention(q, k, v)}
    for rotated in (False, True):
        for per in ("tensor", "block"):
            operands, scales = cast(q, k, v, per, rotated)
            found[f"per {per}{', rotated' if rotated else ''}"] = rl.attention(*operands, **scales)
    return {name: (out.double() - oracle).square().mean().item() for name, out in found.items()}


def run_outliers() -> Iterator[dict[str, Any]]:
    """RMSE over several draws, and the ratio of plain per-tensor FP8's to ours."""
    for dim, keys in SHAPES:
        g = torch.Generator().manual_seed(0)
        total: dict[str, float] = {}
        for _ in range(DRAWS):
            q = outliers((1, ROWS, 1, dim), g)
            k, v = (outliers((1, keys, 1, dim), g) for _ in range(2))
            for name, error in errors(q, k, v).items():
                total[name] = total.get(name, 0.0) + error / DRAWS
        rmse = {name: math.sqrt(error) for name, error in total.items()}
        ratio = rmse["per tensor"] / rmse["per block, rotated"]
        yield {"dim": dim, "keys": keys, "rows": ROWS * DRAWS, "rmse": rmse, "ratio": ratio}
        print(f"d {dim:3} keys {keys:5}  per tensor {rmse['per tensor']:.2e}  ours {rmse['per block, rotated']:.2e}  "
              f"ratio {ratio:.2f}", flush=True)  # fmt: skip


def run_sums() -> list[dict[str, Any]]:
    """A model of the tensor cores: each step of 32 keys adds to a sum that keeps BITS bits, cut towards 0.

    Relative error of O = P·V in e4m3 for equal weights, by the keys between promotions to fp32.
    """
    rows = []
    g = torch.Generator().manual_seed(0)
    for keys in (4096, 32768, 131072):
        v = (torch.randn(keys, 64, generator=g) + 0.25).to(quant.E4M3).double()
        p = torch.rand(keys, generator=g).mul(256).to(quant.E4M3).double()
        steps = (p[:, None] * v).unflatten(0, (-1, 32)).sum(1)
        exact = steps.sum(0)
        for every in (128, 512, keys):
            total = torch.zeros(64, dtype=torch.float64)
            for part in steps.split(every // 32):
                acc = torch.zeros(64, dtype=torch.float64)
                for step in part:
                    acc = acc + step
                    unit = torch.exp2(
                        torch.floor(torch.log2(acc.abs().clamp(min=1e-30))) - BITS + 1
                    )
                    acc = torch.trunc(acc / unit) * unit
                total += acc
            error = ((total - exact).norm() / exact.norm()).item()
            rows.append({"keys": keys, "promoted every": every, "error": error})
            print(f"keys {keys:6}  promoted every {every:6}: {error:.1e}", flush=True)
    return rows


def run_gradients() -> list[dict[str, Any]]:
    """Relative errors of bf16 gradients with out and LSE of bf16 (what a backward does), and with those of FP8."""
    from relampago.lower import prepare
    from relampago.op import backward_op
    from relampago.options import Options

    g, rows = torch.Generator().manual_seed(0), []
    for size in (1.0, 3.0):
        q, k, v, dout = (torch.randn(1, 1024, 2, 64, generator=g).bfloat16() for _ in range(4))
        q = q * size
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        exact = torch.autograd.grad(rl.attention(*leaves, causal=True), leaves, dout.double())
        for precision in (None, "fp8"):
            saved = rl.attention(q, k, v, causal=True, precision=precision, return_lse=True)
            call = prepare(q, k, v, Options(causal=True))
            grads = backward_op(dout, None, *saved, [True, True, True, False, False], *call)[:3]
            error = [
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(grads, exact, strict=True)
            ]
            rows.append({"q times": size, "out and lse of": precision or "bf16", "dq dk dv": error})
            print(rows[-1], flush=True)
    return rows


def activations() -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v (1, L, 12, 32) of every layer of the demo's encoder (MiniLM) on a page of its text."""
    from relampago.cli.demo import encoder, text

    tokenizer, model = encoder._load("cpu")
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("query", "key", "value"):
            module.register_forward_hook(lambda _, __, out, name=name: found.__setitem__(name, out))
    page = tokenizer(
        [" ".join(text.passages(4, 180))], truncation=True, max_length=512, return_tensors="pt"
    )
    with torch.no_grad():
        model(**page)
    heads = model.config.num_attention_heads
    tensors = [t.unflatten(-1, (heads, -1)).bfloat16() for t in found.values()]
    return [tuple(tensors[i : i + 3]) for i in range(0, len(tensors), 3)]  # type: ignore[misc]


def run_activations() -> list[dict[str, Any]]:
    """Errors on real activations, by layer."""
    rows = []
    for layer, (q, k, v) in enumerate(activations()):
        rmse = {name: math.sqrt(error) for name, error in errors(q, k, v).items()}
        size = rl.attention(q, k, v).double().square().mean().sqrt().item()
        rows.append({"layer": layer, "shape": list(q.shape), "rms of out": size, "rmse": rmse,
                     "ratio": rmse["per tensor"] / rmse["per block, rotated"]})  # fmt: skip
        print(f"layer {layer:2}  out {size:.2f}  per tensor {rmse['per tensor']:.2e}  "
              f"ours {rmse['per block, rotated']:.2e}  bf16 {rmse['bf16']:.2e}", flush=True)  # fmt: skip
    return rows


PARTS = {
    "outliers": run_outliers, "sums": run_sums, "gradients": run_gradients, "activations": run_activations,
}  # fmt: skip


def main(wanted: list[str]) -> None:
    """Run, print, write."""
    found = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    for name in wanted or PARTS:
        found.setdefault("machines", {})[name] = machine.facts()
        found[name] = []
        for row in PARTS[name]():
            found[name].append(row)
            TARGET.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
