"""What the documentation shows runs: docstring examples, README's Python in both languages, drawings of masks."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import relampago as rl

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["api", "mods"])
def test_docstring_examples(name) -> None:
    module = importlib.import_module(f"relampago.{name}")
    failed, tried = doctest.testmod(module, extraglobs={"torch": torch})
    assert tried
    assert not failed


def namespace() -> dict:
    """The names that README's examples take for granted."""
    q, k, v = torch.randn(2, 12, 8, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
    return {
        "torch": torch, "rl": rl, "q": q, "k": k, "v": v, "len_q": 12, "len_k": 12, "mesh": 1,
        "starts": torch.tensor([0, 5]), "bias": torch.randn(8, 12, 12), "sinks": torch.randn(8),
        "shards": [(0, k[:, :6], v[:, :6]), (6, k[:, 6:], v[:, 6:])],
    }  # fmt: skip


@pytest.mark.parametrize("page", ["statistics.md", "bias.md"])
def test_pages_run(page) -> None:
    """A page's blocks, one after the other."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names = namespace()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)
    if "whole" in names:
        want = names["statistics"].rows(names["q"], names["k"], causal=True)
        torch.testing.assert_close(names["whole"], want)
        torch.testing.assert_close(torch.cat(names["sides"], -1), names["received"])


@pytest.mark.parametrize("page", ["README.md", "README.es.md"])
def test_readme_blocks(page) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        names = namespace()
        if "attention_varlen" in block:
            names.update({n: names[n].flatten(0, 1) for n in "qkv"})
            names.update(cu_seqlens=torch.tensor([0, 10, 24], dtype=torch.int32), max_seqlen=14)
        if "PagedKVCache" in block:
            block = block.replace(
                "batch=8, pages=4096, page=64, kv_heads=8, dim=128",
                "batch=2, pages=9, page=4, kv_heads=2, dim=16, dtype=torch.float32",
            ).replace('"cuda"', '"cpu"')
            names.update(k_new=names["k"][:, :3], v_new=names["v"][:, :3], q=names["q"][:, :3])
        exec(compile(block, page, "exec"), names)


def test_fp8_page() -> None:
    """Its blocks run one after the other."""
    text = (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    names = namespace()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "fp8.md", "exec"), names)
    assert names["out"].shape == (2, 1, 32, 128)


def test_the_tour() -> None:
    """The blocks of docs/index.md, one after another."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "index.md", "exec"), names)
    want = rl.attention(names["q"], names["k"], names["v"], causal=True)
    torch.testing.assert_close(names["both"], want)


def test_the_example_in_parts_is_exact() -> None:
    names = namespace()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "merge" in b]
    exec(block, names)
    want = rl.attention(names["q"], names["k"], names["v"], causal=True)
    torch.testing.assert_close(names["out"], want)


MASKS = {
    "Causal()": rl.Causal(),
    "Window(2, 1)": rl.Window(2, 1),
    "Prefix(3)": rl.Prefix(3),
    "Causal() & Document([0, 4])": rl.Causal() & rl.Document(torch.tensor([0, 4])),
}


def test_drawings_of_masks() -> None:
    text = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
    (drawing,) = [d for d in re.findall(r"```\n(.*?)```", text, re.DOTALL) if "█" in d]
    header, *lines = drawing.splitlines()
    starts = [header.index(name) for name in MASKS]
    q = torch.zeros(1, 7, 1, 1)
    v = torch.eye(7)[None, :, None]
    for start, mask in zip(starts, MASKS.values(), strict=True):
        drawn = [[line[start + 2 * i] == "█" for i in range(7)] for line in lines]
        seen = rl.attention(q, q, v, mask=mask)[0, :, 0] > 0
        assert torch.equal(seen, torch.tensor(drawn)), mask
