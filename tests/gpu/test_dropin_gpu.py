"""Drop-ins on a device: torch's own dispatcher, compiled code, an engine's step in a graph, Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from budget import check
from integrations.formula import attend, both, seen
from torch.nn.attention import SDPBackend, sdpa_kernel

from relampago import flash_attn as fa
from relampago.integrations import sdpa
from relampago.integrations.sdpa import registry
from relampago.integrations.vllm.layer import Batch, Layer, write

HALF = torch.bfloat16


def tensors(*shapes, grad=True):
    return tuple(torch.randn(s, dtype=HALF, device="cuda", requires_grad=grad) for s in shapes)


def judge(name, out, lse, q, k, v, mask, **rest) -> None:
    """Rows (L, heads, D) of one or more sequences against the formula, on the CPU."""
    got = {"out": out.detach().cpu(), "lse": lse.detach().cpu()}
    rows = (t.detach().cpu() for t in (q, k, v))
    check(name, got, *both(*rows, mask, dtype=HALF, **rest), HALF)


def formula(inputs, g, causal, dtype) -> dict[str, torch.Tensor]:
    """Out and gradients of (B, heads, L, D) tensors."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    length = inputs[0].shape[2]
    mask = seen(length, length, causal=causal).to(g.device)
    out = attend(*(t.transpose(1, 2) for t in leaves), mask, dtype=dtype)[0].transpose(1, 2)
    return named(out, *torch.autograd.grad(out, leaves, g.to(dtype)))


def named(*found) -> dict[str, torch.Tensor]:
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


