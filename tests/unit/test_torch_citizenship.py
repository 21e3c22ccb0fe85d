"""What a PyTorch user expects of an operator: opcheck, compile, autocast, checkpointing, FLOPs, pickling."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import relampago as rl
from relampago.api import Options, prepare
from relampago.cache import KVCache
from relampago.cases import CONTRACT, find
from relampago.flash_attn import flash_attn_with_kvcache
from relampago.mods import ScoreMod, relative_bias, softcap
from relampago.op import accumulate_backward_op, accumulate_op, backward_op, forward_op
from relampago.plan import Plan


def make(batch=2, length=24, heads=4, kv=2, dim=16, dtype=torch.float32):
    shapes = ((batch, length, heads, dim), (batch, length, kv, dim), (batch, length, kv, dim))
    return tuple(torch.randn(s, dtype=dtype) for s in shapes)


OPCHECK = (
    "causal",
    "gqa",
    "bias",
    "sinks",
    "dropout",
    "documents",
    "mask-function",
    "alibi",
    "packed",
    "dim-40-v-72",
)


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck(name) -> None:
    tensors, options = find(name).make(torch.float32)
    if "cu_seqlens_q" in options:
        from relampago.api import Packing

        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        packing = Packing(*(options.pop(n) for n in names))
        call = prepare(*tensors, Options(**options), packing=packing)
    else:
        call = prepare(*tensors, Options(**options))
    leaves = [t.requires_grad_() if t is not None and n < 5 else t for n, t in enumerate(call)]
    torch.library.opcheck(forward_op, tuple(leaves))
    with torch.no_grad():
        out, lse = forward_op(*call)
        wanted = [True, True, True, call.bias is not None, call.sinks is not None]
        torch.library.opcheck(backward_op, (torch.ones_like(out), None, out, lse, wanted, *call))


def test_opcheck_of_folding_into_a_result() -> None:
    call = prepare(*make(), Options(causal=True), shard=True)
    out, lse = forward_op(*call)
    torch.library.opcheck(accumulate_op, (out, lse, False, *call))


@pytest.mark.parametrize("anew", [True, False])
def test_opcheck_of_adding_to_gradients(anew) -> None:
    call = prepare(*make(), Options(causal=True), shard=True)
    out, lse = forward_op(*call)
    sums = [torch.zeros_like(t) for t in call[:3]]
    args = (*sums, anew, torch.ones_like(out), out, lse, None, None, *call)
    torch.library.opcheck(accumulate_backward_op, args)


def test_gradcheck_with_lse_bias_and_sinks() -> None:
    q, k, v = (t.requires_grad_() for t in make(1, 6, 2, 1, 3, torch.float64))
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def fn(q, k, v, bias, sinks):
        return rl.attention(
            q, k, v, bias=bias, sinks=sinks, causal=True, softcap=3.0, return_lse=True
        )

    assert torch.autograd.gradcheck(fn, (q, k, v, bias, sinks))


def test_compile_fullgraph_forward_and_backward() -> None:
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in make())
    seen = torch.rand(q.shape[1], k.shape[1]) > 0.2

    def fn(q, k, v):
        out, lse = rl.attention(
            q * 2, k, v, causal=True, window=(7, 0), mask=seen, softcap=9.0, return_lse=True
        )
        return out.sin(), lse

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    want, got = fn(q, k, v), compiled(q, k, v)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
    dout = torch.randn_like(want[0])
    for a, b in zip(
        torch.autograd.grad(want[0], (q, k, v), dout),
        torch.autograd.grad(got[0], (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


NUMBERS = {
    "scale": ((0.5, 0.7, 0.9), lambda number: {"causal": True, "scale": number}),
    "softcap": ((0.5, 0.7, 0.9), lambda number: {"causal": True, "softcap": number}),
    "left": ((4, 6, 8), lambda number: {"window": (number, 0)}),
    "right": ((4, 6, 8), lambda number: {"window": (3, number)}),
    "prefix": ((4, 6, 8), lambda number: {"mask": rl.Prefix(number) & rl.Window(9, None)}),
}


@pytest.mark.parametrize("option", NUMBERS)
def test_compile_takes_another_number_in_each_call(option: str) -> None:
    """From the second on Dynamo has a symbol for it."""
    torch._dynamo.reset()
    q, k, v = make()
    numbers, options = NUMBERS[option]

    def fn(q, k, v, number):
        return rl.attention(q, k, v, **options(number)) * 2

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for number in numbers:
        torch.testing.assert_close(compiled(q, k, v, number), fn(q, k, v, number))


@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_a_number_without_bound_is_refused(option: str) -> None:
    with pytest.raises(rl.InvalidInput, match=f"{option} is inf"):
        rl.attention(*make(), **{option: float("inf")})


def test_compile_dynamic_lengths_without_recompiling() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda q, k, v: rl.attention(q, k, v, causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for length in (24, 31, 50, 77):
        q, k, v = make(length=length)
        torch.testing.assert_close(compiled(q, k, v), rl.attention(q, k, v, causal=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"mask": rl.Document(torch.tensor([0, 9]))},
        {"alibi_slopes": torch.rand(4)},
        {"dropout_p": 0.2, "dropout_seed": 5},
        {"mask": rl.Prefix(5) & rl.Window(3, None)},
    ],
    ids=["documents", "alibi", "dropout", "prefix-window"],
)
def test_compile_options(options) -> None:
    torch._dynamo.reset()
    q, k, v = make()
    compiled = torch.compile(
        lambda q, k, v: rl.attention(q, k, v, causal=True, **options),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(q, k, v), rl.attention(q, k, v, causal=True, **options))


def raised_to(power: float):
    """A function whose code is the same for every power."""
    return lambda score, q, k, head, args, math: score * power


def never_seen(score, q, k, head, args, math):
    return score * args[0]


def test_compile_a_score_mod_never_seen_before() -> None:
    """Its functions are known when the graph's first op runs, whatever Dynamo can trace."""
    torch._dynamo.reset()
    q, k, v = make()
    for options in (
        lambda: {"softcap": 1.2345},  # a number that no other test has
        lambda: {"score_mod": ScoreMod(never_seen, args=[1.2345])},
        lambda: {"score_mod": relative_bias(torch.ones(3))},
    ):
        compiled = torch.compile(
            lambda q, k, v, options=options: rl.attention(q, k, v, **options()),
            fullgraph=True,
            backend="aot_eager",
        )
        got = compiled(q, k, v)
        torch.testing.assert_close(got, rl.attention(q, k, v, **options()))


