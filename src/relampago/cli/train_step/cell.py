"""One measurement, in a process of its own: build the model, take a few steps, say time and peak memory.

`python -m relampago.cli.train_step.cell` imports what it needs, prints {"ready": true}, waits for a job as one line of
JSON on stdin, and answers by lines of JSON: {"stage": ...} while it works, and at last the result.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relampago.cli import memory
from relampago.cli.train_step.optimiser import OPTIMISERS, size
from relampago.cli.train_step.shapes import Shape, shape_of
from relampago.cli.train_step.tokens import sequence, tokens

WITHOUT = "without"  # no attention at all: what the rest of a step takes
HEAD_ROWS = 4096  # tokens whose logits exist at a time
WARM_UP = 2


@dataclass(frozen=True)
class Cell:
    """What one process measures.

    Args:
        model: a name of SHAPES.
        layers: how many; all if None.
        length: tokens of the one sequence in the batch.
        attention: "eager", "sdpa", "relampago", or "without".
        checkpoint: what the backward makes again: a name of CHECKPOINTS.
        optimiser: "fp32" (moments and master weights) or "bf16" (moments).
        device: "cpu" or "cuda".
        repeats: steps measured, after the warm-up.
        compiled: whether `torch.compile` fuses what stands between products, a layer at a time.
    """

    model: str
    layers: int | None
    length: int
    attention: str
    checkpoint: str
    optimiser: str
    device: str
    repeats: int
    compiled: bool = False

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return shape_of(self.model, self.layers)


def measure(cell: Cell, say: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Time and memory of a training step, or where it ran out of memory."""
    stage = "building"

    def tell(now: str) -> None:
        nonlocal stage
        stage = now
        say(now)

    try:
        with marks_set_once():
            return _measure(cell, tell)
    except torch.OutOfMemoryError as error:
        held = torch.cuda.memory_allocated() if cell.device == "cuda" else None
        return {"out_of_memory": str(error).splitlines()[0], "stage": stage, "held": held}


