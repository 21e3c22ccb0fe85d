"""What the SDPA drop-in costs per call beyond PyTorch's own: python benchmarks/dropin_overhead.py [--json PATH].

Tensors are so small that the call is all host: on a GPU the time to launch, without waiting for the device. Contestants
alternate, and the median of many rounds counts. With $OUT set, the JSON goes there too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import relampago as rl
from relampago.cli.machine import facts
from relampago.flash_attn import flash_attn_func
from relampago.integrations import sdpa


def contestants(device: str, dtype: torch.dtype, grad: bool) -> dict[str, Callable[[], object]]:
    """Calls on (1, 2, 16, 64) tensors, and what stands below each."""
    shape = (1, 2, 16, 64)
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad) for _ in range(3)
    )
    rows = tuple(t.detach().transpose(1, 2).requires_grad_(grad) for t in (q, k, v))
    return {
        "torch sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "sdpa drop-in": lambda: sdpa.scaled_dot_product_attention(q, k, v, is_causal=True),
        "flash_attn drop-in": lambda: flash_attn_func(*rows, causal=True),
        "relampago.attention": lambda: rl.attention(*rows, causal=True),
    }


def microseconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median per call, contestants in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(20):
                call()
            found[name].append((time.perf_counter() - start) / 20 * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0, help="per device and direction")
    options = parser.parse_args()
    devices = (["cuda"] if torch.cuda.is_available() else []) + ["cpu"]
    results = []
    for device in devices:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        for grad in (False, True):
            times = microseconds(contestants(device, dtype, grad), options.seconds)
            added = round(times["sdpa drop-in"] - times["torch sdpa"], 1)
            results.append({"device": device, "grad": grad, "us": times, "added_us": added})
            print(device, "with graph" if grad else "no grad", times, "added", added)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else facts()["cpu"]
    data = {"machine": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
            "threads": torch.get_num_threads(), "results": results}  # fmt: skip
    paths = [options.json] if options.json else []
    if os.environ.get("OUT"):
        paths.append(Path(os.environ["OUT"]) / "dropin-overhead.json")
    for path in paths:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