def test_compile_tells_closures_of_one_code_apart() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    q, k, v = make()

    def fn(q, k, v, mod):
        return rl.attention(q, k, v, score_mod=mod)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    functions = [raised_to(power) for power in (0.5, 2.0)]
    for function in functions * 2:  # each mod is new, its function only at first
        mod = ScoreMod(function)
        torch.testing.assert_close(compiled(q, k, v, mod), fn(q, k, v, mod))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_compile_refuses_closures_of_which_a_graph_would_not_know() -> None:
    torch._dynamo.reset()
    q, k, v = make()
    compiled = torch.compile(
        lambda q, k, v, function: rl.attention(q, k, v, score_mod=ScoreMod(function)),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match="with a closure or defaults"):
        compiled(q, k, v, raised_to(2.0))


def test_a_score_mods_token_stays_in_its_process() -> None:
    mod = softcap(3.0)
    pickled = pickle.dumps(mod)
    assert mod.token.encode() not in pickled
    assert pickle.loads(pickled).token == copy.copy(mod).token == mod.token


def test_compile_as_the_first_call_of_a_process() -> None:
    code = (
        "import torch, relampago as rl\n"
        "f = torch.compile(lambda q: rl.attention(q, q, q, causal=True), fullgraph=True, backend='aot_eager')\n"
        "print(f(torch.randn(1, 9, 2, 8)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "[1, 9, 2, 8]" in done.stdout


def test_autocast_casts_q_k_v_only() -> None:
    q, k, v = (t.requires_grad_() for t in make())
    bias = torch.randn(24, 24, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rl.attention(q, k, v, bias=bias)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v, bias))
    assert all(g.dtype == torch.float32 for g in grads)


def test_autocast_takes_what_differs_in_dtype() -> None:
    """As a rotary embedding leaves them: q and k in fp32, v in bf16. Without autocast that is refused."""
    q, k, v = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rl.attention(q, k, v.bfloat16())
        assert torch.equal(out, rl.attention(q, k, v))
    with pytest.raises(rl.InvalidInput, match="v has dtype"):
        rl.attention(q, k, v.bfloat16())


