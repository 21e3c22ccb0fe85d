"""A tiny Llama learns real text on several processes, its sequence spread over them; the loss is one process's.

    python examples/distributed/train_llama.py                      # 4 gloo processes, 30 steps, ring attention
    python examples/distributed/train_llama.py --ranks 2 --strategy ulysses

Each process holds the whole model and a part of each sequence. What it takes: `plan.shard` for tokens,
`plan.shard_labels` for labels (shifted in the whole sequence first), `plan.position_ids` for RoPE,
`attention(..., plan=plan)`, and one all-reduce of the gradients. The text is this repository's own documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import relampago as rl
from relampago.distributed import ContextParallelPlan, attention

ROOT = Path(__file__).parents[2]
VOCABULARY, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 64, 4, 2, 16, 2


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (B, L, H, D) at global positions (L,)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None].to(x.dtype) * rates
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    """Attention and SwiGLU, each after RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor, plan: ContextParallelPlan | None) -> Tensor:
        """x (B, L, DIM): this rank's tokens."""
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = rotary(q, positions), rotary(k, positions)
        if plan is None:
            seen = rl.attention(q, k, v, causal=True)
        else:
            seen = attention(q, k, v, plan=plan, causal=True)
        x = x + self.out(seen.flatten(2))
        gate, up = self.up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Bytes in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, plan: ContextParallelPlan | None
    ) -> Tensor:
        """tokens (B, L)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, plan)
        return self.head(self.norm(x))


def batches(length: int, steps: int) -> list[Tensor]:
    """Sequences of bytes (1, length) of real text."""
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = torch.tensor(list(b"\n".join(page.read_bytes() for page in pages)))
    last = text.numel() - length
    return [text[(i * 7919) % last :][:length][None] for i in range(steps)]


def train(plan: ContextParallelPlan | None, length: int, steps: int) -> list[float]:
    """The loss of each step: of all tokens, whatever part of them this rank has."""
    torch.manual_seed(0)
    model = Llama().double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    whole = ContextParallelPlan(1, length) if plan is None else plan
    losses = []
    for tokens in batches(length, steps):
        labels = whole.shard_labels(tokens)
        logits = model(whole.shard(tokens), whole.position_ids(), plan)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
            length - 1
        )
        optimiser.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if plan is not None:  # sums, not means: each rank's loss is its share of one
            for tensor in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
                dist.all_reduce(tensor)
        optimiser.step()
        losses.append(total.item())
    return losses


def rank(options: argparse.Namespace) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    store = f"file://{options.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=options.ranks)
    plan = ContextParallelPlan(dist.group.WORLD, options.length, strategy=options.strategy)
    losses = train(plan, options.length, options.steps)
    if options.rank == 0:
        (Path(options.folder) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Train on one process and on several, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=509, help="tokens; need not divide")
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, str(r)], env=environment) for r in range(options.ranks)
        ]
        alone = train(None, options.length, options.steps)
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank failed")
        spread = json.loads((Path(folder) / "losses.json").read_text(encoding="utf-8"))
    print(f"step  one process  {options.ranks} processes ({options.strategy})")
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{step:4}  {alone[step]:11.8f}  {spread[step]:11.8f}")
    worst = max(abs(a - b) for a, b in zip(alone, spread, strict=True))
    print(f"largest difference of the loss in {options.steps} steps, fp64: {worst:.1e}")
    if worst > 1e-9 or alone[-1] >= alone[0]:
        raise SystemExit("the curves differ, or nothing was learnt")


if __name__ == "__main__":
    main()
