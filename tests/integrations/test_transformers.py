"""Transformers under attn_implementation="relampago": logits of many architectures against eager, tiny and random."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from budget import check
from integrations.formula import attend

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import relampago as rl
import relampago.integrations.transformers as integration
from relampago.integrations.transformers import masks

VOCAB, LENGTH = 48, 11
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
DECODERS = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 4},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": GROUPED
    | {"sliding_window": 4, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "GptOss": GROUPED | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi3": GROUPED,
    "Mixtral": GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "GPTNeoX": SMALL,
    "GPT2": {
        "vocab_size": VOCAB,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "OPT": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
ENCODERS = {
    "Bert": SMALL,
    "Roberta": SMALL,
    "ModernBert": SMALL
    | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBert": {
        "vocab_size": VOCAB,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    },
}
SEQ2SEQ = {
    "T5": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "Bart": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "forced_eos_token_id": None,
    },
    "Whisper": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 12,
        "max_target_positions": 64,
        "num_mel_bins": 8,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
    },
}
HEADS = {
    "ModernBert": "ForMaskedLM",
    "T5": "ForConditionalGeneration",
    "Bart": "ForConditionalGeneration",
    "Whisper": "ForConditionalGeneration",
    "GPT2": "LMHeadModel",
}


def build(name: str) -> Any:
    words = {**DECODERS, **ENCODERS, **SEQ2SEQ}[name]
    config = getattr(transformers, f"{name}Config")(**words)
    head = HEADS.get(name, "ForCausalLM" if name in DECODERS else "ForMaskedLM")
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config).eval()
    for (
        parameter
    ) in model.parameters():  # larger weights than a fresh model's: attention that matters
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def ids(rows: int = 2, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def padded(side: str) -> torch.Tensor:
    place = torch.arange(LENGTH)
    short = place >= 4 if side == "left" else place < 7
    return torch.stack([short, torch.ones_like(short)]).long()


def oracle(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, is_causal: Any = None,
    position_bias: Any = None, softcap: Any = None, s_aux: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """The formula, for fp64: Transformers' eager attention takes the softmax in fp32, and gives NaN for hidden rows."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask
    if mask is None and attention_mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    rows = (t.transpose(1, 2) for t in (query, key, value))
    words = {"scale": scaling, "softcap": softcap or 0.0, "bias": bias, "sinks": s_aux}
    return attend(*rows, mask, dtype=query.dtype, **words)[0], None


transformers.AttentionInterface.register("oracle", oracle)
AttentionMaskInterface.register("oracle", sdpa_mask)


def agree(name: str, model: Any, run: Any) -> None:
    """What `run(model)` returns under relampago is as near to the formula in fp64 as eager in fp32 is."""
    results = []
    for kind, dtype in (("relampago", torch.float32), ("eager", torch.float32), ("oracle", torch.float64)):  # fmt: skip
        other = copy.deepcopy(model).to(dtype)
        other.set_attn_implementation(kind)
        if name in ("GptOss", "Mixtral"):
            other.set_experts_implementation("eager")  # the default knows no fp64
        found = run(other)
        results.append({**found, "lse": found["out"].logsumexp(-1)})
    check(name, *results, torch.float32)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name) -> None:
    """Padding at either side, then prefill, single tokens and a chunk of tokens against a growing cache."""

    @torch.no_grad()
    def run(model):
        whole = []
        for side in ("left", "right"):
            mask = padded(side)
            whole.append(model(ids(), attention_mask=mask).logits[mask.bool()])
        mask, cache, start = padded("left"), None, 0
        for step in (6, 1, 1, 3):
            part = slice(start, start + step)
            words = {"attention_mask": mask[:, : start + step], "past_key_values": cache}
            found = model(ids()[:, part], use_cache=True, **words)
            whole.append(found.logits[mask[:, part].bool()])
            cache, start = found.past_key_values, start + step
        return {"out": torch.cat(whole)}

    agree(name, build(name), run)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_packed_sequences(name) -> None:
    """Positions that begin anew are other sequences; each gives what it gives alone."""
    lengths = (5, 2, 4)
    place = torch.cat([torch.arange(n) for n in lengths])[None]

    @torch.no_grad()
    def run(model):
        return {"out": model(ids(1), position_ids=place, use_cache=False).logits}

    model = build(name)
    agree(name, model, run)
    if name == "GptOss":
        return  # Transformers tells its masks no positions: its packed sequences see one another, in eager too
    model.set_attn_implementation("relampago")
    with torch.no_grad():
        alone = [model(part).logits for part in ids(1).split(lengths, 1)]
    torch.testing.assert_close(run(model)["out"], torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name) -> None:
    @torch.no_grad()
    def run(model):
        mask = padded("right")
        free = model(ids(), attention_mask=torch.ones_like(mask)).logits.flatten(0, 1)
        return {"out": torch.cat([free, model(ids(), attention_mask=mask).logits[mask.bool()]])}

    agree(name, build(name), run)


