"""The evidence that needs a card, in parts that each fit one call of ten minutes; files go to $OUT or ./evidence-out.

    python benchmarks/evidence.py step      # Llama 7B, 2k to 32k tokens, fp32 AdamW           -> train-step.json, .png
    python benchmarks/evidence.py mfu       # 8k beside eager with bf16 AdamW; 32k compiled, selective checkpoints
    python benchmarks/evidence.py mistral   # Mistral 7B with its window of 4096
    python benchmarks/evidence.py io tiny   # bytes under ncu; loss curves at 8k

A result belongs into benchmarks/results/h200/ under the name that the tables read: train-step.json, and the like with
-bf16, -compiled and -mistral; io.json. A lent machine may send few files back: pack them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = Path(os.environ.get("OUT") or "evidence-out").resolve()
SHAPE = ("--device", "cuda", "--len-q", "8192", "--heads", "16", "--dim", "128")
PARTS: dict[str, list[tuple[str, ...]]] = {
    "step": [("train-step", "--model", "llama-7b", "--seconds", "560", "--out", "step")],
    "mfu": [
        ("train-step", "--lengths", "8k", "--attention", "relampago,eager,sdpa", "--optimiser", "bf16",
         "--seconds", "120", "--out", "bf16"),
        ("train-step", "--lengths", "32k", "--attention", "relampago,sdpa", "--checkpoint", "most", "--compile",
         "--optimiser", "bf16", "--seconds", "200", "--out", "compiled"),
    ],
    "mistral": [("train-step", "--model", "mistral-7b", "--seconds", "560", "--out", "mistral")],
    "io": [
        ("explain", "--measure", *SHAPE, "--causal", "--out", "io.json"),
        ("explain", "--measure", *SHAPE, "--full", "--out", "io-full.json"),
    ],
    "tiny": [
        ("examples/train_tiny.py", "--length", "8192", "--batch", "1", "--hidden", "512", "--layers", "8", "--dtype",
         "bf16", "--lr", "5e-4", "--steps", "150", "--out", "tiny-8k"),
    ],
}  # fmt: skip
COMMAND = "from relampago.cli import main; main()"


def main() -> int:
    """Run the parts named; the number of commands that failed."""
    from pydoc_data import topics

    import tokenizers  # noqa: F401 - before anything else: what the steps' text needs

    assert topics.topics
    OUT.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    failed = 0
    for part in sys.argv[1:] or list(PARTS):
        for words in PARTS[part]:
            *rest, out = words
            program = [rest.pop(0)] if rest[0].endswith(".py") else ["-c", COMMAND]
            command = [sys.executable, *program, *rest, str(OUT / out)]
            print(part, *rest, flush=True)
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False)  # fmt: skip
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
