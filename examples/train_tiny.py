"""A small decoder learns real text three times from one seed: with standard attention, SDPA and relampago.

    python examples/train_tiny.py                                   # about a minute on two cores
    python examples/train_tiny.py --length 8192 --batch 1 --hidden 512 --layers 8 --dtype bf16 --steps 200   # a GPU

The model is Transformers' Llama; between the runs one word changes, `attn_implementation`. The text is the language
reference that every Python carries, as bytes. The curves must lie on each other: their greatest distance is printed
beside SDPA's, and the exit code is 1 if it is more than a hundredth of what the loss fell.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import relampago.integrations.transformers  # noqa: F401 - registers
from relampago.cli import charts, machine
from relampago.cli.demo.text import chapters

KINDS = ("eager", "sdpa", "relampago")
COLORS = {"eager": charts.STANDARD, "sdpa": charts.TORCH, "relampago": charts.OURS}

SIZES = {"length": 256, "batch": 4, "steps": 150, "hidden": 128, "layers": 2, "seed": 0}


def model_of(kind: str, options: argparse.Namespace, device: str) -> LlamaForCausalLM:
    """Bytes in, logits out; the same random weights for every kind."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32, use_cache=False,
        num_key_value_heads=max(1, options.hidden // 64), max_position_embeddings=options.length,
        attn_implementation=kind,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def batch(text: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """(batch, length + 1) bytes: runs from places spread over the text."""
    last = len(text) - options.length - 1
    starts = [(7919 * (step * options.batch + i)) % last for i in range(options.batch)]
    return torch.stack([text[start : start + options.length + 1] for start in starts])


def train(kind: str, text: Tensor, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """The loss of each step, and the seconds of all."""
    model = model_of(kind, options, device)
    adamw = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    started = time.perf_counter()
    for step in track(range(options.steps), description=f"{kind:10}", transient=True):
        run = batch(text, step, options).to(device)
        half = options.dtype == "bf16"
        with torch.autocast(device, torch.bfloat16, enabled=half):
            logits = model(input_ids=run[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), run[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return {"losses": losses, "seconds": time.perf_counter() - started}


def distances(losses: list[float], others: list[float]) -> list[float]:
    """Step by step."""
    return [abs(a - b) for a, b in zip(losses, others, strict=True)]


def draw(runs: dict[str, dict[str, Any]], path: Path, caption: str) -> None:
    """Curves above one another, and their distances from standard attention's."""
    with charts.canvas(path, 2, title="One seed, three attentions", caption=caption) as (
        left,
        right,
    ):
        for width, (kind, run) in zip((5.0, 2.6, 1.2), runs.items(), strict=True):
            left.plot(run["losses"], color=COLORS[kind], linewidth=width, label=kind)
        charts.frame(left, "loss (nats per byte)")
        left.legend(frameon=False)
        standard = runs["eager"]["losses"]
        for kind in KINDS[1:]:
            apart = distances(runs[kind]["losses"], standard)
            shown = [value or float("nan") for value in apart]  # none at all has no logarithm
            right.plot(shown, color=COLORS[kind], linewidth=1.4, label=kind)
        right.set_yscale("log")
        charts.frame(right, "distance of the loss from standard attention's")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.set_xlabel("step")


def main() -> None:
    """Train, compare, write `train-tiny.json` and `train-tiny.png`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path, default=Path("train-tiny-out"))
    options = parser.parse_args()
    device = machine.best_device()
    text = torch.tensor(list("\n\n".join(chapters()).encode()))
    runs = {kind: train(kind, text, options, device) for kind in KINDS}
    curves = {kind: run["losses"] for kind, run in runs.items()}
    fell = curves["eager"][0] - curves["eager"][-1]
    gaps = {kind: max(distances(curves[kind], curves["eager"])) for kind in KINDS[1:]}
    for kind, run in runs.items():
        print(
            f"{kind:10} loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f} in {run['seconds']:.1f} s"
        )
    print(
        f"greatest distance from eager: relampago {gaps['relampago']:.1e}, sdpa {gaps['sdpa']:.1e}"
    )
    facts = machine.facts()
    chip = facts["gpus"][0]["name"] if device == "cuda" else facts["cpu"]
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    record = {"machine": facts, "device": device, "settings": settings, "gaps": gaps, "runs": runs}
    file = options.out / "train-tiny.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    caption = (
        f"{chip}; torch {torch.__version__}; Llama, {options.layers} layers of {options.hidden}, {options.dtype}, "
        f"batch {options.batch} × {options.length} bytes of Python's language reference; {facts['date'][:10]}"
    )
    draw(runs, file.with_suffix(".png"), caption)
    if fell <= 0 or gaps["relampago"] > fell / 100:
        raise SystemExit("nothing was learnt, or the curves do not lie on each other")


if __name__ == "__main__":
    main()