def sources(name: str) -> dict[str, torch.Tensor]:
    if name == "Whisper":
        g = torch.Generator().manual_seed(1)
        return {"input_features": torch.randn(2, 8, 24, generator=g)}
    return {"input_ids": ids(seed=8), "attention_mask": padded("right")}


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_cross_attention_and_t5s_bias(name) -> None:
    @torch.no_grad()
    def run(model):
        given = sources(name)
        if name == "Whisper":
            given = {"input_features": given["input_features"].to(model.dtype)}
        return {"out": model(**given, decoder_input_ids=ids()).logits}

    agree(name, build(name), run)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss", "GPT2", *SEQ2SEQ])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_in_a_batch(name, cache) -> None:
    if cache == "static" and name in ("GPT2",):
        pytest.skip("Transformers' GPT-2 has no static cache")
    model = build(name)
    given = sources(name)
    if name in DECODERS:
        given = {"input_ids": ids(), "attention_mask": padded("left")}
    found = []
    for kind in ("eager", "relampago"):
        model.set_attn_implementation(kind)
        words = {} if cache == "dynamic" else {"cache_implementation": "static"}
        found.append(model.generate(**given, max_new_tokens=7, min_new_tokens=7, do_sample=False, **words))  # fmt: skip
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss", "T5", "Bert"])
def test_training_with_gradient_checkpointing(name) -> None:
    model = build(name)

    def run(model):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
        given = {"input_ids": ids(), "attention_mask": padded("right"), "labels": ids()}
        out = model(**given)
        out.loss.backward()
        named = {f"d{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"out": out.logits[padded("right").bool()].detach(), **named}

    for module in model.modules():  # Transformers passes attention's dropout as a number
        for attribute in ("dropout", "attention_dropout", "dropout_p"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    agree(name, model, run)


def test_attention_dropout_is_applied_in_training() -> None:
    model = build("Llama")
    model.set_attn_implementation("relampago")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    still = model(ids()).logits
    assert torch.equal(still, model(ids()).logits)
    assert not torch.equal(still, model.train()(ids()).logits)


def test_compiled_model() -> None:
    torch._dynamo.reset()
    model = build("Llama")
    model.set_attn_implementation("relampago")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for mask in (None, padded("left")):
            want = model(ids(), attention_mask=mask, use_cache=False).logits
            got = compiled(ids(), attention_mask=mask, use_cache=False).logits
            keep = torch.ones(2, LENGTH).bool() if mask is None else mask.bool()
            torch.testing.assert_close(got[keep], want[keep])


@torch.no_grad()
def test_compiled_layers_of_a_model_that_is_not() -> None:
    """Layers get masks made outside of their graph, which stay unwritten in it; the second length is a dynamic one."""
    torch._dynamo.reset()
    model = build("Mistral")
    model.set_attn_implementation("relampago")
    runs = [(ids(), padded("left")), (ids(), None), (ids()[:, :-3], None)]

    def outputs() -> list[torch.Tensor]:
        return [model(i, attention_mask=m, use_cache=False).logits for i, m in runs]

    want = outputs()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "sdpa_mask", lambda *a, **k: pytest.fail("a mask is written"))
        got = outputs()
    for (_, mask), mine, theirs in zip(runs, got, want, strict=True):
        keep = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(mine[keep], theirs[keep])


def test_custom_masks_bool_and_float() -> None:
    g = torch.Generator().manual_seed(2)
    seen = (torch.rand(2, 1, LENGTH, LENGTH, generator=g) > 0.4) | torch.eye(LENGTH).bool()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    @torch.no_grad()
    def run(model):
        bare = model.config._attn_implementation == "eager"
        masks = [added.to(model.dtype) if bare else seen, added.to(model.dtype)]
        return {
            "out": torch.cat(
                [model(ids(), attention_mask=m, use_cache=False).logits for m in masks]
            )
        }

    agree("custom masks", build("Llama"), run)


def test_flattened_batches_with_cu_seq_lens() -> None:
    """Padding-free training: the collator's cu_seq_lens, without positions that would tell."""
    cu = torch.tensor([0, 5, 7, 11], dtype=torch.int32)
    attention = build("Mistral").model.layers[0].self_attn
    q, k, v = (torch.randn(1, h, 11, 8, dtype=torch.float64) for h in (4, 2, 2))
    got, weights = integration.attention_forward(
        attention, q, k, v, None, sliding_window=3, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5
    )  # fmt: skip
    assert weights is None
    for a, b in ((0, 5), (5, 7), (7, 11)):
        i = torch.arange(b - a)
        mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 3)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(got[:, a:b], want.transpose(1, 2))


def test_precision_of_a_whole_model(monkeypatch) -> None:
    """`using(precision="fp8")` is the word given in every layer, and a cast in all of them."""
    model = build("Llama")
    model.set_attn_implementation("relampago")
    plain = model(ids()).logits
    with rl.using(precision="fp8"):
        found = model(ids()).logits
    module = "relampago.integrations.transformers.attention.attention"
    monkeypatch.setattr(module, partial(rl.attention, precision="fp8"))
    assert torch.equal(found, model(ids()).logits)
    assert not torch.equal(found, plain)