def _measure(cell: Cell, tell: Callable[[str], None]) -> dict[str, Any]:
    tell("building")
    model = build(cell)
    text = tokens(cell.shape.vocabulary)
    cuda = cell.device == "cuda"
    adamw = OPTIMISERS[cell.optimiser](model.parameters(), lr=1e-5, fused=cuda)
    count = 0

    def step() -> float:
        nonlocal count
        run = sequence(text, cell.length, count)[None].to(cell.device)
        count += 1
        hidden = model.model(input_ids=run[:, :-1], use_cache=False).last_hidden_state
        loss = backward(model.lm_head, hidden, run[:, 1:])
        adamw.step()
        for parameter in model.parameters():  # gradients stay, as when they are accumulated
            assert parameter.grad is not None
            parameter.grad.zero_()
        return loss.item()  # waits for the device

    tell("warming up")
    losses = [step() for _ in range(WARM_UP)]
    sizes = {
        "weights": sum(size(p) for p in model.parameters()),
        "gradients": sum(size(p.grad) for p in model.parameters() if p.grad is not None),
        "optimiser": adamw.held(),
    }
    tell("measuring")
    samples: list[float] = []

    def timed() -> None:
        for _ in range(cell.repeats):
            started = time.perf_counter()
            losses.append(step())
            samples.append(time.perf_counter() - started)

    if cuda:
        torch.cuda.reset_peak_memory_stats()
        timed()
        peak = torch.cuda.max_memory_allocated()
        beyond, reserved = peak - sum(sizes.values()), torch.cuda.max_memory_reserved()
    else:
        timed()
        beyond, reserved = cpu_growth(step), None
        peak = None if beyond is None else beyond + sum(sizes.values())
    return {
        "samples": samples, "losses": losses, "bytes": sizes, "beyond": beyond, "peak": peak, "reserved": reserved,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def marks_set_once() -> contextlib.AbstractContextManager[object]:
    """Lets Dynamo compile checkpointed layers of Transformers with kernels >= 0.19.

    It marks functions that may be exchanged by a variable, set for the length of a layer's call. Dynamo sees it when it
    traces the forward; what a checkpoint makes again needs no mark, and Dynamo refuses one unless told so.
    """
    import torch._dynamo.config as dynamo  # with torch >= 2.10; before, there is nothing to tell

    once = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    return dynamo.patch({once: True}) if hasattr(dynamo, once) else contextlib.nullcontext()


def cpu_growth(step: Callable[[], object]) -> int | None:
    """Bytes by which a step makes this process grow at its peak; None where the system does not say."""
    with contextlib.suppress(OSError):
        return memory.growth(step, step)
    return None


def build(cell: Cell) -> Any:
    """The model with random weights in bf16, ready to train."""
    import transformers
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    import relampago.integrations.transformers  # noqa: F401 - registers

    transformers.logging.set_verbosity_error()
    AttentionInterface.register(WITHOUT, no_attention)
    AttentionMaskInterface.register(WITHOUT, no_mask)
    torch.manual_seed(0)
    config = cell.shape.config(cell.length, cell.attention)
    with torch.device(cell.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    if cell.checkpoint != "none":
        words: dict[str, Any] = {"use_reentrant": False}
        if cell.checkpoint != "full":
            words["context_fn"] = keeping(cell)
        now = getattr(model, "activation_checkpointing_enable", None)  # the newer name
        (now or model.gradient_checkpointing_enable)(words)
    if cell.compiled:
        layers = model.model.layers  # whole calls: with the checkpoint, whatever part makes it
        for place, layer in enumerate(layers):  # one graph serves them all
            layers[place] = torch.compile(layer, fullgraph=True)
    return model


def keeping(cell: Cell) -> Callable[[], tuple[Any, Any]]:
    """Selective checkpoints: attention's results are kept, under "most" also all products but gate and up.

    Returns:
        What makes the contexts of the forward and of what is made again; a partial, which Dynamo can read.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    inner = cell.shape.inner if cell.checkpoint == "most" else None

    def policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        kept = str(op).startswith(("relampago.forward", "aten._scaled_dot_product"))
        if inner is not None and op is torch.ops.aten.mm.default:
            kept = arguments[1].shape[1] != inner
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def backward(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy and all gradients; each slice of logits lives only until its own backward is done.

    Args:
        head: to the vocabulary.
        hidden: (1, N, width).
        labels: (1, N).

    Returns:
        The mean loss, detached.
    """
    rows, gradient = hidden.shape[1], torch.empty_like(hidden)
    total = torch.zeros((), device=hidden.device)
    for start in range(0, rows, HEAD_ROWS):
        part = hidden[0, start : start + HEAD_ROWS].detach().requires_grad_()
        logits = head(part).float()
        loss = F.cross_entropy(logits, labels[0, start : start + HEAD_ROWS], reduction="sum") / rows
        loss.backward()
        assert part.grad is not None
        gradient[0, start : start + HEAD_ROWS] = part.grad
        total += loss.detach()
        del part, logits, loss
    hidden.backward(gradient)
    return total


def no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Rows keep their query, keys and values enter without work: the shapes and gradients of attention, at no cost."""
    shared = query.shape[1] // value.shape[1]
    grouped = query.unflatten(1, (value.shape[1], shared)) + (key + value)[:, :, None]
    return grouped.flatten(1, 2).transpose(1, 2), None


def no_mask(*_: Any, **__: Any) -> None:
    """None is needed."""
    return None


def main() -> None:
    """Answer one job."""
    import transformers  # noqa: F401 - while nobody waits

    import relampago.integrations.transformers  # noqa: F401

    def answer(**words: Any) -> None:
        print(json.dumps(words), flush=True)

    answer(ready=True)
    line = sys.stdin.readline()
    if line.strip():
        cell = Cell(**json.loads(line))
        answer(result=measure(cell, lambda stage: answer(stage=stage)))


if __name__ == "__main__":
    main()
