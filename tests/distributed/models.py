"""One rank of the test of Transformers' adapter: `python models.py <rank> <size> <folder>`, results as worker.py's.

Tiny random models, zigzag, an odd number of tokens: logits, loss and all gradients are those of eager attention in one
process, as far as fp32 goes.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from relampago.distributed import ContextParallelPlan
from relampago.distributed.transformers import attend, register, use_plan
from relampago.errors import InvalidInput, Unsupported

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
FOLDER = Path(sys.argv[3])
VOCAB, LENGTH = 48, 37
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def trained(model, tokens, positions, labels):
    """Logits and the sum of losses, of some tokens; gradients are left in the model."""
    logits = model(tokens, position_ids=positions).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")  # fmt: skip
    loss.backward()
    return logits.detach(), loss.detach()


def agrees(name: str, windows: int, **more) -> None:
    """One model: all at once by eager attention, and each rank's tokens over a plan."""
    config = getattr(transformers, f"{name}Config")(**SHAPE, **more)
    torch.manual_seed(0)
    alone = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    for key, parameter in alone.named_parameters():
        if key.endswith("sinks"):
            parameter.data = torch.linspace(-1, 2, parameter.numel())
    spread = type(alone)._from_config(copy.deepcopy(config), attn_implementation="relampago_cp")
    spread.load_state_dict(alone.state_dict())
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH, strategy="ring", layout="zigzag")
    labels = plan.shard_labels(tokens)
    whole = F.pad(tokens[:, 1:], (0, 1), value=-100)
    want, want_loss = trained(alone, tokens, None, whole)
    seen.clear()
    with use_plan(plan):
        got, loss = trained(spread, plan.shard(tokens), plan.position_ids()[None], labels)
    assert len(seen) == SHAPE["num_hidden_layers"], seen
    assert sum(window is not None for window in seen) == windows, seen
    torch.testing.assert_close(plan.unshard(got), want, rtol=1e-4, atol=1e-5)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    for (key, mine), theirs in zip(spread.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None, key
        dist.all_reduce(mine.grad)  # each rank has its share
        error = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-4, f"{key}: {error:.1e}"


def llama():
    agrees("Llama", 0)


def padding():
    """Refused on every rank, before anything is sent."""
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="relampago_cp")
    plan = ContextParallelPlan(dist.group.WORLD, LENGTH)
    tokens = torch.ones(1, plan.local_length(), dtype=torch.int64)
    mask = tokens.clone()
    mask[:, -1] = 0
    with use_plan(plan), pytest.raises(Unsupported, match="attention_mask"):
        model(tokens, attention_mask=mask, position_ids=plan.position_ids()[None])
    with pytest.raises(InvalidInput, match="inside `use_plan"):
        model(tokens)


def mistral():
    agrees("Mistral", 2, sliding_window=5)


def gpt_oss():
    """Sinks, and every other layer with a window."""
    agrees("GptOss", 1, sliding_window=5, num_local_experts=2, num_experts_per_tok=2)


CHECKS = (llama, padding, mistral, gpt_oss)
seen: list[int | None] = []  # each layer's window, in turn


def counted(*args, sliding_window=None, **options):
    seen.append(sliding_window)
    return attend(*args, sliding_window=sliding_window, **options)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=SIZE
    )
    register()
    assert transformers.AttentionInterface()["relampago_cp"] is attend
    transformers.AttentionInterface.register("relampago_cp", counted)
    found = {}
    for check in CHECKS:
        try:
            check()
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
        (FOLDER / f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
