"""The switch, compiled and not, and the kernels for torch's own dispatcher, tested on the CPU's key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import relampago as rl
from relampago.integrations import sdpa
from relampago.integrations.sdpa.switch import TORCHS


@pytest.fixture(autouse=True)
def _switched_off():
    yield
    assert not sdpa.enabled()
    assert F.scaled_dot_product_attention is TORCHS


class Calls:
    """Counts what reaches relampago's op."""

    def __enter__(self):
        self.mode = FlopCounterMode(display=False).__enter__()
        return self

    def __exit__(self, *error):
        self.mode.__exit__(*error)
        self.flops = [str(op) for op in self.mode.get_flop_counts().get("Global", {})]

    @property
    def ours(self) -> bool:
        return any("relampago" in name for name in self.flops)


def test_a_block_of_code_and_the_whole_process() -> None:
    q = torch.randn(1, 2, 5, 8)
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with sdpa.routed(), Calls() as inside:
        got = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        with sdpa.routed():
            assert sdpa.enabled()
        assert sdpa.enabled()
    assert inside.ours
    torch.testing.assert_close(got, want)
    sdpa.enable()
    try:
        with pytest.raises(RuntimeError, match="expected None with is_causal"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(5, 5), is_causal=True)
    finally:
        sdpa.disable()
    with pytest.raises(KeyError), sdpa.routed():
        raise KeyError


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "padded"])
def test_multihead_attention_and_transformer_encoder(training, masked) -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(3, 7, 16, requires_grad=True)
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None] if masked else None
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)  # True hides, as nn.Transformer has it
    outs = []
    for route in (False, True):
        with Calls() as calls:
            if route:
                with sdpa.routed():
                    out = model(x, mask=causal, src_key_padding_mask=padding, is_causal=not masked)
            else:
                out = model(x, mask=causal, src_key_padding_mask=padding, is_causal=not masked)
        assert calls.ours == route
        outs.append((out, torch.autograd.grad(out.square().sum(), x)[0]))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    with sdpa.routed(), torch.no_grad():  # weights asked for, and the native fast path
        attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
        out, weights = attention(x, x, x)
        assert weights.shape == (3, 7, 7)
        torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], out)


def test_compiled_code_follows_the_switch() -> None:
    torch._dynamo.reset()
    seen = []

    def look(graph, inputs):
        seen.append(any("relampago" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def function(q, mask):
        return F.scaled_dot_product_attention(q * 2, q, q, attn_mask=mask).sin()

    q, mask = torch.randn(2, 2, 5, 8), torch.rand(5, 5) > 0.2
    compiled = torch.compile(function, backend=look, fullgraph=True)
    want = compiled(q, mask)
    with sdpa.routed():
        torch.testing.assert_close(compiled(q, mask), want)
    torch.testing.assert_close(compiled(q, mask), want)
    assert seen[:2] == [False, True]
    torch._dynamo.reset()
    with sdpa.routed():
        whole = torch.compile(
            lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            backend="aot_eager", fullgraph=True, dynamic=True,
        )  # fmt: skip
        for length in (5, 9, 12):
            leaf = torch.randn(2, 2, length, 8, requires_grad=True)
            out = whole(leaf)
            torch.testing.assert_close(out, TORCHS(leaf, leaf, leaf, is_causal=True))
            out.sum().backward()
            assert leaf.grad is not None


class Tagged(torch.Tensor):
    """A subclass with a function of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is TORCHS:
            return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_keep_their_own_rules() -> None:
    q = torch.randn(1, 2, 5, 8).as_subclass(Tagged)
    with sdpa.routed():
        assert F.scaled_dot_product_attention(q, q, q) == "its own"
        parameter = nn.Parameter(torch.randn(1, 2, 5, 8))
        with Calls() as calls:
            F.scaled_dot_product_attention(parameter, parameter, parameter)
    assert calls.ours


@pytest.fixture
def kernels():
    handle = sdpa.activate("CPU")
    yield torch.ops.aten
    handle.remove()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.3}], ids=str)  # fmt: skip
def test_dense_kernels_of_the_dispatcher(kernels, options) -> None:
    """aten's autograd calls the backward with what the forward saved."""
    tensors = [torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = kernels._scaled_dot_product_flash_attention(*tensors, **options)
    out, lse, rng = found[0], found[1], found[6]
    rows = [t.transpose(1, 2) for t in tensors]
    words = {"causal": options.get("is_causal", False), "scale": options.get("scale")}
    if "dropout_p" in options:
        words |= {"dropout_p": 0.3, "dropout_seed": rng.view(torch.int64)[0]}
    want, total = rl.attention(*rows, return_lse=True, **words)
    torch.testing.assert_close((out, lse), (want.transpose(1, 2), total))
    assert out.stride() == tensors[0].stride()
    g = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, tensors, g),
        torch.autograd.grad(want.transpose(1, 2), tensors, g),
    )


CU = torch.tensor([0, 5, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize("window", [(None, None), (2, 0)])
def test_ragged_kernels_of_the_dispatcher(kernels, window) -> None:
    q, k, v = (torch.randn(12, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    sides = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    found = kernels._flash_attention_forward(q, k, v, CU, CU, 7, 7, 0.0, True, False, **sides)
    want, lse = rl.attention_varlen(
        q, k, v, CU, CU, 7, 7, causal=True, window=None if window[0] is None else window, return_lse=True
    )  # fmt: skip
    torch.testing.assert_close(found[:2], (want, lse))
    g = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(found[0], (q, k, v), g), torch.autograd.grad(want, (q, k, v), g)
    )
    with torch.no_grad():
        used = torch.tensor([3, 0, 4], dtype=torch.int32)
        few = kernels._flash_attention_forward(q, k, v, CU, CU, 7, 7, 0.0, True, False, seqused_k=used)[0]  # fmt: skip
        for b, n in ((0, 3), (2, 4)):
            rows = slice(int(CU[b]), int(CU[b + 1]))
            keys = slice(int(CU[b]), int(CU[b]) + n)
            alone = rl.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)[0]
            torch.testing.assert_close(few[rows], alone)
        table = torch.tensor([[1, 0], [2, 2], [2, 0]], dtype=torch.int32)
        pages = torch.randn(3, 4, 2, 8, dtype=torch.float64)
        paged = kernels._flash_attention_forward(
            q, pages, pages, CU, CU, 7, 7, 0.0, True, False, block_table=table
        )[0] if "block_table" in str(kernels._flash_attention_forward.default._schema) else None  # fmt: skip
        if paged is not None:
            keys = pages[table[0].long()].flatten(0, 1)[None, :5]
            alone = rl.attention(q[None, :5], keys, keys, causal=True)[0]
            torch.testing.assert_close(paged[:5], alone)
    if hasattr(kernels, "_flash_attention_forward_no_dropout_inplace"):
        out = torch.empty_like(q)
        write = kernels._flash_attention_forward_no_dropout_inplace
        with torch.no_grad():
            total = write(out, q, k, v, CU, CU, 7, 7, 0.0, True, False, **sides)
        torch.testing.assert_close((out, total), (want, lse))


def test_the_registry_knows_it() -> None:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        with pytest.raises(rl.Unsupported, match="has no registry"):
            sdpa.register()
        return
    sdpa.register()
    assert "relampago" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("relampago")
    assert torch.nn.attention.current_flash_attention_impl() == "relampago"
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    with pytest.raises(RuntimeError):  # the CPU has no such kernel again, and never had one here
        torch.ops.aten._scaled_dot_product_flash_attention(*[torch.randn(1, 1, 3, 8)] * 3)
