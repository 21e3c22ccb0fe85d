"""The vLLM backend: its layer on pages as vLLM lays them out, and vLLM's own classes where vLLM can be imported."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from budget import check
from integrations.formula import both, seen

from relampago.integrations.vllm.layer import Batch, Layer, write
from relampago.quant import E4M3

H, G, D, PAGE, PAGES = 4, 2, 16, 8, 24
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vllm is not installed (its Python parts: VLLM_TARGET_DEVICE=empty pip wheel --no-deps vllm)",
)
COUNTS, BEFORE = (
    [7, 1, 5, 1],
    [9, 20, 0, 3],
)  # a chunk of a prompt, a token, a whole prompt, a token


K_SCALE, V_SCALE = torch.tensor([0.01, 0.03]), torch.tensor([0.004, 0.5])  # the least saturates


def kept(t: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What a cache keeps of tokens (L, G, D)."""
    if scale is None:
        return t
    by = scale[:, None]
    return (t / by).clamp(-448, 448).to(E4M3).float() * by


class Step:
    """A step of an engine: what each request has had before, new tokens, and pages in no order."""

    def __init__(
        self, counts: list[int], before: list[int], layout: str = "planes", eights: bool = False
    ) -> None:
        g = torch.Generator().manual_seed(sum(counts) + 7)
        self.counts, self.before, self.total = counts, before, sum(counts)
        self.q, self.k, self.v = (torch.randn(self.total + 3, h, D, generator=g) for h in (H, G, G))
        order = torch.randperm(PAGES - 1, generator=g) + 1  # page 0 is nobody's
        self.table = torch.zeros(len(counts), 5, dtype=torch.int32)
        self.lengths = torch.tensor(before).int() + torch.tensor(counts).int()
        used = 0
        for b, n in enumerate(self.lengths.tolist()):
            need = -(-n // PAGE)
            self.table[b, :need] = order[used : used + need]
            used += need
        self.past = [tuple(torch.randn(n, G, D, generator=g) for _ in range(2)) for n in before]
        self.cu = torch.tensor([0, *counts]).cumsum(0).int()
        if layout == "planes":
            self.cache = torch.full((PAGES, 2, PAGE, G, D), torch.nan)
            pages = self.cache.unbind(1)
        else:  # vLLM 0.33: keys and values side by side, heads before tokens
            self.cache = torch.full((PAGES, G, PAGE, 2 * D), torch.nan)
            pages = self.cache.transpose(1, 2).split(D, -1)
        self.scales = (K_SCALE, V_SCALE) if eights else (None, None)
        if eights:  # bytes, as vLLM has them
            self.cache = self.cache.to(E4M3).view(torch.uint8)
            whole = self.cache.view(E4M3)
            pages = whole.unbind(1) if layout == "planes" else whole.transpose(1, 2).split(D, -1)
        self.pages = pages
        for b, (k, v) in enumerate(self.past):
            write(k, v, *pages, self.slots_of(b, range(before[b])), *self.scales)
        new = [
            self.slots_of(b, range(before[b], before[b] + counts[b])) for b in range(len(counts))
        ]
        self.slots = torch.cat(new)

    def slots_of(self, b: int, places: range) -> torch.Tensor:
        slots = [int(self.table[b, j // PAGE]) * PAGE + j % PAGE for j in places]
        return torch.tensor(slots, dtype=torch.long)

    def batch(self, **words) -> Batch:
        return Batch(self.cu, self.lengths, self.table, self.total, max(self.counts), **words)

    def agree(self, out: torch.Tensor, mask: dict, **rest) -> None:
        for b, n in enumerate(self.counts):
            rows = slice(int(self.cu[b]), int(self.cu[b + 1]))
            old_k, old_v = self.past[b]
            k, v = torch.cat([old_k, self.k[rows]]), torch.cat([old_v, self.v[rows]])
            k, v = (kept(t, scale) for t, scale in zip((k, v), self.scales, strict=True))
            results = both(self.q[rows], k, v, seen(n, len(k), **mask), dtype=torch.float32, **rest)
            for result in results:
                result["lse"] = result["out"].logsumexp(-1)
            got = {"out": out[rows], "lse": out[rows].logsumexp(-1)}
            check(f"request {b}", got, *results, torch.float32)


SLOPES = torch.linspace(0.1, 0.6, H)
LAYERS = {
    "plain": (Layer(0.25), {"causal": True}, {}),
    "window": (Layer(0.25, (5, 0)), {"causal": True, "left": 5}, {}),
    "softcap": (Layer(0.25, softcap=2.0), {"causal": True}, {"softcap": 2.0}),
    "alibi": (Layer(0.25, alibi_slopes=SLOPES), {"causal": True}, {"alibi": SLOPES}),
    "sinks": (Layer(0.25, sinks=SLOPES), {"causal": True}, {"sinks": SLOPES}),
}


@pytest.mark.parametrize("layout", ["planes", "side by side"])
@pytest.mark.parametrize("counts", [COUNTS, [1, 1, 1, 1]], ids=["mixed", "decode"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_step(name, counts, layout) -> None:
    step = Step(counts, BEFORE, layout)
    write(step.k, step.v, *step.pages, step.slots)
    layer, mask, rest = LAYERS[name]
    out = layer.attend(step.q, *step.pages, step.batch())
    assert out.shape == (step.total, H, D)
    step.agree(out, mask, scale=0.25, **rest)


@pytest.mark.parametrize("layout", ["planes", "side by side"])
@pytest.mark.parametrize("counts", [COUNTS, [1, 1, 1, 1]], ids=["mixed", "decode"])
@pytest.mark.parametrize("name", ["plain", "alibi"])
def test_a_step_with_a_cache_in_e4m3(name, counts, layout) -> None:
    """Within fp32's budget of attention to what the cache keeps, saturated entries included."""
    step = Step(counts, BEFORE, layout, eights=True)
    write(step.k, step.v, *step.pages, step.slots, *step.scales)
    layer, mask, rest = LAYERS[name]
    out = layer.attend(step.q, *step.pages, step.batch(), *step.scales)
    step.agree(out, mask, scale=0.25, **rest)


@pytest.mark.parametrize("eights", [False, True], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("name", ["plain", "softcap", "sinks"])
def test_a_shared_prefix_by_cascade(name, eights) -> None:
    step = Step(COUNTS, [20, 17, 16, 24], eights=eights)
    step.table[:, :2] = step.table[0, :2]
    first = step.past[0]
    step.past = [
        tuple(torch.cat([whole[:16], own[16:]]) for whole, own in zip(first, past, strict=True))
        for past in step.past
    ]
    write(step.k, step.v, *step.pages, step.slots, *step.scales)
    layer, mask, rest = LAYERS[name]
    shared = layer.attend(step.q, *step.pages, step.batch(shared=16), *step.scales)
    step.agree(shared, mask, scale=0.25, **rest)


def test_padding_goes_to_the_page_that_is_nobodys() -> None:
    step = Step([2, 1], [3, 0])
    before = [t.clone() for t in step.pages]
    slots = torch.tensor([int(step.slots[0]), -1, -1])
    write(step.k, step.v, *step.pages, slots)
    for was, now, new in zip(before, step.pages, (step.k, step.v), strict=True):
        assert torch.equal(now[slots[0] // PAGE, slots[0] % PAGE], new[0])
        changed = (was.nan_to_num(9.0) != now.nan_to_num(9.0)).flatten(1).any(1).nonzero().flatten()
        assert set(changed.tolist()) == {0, int(slots[0]) // PAGE}


@needs_vllm
@pytest.mark.filterwarnings("ignore")
class TestVllmsOwnClasses:
    """Registration, configuration, metadata and a layer, all through vLLM's own code."""

    def impl(self, **words):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from relampago.integrations.vllm import register

        register()
        backend = AttentionBackendEnum.CUSTOM.get_class()
        assert backend.get_name() == "CUSTOM"
        return backend, backend.get_impl_cls()(H, D, 0.25, G, **words)

    def metadata(self, backend, step, **words):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        common = CommonAttentionMetadata(
            query_start_loc=step.cu, query_start_loc_cpu=step.cu, seq_lens=step.lengths, num_reqs=len(step.counts),
            num_actual_tokens=step.total, max_query_len=max(step.counts), max_seq_len=40,
            block_table_tensor=step.table, slot_mapping=step.slots, **words,
        )  # fmt: skip
        return builder.build(0, common)

    def layout(self) -> str:
        from vllm.v1.attention.backend import AttentionBackend

        return "planes" if hasattr(AttentionBackend, "get_kv_cache_shape") else "side by side"

    def test_configuration(self) -> None:
        from vllm.platforms.interface import DeviceCapability

        backend, _ = self.impl()
        words = {
            "head_size": D, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
            "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
            "use_per_head_quant_scales": False, "attn_type": "decoder",
            "device_capability": DeviceCapability(9, 0),
        }  # fmt: skip
        assert backend.validate_configuration(**words) == []
        for name in ("fp8", "fp8_e4m3"):
            eights = {**words, "kv_cache_dtype": name, "use_per_head_quant_scales": True}
            assert backend.validate_configuration(**eights) == []
            refused = backend.validate_configuration(
                **eights | {"device_capability": DeviceCapability(8, 0)}
            )
            assert refused == ["a KV cache in FP8 needs a machine that has e4m3 (sm89 or newer)"]
        refused = backend.validate_configuration(**words | {"kv_cache_dtype": "fp8_e5m2"})
        assert refused == ["kv_cache_dtype not supported"]
        with pytest.raises(NotImplementedError, match="fp8_e5m2"):
            self.impl(kv_cache_dtype="fp8_e5m2")

    @pytest.mark.parametrize("counts", [COUNTS, [1, 1, 1, 1]], ids=["mixed", "decode"])
    @pytest.mark.parametrize(
        "words",
        [{}, {"sliding_window": 6}, {"logits_soft_cap": 2.0}, {"sinks": SLOPES}],
        ids=["plain", "window", "softcap", "sinks"],
    )
    def test_a_layer(self, words, counts) -> None:
        step = Step(counts, BEFORE, self.layout())
        backend, impl = self.impl(**words)
        impl.do_kv_cache_update(None, step.k, step.v, step.cache, step.slots)
        output = torch.full((step.total + 3, H, D), 5.0)
        meta = self.metadata(backend, step)
        assert meta.num_actual_tokens == step.total
        back = impl.forward(None, step.q, step.k, step.v, step.cache, meta, output)
        assert back is output
        assert (output[step.total :] == 5.0).all()
        mask = {"causal": True, "left": words.get("sliding_window", 0) - 1}
        rest = {"softcap": words.get("logits_soft_cap", 0.0), "sinks": words.get("sinks")}
        step.agree(output, mask, scale=0.25, **rest)
        assert (impl.forward(None, step.q, step.k, step.v, step.cache, None, output) == 0).all()

    @pytest.mark.parametrize("per_head", [False, True])
    @pytest.mark.parametrize("counts", [COUNTS, [1, 1, 1, 1]], ids=["mixed", "decode"])
    def test_a_layer_with_a_cache_in_e4m3(self, counts, per_head) -> None:
        """A layer's scales are fp32 scalars, as vLLM's `set_default_quant_scales` registers them, or one per head."""
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

        layer = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03))
        step = Step(counts, BEFORE, self.layout(), eights=True)
        if per_head:
            layer._k_scale, layer._v_scale = step.scales
        else:
            step.scales = torch.full((G,), 0.02), torch.full((G,), 0.03)
            for b, past in enumerate(step.past):  # cast anew
                write(*past, *step.pages, step.slots_of(b, range(step.before[b])), *step.scales)
        backend, impl = self.impl(kv_cache_dtype="fp8")
        assert step.cache.dtype == STR_DTYPE_TO_TORCH_DTYPE["fp8"]
        impl.do_kv_cache_update(layer, step.k, step.v, step.cache, step.slots)
        output = torch.empty(step.total + 3, H, D)
        impl.forward(
            layer, step.q, step.k, step.v, step.cache, self.metadata(backend, step), output
        )
        step.agree(output, {"causal": True}, scale=0.25)

    def test_encoders(self) -> None:
        step = Step([7, 1, 5, 1], [0, 0, 0, 0])
        backend, impl = self.impl(attn_type="encoder_only")
        meta = self.metadata(backend, step, causal=False)
        output = torch.empty(step.total + 3, H, D)
        impl.forward(None, step.q, step.k, step.v, torch.empty(0), meta, output)
        step.agree(output, {}, scale=0.25)
