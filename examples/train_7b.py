"""A training step of a 7B Llama, 2k to 32k tokens, with standard attention, SDPA and relampago.

    python examples/train_7b.py                # whole on a card of 130 GiB, else 2 layers at full width
    python examples/train_7b.py --tiny         # the same on a CPU

Both call `relampago train-step`, whose options say more: `relampago train-step --help`.
"""

from __future__ import annotations

import sys

import torch

from relampago.cli import app

WHOLE = (
    130 * 2**30
)  # bytes of a card that holds weights, gradients and fp32 AdamW of 7 billion parameters


def arguments(tiny: bool) -> list[str]:
    """What to measure on this machine."""
    if tiny or not torch.cuda.is_available():
        return ["--device", "cpu", "--model", "tiny", "--lengths", "256,1k", "--repeats", "1"]
    if torch.cuda.get_device_properties(0).total_memory < WHOLE:
        return ["--model", "llama-7b", "--layers", "2", "--lengths", "4k,8k,16k,32k"]
    return ["--model", "llama-7b", "--lengths", "2k,4k,8k,16k,32k"]


if __name__ == "__main__":
    app(["train-step", *arguments("--tiny" in sys.argv[1:])])
