"""install(): what `import flash_attn` finds, in modules and in metadata, and a real one that is not shadowed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
import torch

import relampago as rl
from relampago import flash_attn as fa

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn itself is installed here"
)


@pytest.fixture(autouse=True)
def _undone():
    yield
    fa.uninstall()


def test_modules_and_metadata() -> None:
    fa.install()
    import flash_attn
    from flash_attn.bert_padding import unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from flash_attn.layers.rotary import RotaryEmbedding

    assert flash_attn.flash_attn_func is fa.flash_attn_func
    assert flash_attn_varlen_func is fa.flash_attn_varlen_func
    assert unpad_input.__module__ == "relampago.flash_attn.padding"
    assert RotaryEmbedding.__module__ == "relampago.flash_attn.rotary"
    assert flash_attn.__version__ == importlib.metadata.version("flash_attn") == "2.8.3"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.util.find_spec("flash_attn_interface") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.cute")
    q = torch.randn(1, 5, 2, 8)
    assert torch.equal(flash_attn.flash_attn_func(q, q, q), rl.attention(q, q, q))
    fa.install(flash_attn_3=True)
    import flash_attn_interface

    assert importlib.metadata.version("flash-attn-3") == "3.0.0"
    assert torch.equal(flash_attn_interface.flash_attn_func(q, q, q), rl.attention(q, q, q))
    fa.uninstall()
    for name in ("flash_attn", "flash_attn_interface"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_a_real_one_is_not_shadowed(tmp_path, monkeypatch) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(rl.InvalidInput, match=r"flash_attn is installed \(.*flash_attn.*\)"):
        fa.install()
    assert importlib.import_module("flash_attn").mine
    fa.install(replace=True)
    assert importlib.import_module("flash_attn").flash_attn_func is fa.flash_attn_func
    fa.uninstall()
    assert importlib.import_module("flash_attn").mine
    del sys.modules["flash_attn"]


TRANSFORMERS = """
import torch
torch.cuda.is_available = lambda: True  # Transformers refuses flash attention where no GPU is
import relampago.flash_attn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available
assert not is_flash_attn_2_available()
relampago.flash_attn.install()
assert is_flash_attn_2_available()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 64, (2, 9))
mask = torch.ones_like(ids)
mask[0, :4] = 0
with torch.no_grad():
    want = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("flash_attention_2")
    got = model(ids, attention_mask=mask).logits
    packed = torch.arange(9).repeat(2)[None]
    one = model(ids.view(1, -1), position_ids=packed).logits.view(2, 9, -1)
    alone = model(ids).logits
torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-4)
print("same logits")
"""


def test_transformers_flash_attention_2() -> None:
    """Transformers' own flash_attention_2, padded and packed, runs on relampago, even if it was imported before."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same logits" in done.stdout