@pytest.fixture
def calls(monkeypatch):
    """torch's dispatcher runs relampago; what it called."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("torch has no registry of flash attention; needs 2.11")
    seen_calls: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(registry, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            seen_calls.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(registry, name, counted)
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("relampago")
    yield seen_calls
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_dispatcher_forward_and_backward(calls, causal) -> None:
    q, k, v = tensors(*[(2, 8, 300, 64)] * 3)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        g = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), g)
    assert calls == ["forward", "backward"]
    expected = (formula((q, k, v), g, causal, t) for t in (HALF, torch.float64))
    check("dispatched", named(out, *grads), *expected, HALF)
    torch.nn.attention.restore_flash_attention_impl()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v)
    assert calls == ["forward", "backward"]


def test_torchs_dispatcher_ragged_and_compiled(calls) -> None:
    parts = [torch.randn(n, 8, 64, dtype=HALF, device="cuda") for n in (100, 7, 301)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    q = nested.transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.transpose(1, 2).values().float().sum().backward()
    assert calls[:1] == ["forward"]
    assert nested.grad is not None
    for got, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        alone = part.cpu(), part.cpu(), part.cpu(), seen(len(part), len(part), causal=True)
        expected = ({"out": pair["out"]} for pair in both(*alone, dtype=HALF))
        check("ragged", {"out": got}, *expected, HALF)
    before = len(calls)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), fullgraph=True
    )
    (x,) = tensors((2, 8, 300, 64), grad=False)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.equal(compiled(x), F.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert len(calls) == before + 2


def test_routed_and_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    leaves = tensors(*[(2, 8, 300, 64)] * 3)
    mask = torch.rand(2, 1, 1, 300, device="cuda") > 0.2
    g = torch.randn_like(leaves[0])

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, attn_mask=mask).sin()

    def results(fn, dtype):
        wide = tuple(t.detach().to(dtype).requires_grad_() for t in leaves)
        out = fn(*wide)
        return named(out, *torch.autograd.grad(out, wide, g.to(dtype)))

    with sdpa.routed():
        got = results(torch.compile(fn, fullgraph=True), HALF)
    with sdpa_kernel(SDPBackend.MATH):
        check("routed, compiled", got, results(fn, HALF), results(fn, torch.float64), HALF)


@pytest.mark.parametrize("page", [16, 256])
def test_kvcache_appends_turns_and_attends(page) -> None:
    rows, heads, kv, dim, lengths = 3, 8, 2, 64, [5, 300, 90]
    q, k, v = tensors((3, rows, heads, dim), (3, rows, kv, dim), (3, rows, kv, dim), grad=False)
    most = -(-320 // page)
    table = torch.randperm(3 * most, device="cuda").view(3, most).int()
    k_pages, v_pages = tensors(*[(3 * most, page, kv, dim)] * 2, grad=False)
    out, lse = fa.flash_attn_with_kvcache(
        q, k_pages, v_pages, k, v, cache_seqlens=torch.tensor(lengths, device="cuda").int(), block_table=table,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        place = torch.arange(n + rows, device="cuda")
        index = (table[b, place // page].long(), place % page)
        assert torch.equal(k_pages[index][-rows:], k[b])
        mask = seen(rows, n + rows, causal=True)
        judge(f"page {page}", out[b], lse[b], q[b], k_pages[index], v_pages[index], mask)


def test_attention_chunk_and_seqused() -> None:
    cu = torch.tensor([0, 200, 510], device="cuda", dtype=torch.int32)
    q, k, v = tensors((510, 8, 64), (510, 2, 64), (510, 2, 64))
    used = torch.tensor([150, 310], device="cuda", dtype=torch.int32)
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k, v, cu, cu, 310, 310, causal=True, attention_chunk=64, seqused_k=used, return_attn_probs=True
    )  # fmt: skip
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    rows = slice(200, 510)
    mask = seen(310, 310, causal=True, chunk=64)
    judge("chunk", out[rows], lse[:, rows], q[rows], k[rows], v[rows], mask)


def test_an_engines_step_in_a_graph() -> None:
    """Captured once, replayed with other lengths, pages and queries."""
    q, k, v = tensors((4, 8, 64), (4, 2, 64), (4, 2, 64), grad=False)
    k_pages, v_pages = tensors(*[(64, 16, 2, 64)] * 2, grad=False)
    table = (torch.randperm(63, device="cuda")[:60] + 1).view(4, 15).int()
    lengths = torch.tensor([5, 100, 1, 33], device="cuda", dtype=torch.int32)
    slots = torch.zeros(4, dtype=torch.long, device="cuda")
    batch = Batch(torch.arange(5, device="cuda").int(), lengths, table, 4, 1)
    layer = Layer(0.125)

    def place() -> None:
        last = (lengths - 1).long()
        slots.copy_(table.gather(1, (last // 16)[:, None])[:, 0] * 16 + last % 16)

    def step() -> torch.Tensor:
        write(k, v, k_pages, v_pages, slots)
        return layer.attend(q, k_pages, v_pages, batch)

    place()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for new in ([5, 100, 1, 33], [6, 230, 17, 1]):
        lengths.copy_(torch.tensor(new))
        q.normal_()
        place()
        graph.replay()
        assert torch.equal(out, step())


# Left alone, continuous batching takes 0.9 of a card's memory for keys, whoever shares it, and warms up by attending to
# them all: with this model 171 million tokens of an H200.
ROOM = {"num_blocks": 16, "max_batch_tokens": 256}


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
def test_transformers_flash_attention_2_and_continuous_batching() -> None:
    transformers = pytest.importorskip("transformers")
    fa.install()
    try:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to("cuda", HALF).eval()
        prompts = [torch.randint(1, 64, (n,)).tolist() for n in (5, 19, 33)]
        model.set_attn_implementation("flash_attention_2")
        words = transformers.GenerationConfig(
            max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        room = transformers.ContinuousBatchingConfig(**ROOM)
        found = model.generate_batch(
            inputs=prompts, generation_config=words, continuous_batching_config=room
        )
        together = [result.generated_tokens for result in found.values()]
        alone = [
            model.generate(torch.tensor([p], device="cuda"), generation_config=words)[0, len(p) :]
            for p in prompts
        ]
    finally:
        fa.uninstall()
    model.set_attn_implementation("eager")
    for prompt, one, other in zip(prompts, together, alone, strict=True):
        judge_tokens(model, prompt, one)
        judge_tokens(model, prompt, other.tolist())


def judge_tokens(model, prompt: list[int], written: list[int]) -> None:
    """Each token's logit is the largest, but for what both of two logits may be off: four times eager attention's."""
    assert len(written) == 6
    ids = torch.tensor([prompt + written], device=model.device)
    with torch.no_grad():
        standard, oracle = (
            m(ids).logits[0, len(prompt) - 1 : -1].double()
            for m in (model, copy.deepcopy(model).double())
        )
    error = (standard - oracle).abs().max()
    chosen = oracle.gather(1, torch.tensor(written, device=model.device)[:, None])[:, 0]
    assert (oracle.amax(1) - chosen <= 2 * 4 * error).all()