def test_autocast_casts_new_keys_for_a_cache() -> None:
    q, k, v = make()
    caches = [KVCache(2, 32, 2, 16) for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rl.attention_decode(q, caches[0], k, v)
        rooms = [t[:, :8].bfloat16() for t in (k, v)]
        out = flash_attn_with_kvcache(q[:, :1], *rooms, k[:, :1], v[:, :1], cache_seqlens=3)
    want = rl.attention_decode(q.bfloat16(), caches[1], k.bfloat16(), v.bfloat16())
    assert torch.equal(got, want)
    assert out.dtype == torch.bfloat16
    assert torch.equal(rooms[0][:, 3], k[:, 0].bfloat16())
    with pytest.raises(rl.InvalidInput, match="k is"):
        rl.attention_decode(q.bfloat16(), caches[1], k, v)


def test_activation_checkpointing_redraws_the_same_dropout() -> None:
    q, k, v = (t.requires_grad_() for t in make())

    def fn(q, k, v):
        return rl.attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(3)
    want = torch.autograd.grad(fn(q, k, v).sum(), (q, k, v))
    torch.manual_seed(3)
    got = torch.autograd.grad(checkpoint(fn, q, k, v, use_reentrant=False).sum(), (q, k, v))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def test_flop_formula_counts_visible_pairs() -> None:
    q, k, v = (t.requires_grad_() for t in make(2, 24, 4, 2, 16))
    with FlopCounterMode(display=False) as counter:
        rl.attention(q, k, v).sum().backward()
    pairs = 2 * 4 * 24 * 24
    assert counter.get_total_flops() == pairs * (4 * 16 + 10 * 16)
    with FlopCounterMode(display=False) as counter:
        rl.attention(q, k, v, causal=True, window=(3, 0))
    causal = sum(min(i, 3) + 1 for i in range(24))
    assert counter.get_total_flops() == 2 * 4 * causal * 4 * 16


def test_lse_is_differentiable_alone() -> None:
    q, k, v = (t.requires_grad_() for t in make(dtype=torch.float64))
    _, lse = rl.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, k.repeat_interleave(2, 2)) / 4
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    want = torch.autograd.grad(scores.masked_fill(hidden, -torch.inf).logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), want)
    assert dv.abs().max() == 0


def test_deterministic_follows_torch() -> None:
    q, k, v = make()
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic mode" in str(rl.explain(q, k, v).problem)
        assert "deterministic mode" not in str(rl.explain(q, k, v, deterministic=False).problem)
    finally:
        torch.use_deterministic_algorithms(False)


def test_using_is_scoped_and_nested() -> None:
    q, k, v = make()
    with rl.using(backend="reference"):
        assert rl.explain(q, k, v).backend == "reference"
        with rl.using(plan=Plan(block_q=7, block_k=9)):
            inner = rl.explain(q, k, v)
            assert (inner.backend, inner.plan.block_q) == ("reference", 7)
        assert rl.explain(q, k, v, backend="cpu").backend == "cpu"
    assert rl.explain(q, k, v).backend != "reference"
    with pytest.raises(rl.InvalidInput, match="backend is 'x'"), rl.using(backend="x"):
        pass


@pytest.mark.parametrize(
    "value",
    [
        Plan(block_q=64, block_k=32),
        rl.Causal() & rl.Window(3, None),
        rl.Prefix(4),
        rl.Document(torch.tensor([0, 5])),
        rl.BlockSparse.from_mask(torch.ones(9, 9, dtype=torch.bool).tril()),
    ],
    ids=lambda v: type(v).__name__,
)
def test_plans_and_masks_copy_and_pickle(value) -> None:
    q, k, v = make(length=9)
    for twin in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        if isinstance(value, Plan):
            assert twin == value
        else:
            assert torch.equal(rl.attention(q, k, v, mask=twin), rl.attention(q, k, v, mask=value))


def test_inference_mode_and_no_grad() -> None:
    q, k, v = (t.requires_grad_() for t in make())
    want = rl.attention(q, k, v)
    with torch.no_grad():
        assert not rl.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert torch.equal(rl.attention(q, k, v), want)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_max_logits_in_inference_mode(backend) -> None:
    q, k, v = make()
    want = rl.attention(q, k, v, return_max_logits=True, backend=backend)
    for given in ((q, k, v), None):
        with torch.inference_mode():
            given = given or [t.clone() for t in (q, k, v)]
            got = rl.attention(*given, return_max_logits=True, backend=backend)
            torch.testing.assert_close(got, want)


def test_catalogue_names_are_unique() -> None:
    names = [case.name for case in CONTRACT]
    assert len(names) == len(set(names))
