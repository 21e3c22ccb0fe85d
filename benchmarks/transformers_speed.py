"""Tokens per second of a Llama of 1B parameters, random weights: relampago, sdpa and eager in one run, in turns.

    python benchmarks/transformers_speed.py --seconds 240 [--json PATH] [--small]

Prefill of 8k tokens, and decode of single tokens at 8k context with a growing cache. With $OUT set, the JSON goes there
too. --small is for a try on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import relampago.integrations.transformers  # noqa: F401 - registers

KINDS = ("relampago", "sdpa", "eager")
STARTED = time.perf_counter()  # imports are before


def model_of(small: bool, device: str) -> Any:
    """The shape of Llama 3.2 1B."""
    words: dict[str, Any] = {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if small:
        words |= {
            "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(LlamaConfig(**words)).eval()
        torch.set_default_dtype(torch.float32)
    return model


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of one run, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(model: Any, length: int, steps: int, seconds: float, device: str) -> dict[str, Any]:
    """Medians over rounds in which the implementations take turns, until so many seconds after the start, two at least.

    A kind that runs out of memory is left out.
    """
    ids = torch.randint(0, model.config.vocab_size, (1, length + 1 + steps), device=device)
    prefill: dict[str, list[float]] = {kind: [] for kind in KINDS}
    decode: dict[str, list[float]] = {kind: [] for kind in KINDS}
    failed: dict[str, str] = {}

    def once(kind: str, keep: bool) -> None:
        model.set_attn_implementation(kind)
        cache = DynamicCache()
        fill = timed(lambda: model(ids[:, :length], past_key_values=cache, logits_to_keep=1), device)  # fmt: skip
        model(ids[:, length : length + 1], past_key_values=cache)

        def generate() -> None:
            for i in range(steps):
                place = length + 1 + i
                model(ids[:, place : place + 1], past_key_values=cache)

        step = timed(generate, device) / steps
        if keep:
            prefill[kind].append(fill)
            decode[kind].append(step)

    for kind in KINDS:  # compile and warm up
        print(f"{time.perf_counter() - STARTED:.0f} s: warming up {kind}", flush=True)
        try:
            once(kind, keep=False)
        except torch.OutOfMemoryError as error:
            failed[kind] = str(error).splitlines()[0]
    rounds = 0
    while rounds < 2 or time.perf_counter() - STARTED < seconds:
        order = KINDS if rounds % 2 == 0 else KINDS[::-1]
        for kind in order:
            if kind not in failed:
                once(kind, keep=True)
        rounds += 1
        print(f"{time.perf_counter() - STARTED:.0f} s: {rounds} rounds", flush=True)
    fills = {k: round(length / statistics.median(t), 1) for k, t in prefill.items() if t}
    rates = {k: round(1 / statistics.median(t), 2) for k, t in decode.items() if t}
    return {
        "rounds": rounds,
        "prefill_tokens_per_s": fills,
        "decode_tokens_per_s": rates,
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(options.small, device)
    found = measure(model, options.length, options.steps, options.seconds, device)
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        print(name, found[name])
    import transformers

    data = {
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"), "dtype": str(model.dtype),
        "parameters": sum(p.numel() for p in model.parameters()), "length": options.length, "steps": options.steps,
        **found,
    }  # fmt: skip
    paths = [options.json] if options.json else []
    if os.environ.get("OUT"):
        paths.append(Path(os.environ["OUT"]) / "transformers-speed.json")
    for path in paths:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
