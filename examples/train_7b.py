"""A training step of a 7B Llama on 32,768 tokens: fits one H200 with relampago, not with standard attention.

    python examples/train_7b.py                # an 80 GiB card or more: 2 layers at full width, else the whole model
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
