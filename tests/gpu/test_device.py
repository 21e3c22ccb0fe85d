"""What only a device can show: graphs, streams, compiled code, offsets beyond 32 bits, repeatability."""

from __future__ import annotations

import pytest
import torch
from budget import check
from oracle import dense, run

import relampago as rl
from relampago.cache import KVCache, PagedKVCache
from relampago.plan import Plan


def make(batch=2, length=512, heads=8, kv=2, dim=64, dtype=torch.bfloat16, grad=False):
    shapes = ((batch, length, heads, dim), (batch, length, kv, dim), (batch, length, kv, dim))
    return tuple(torch.randn(s, dtype=dtype, device="cuda", requires_grad=grad) for s in shapes)


def judge(name, tensors, options, dtype, **more):
    """The error budget for one call."""

    def call(t, o):
        return rl.attention(*t, **o, **more, return_lse=True)

    got = run(call, tensors, options, dtype)
    standard = run(lambda t, o: dense(t, o, dtype), tensors, options, dtype)
    oracle = run(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    check(name, got, standard, oracle, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("length", [77, 1000, 1537])
def test_sizes_that_models_use(dim, length, dtype) -> None:
    judge(f"d{dim} {length}", make(1, length, 4, 2, dim, dtype), {"causal": True}, dtype)


def test_head_dim_32_with_64_by_128_tiles_and_two_stages() -> None:
    """Reported to be an illegal access with Triton 3.6.0 on Hopper."""
    plan = Plan(block_q=64, block_k=128, stages=2)
    with rl.using(plan=plan, backend="triton"):
        judge("reported", make(2, 1024, 4, 4, 32), {"causal": True}, torch.bfloat16)
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graph_of_forward_and_backward() -> None:
    q, k, v = make(grad=True)
    dout = torch.randn_like(q)

    def step():
        out = rl.attention(q, k, v, causal=True)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    def formula(dtype):
        leaves = tuple(t.detach().to(dtype).requires_grad_() for t in (q, k, v))
        out, _ = dense(leaves, {"causal": True}, dtype)
        return named((out, *torch.autograd.grad(out, leaves, dout.to(dtype))))

    def named(found):
        return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))

    want = step()[0].detach().clone()  # a graph kept alive ties its leaves to this stream
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    standard, oracle = formula(torch.bfloat16), formula(torch.float64)
    for _ in range(2):
        for t in got:
            t.detach().fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check("graph", named(got), standard, oracle, torch.bfloat16)
        assert torch.equal(want, got[0])


@pytest.mark.parametrize("paged", [False, True])
def test_graph_of_decoding_follows_the_lengths(paged) -> None:
    kinds = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = PagedKVCache(2, 64, 16, 2, 64, **kinds) if paged else KVCache(2, 512, 2, 64, **kinds)
    if paged:
        cache.reserve(256)
    q, k, v = make(2, 200)
    cache.append(k[:, :100], v[:, :100])
    step = [torch.empty_like(t[:, :1]) for t in (q, k, v)]

    def run_step():
        return rl.attention_decode(step[0], cache, step[1], step[2], return_lse=True)

    for t, source in zip(step, (q, k, v), strict=True):
        t.copy_(source[:, 100:101])
    run_step()  # warm, position 100
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_step()
    for i in range(101, 140):
        for t, source in zip(step, (q, k, v), strict=True):
            t.copy_(source[:, i : i + 1])
        graph.replay()
        alone = q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1]
        formula = (dense(alone, {"causal": True}, t) for t in (torch.bfloat16, torch.float64))
        named = (dict(zip(("out", "lse"), pair, strict=True)) for pair in (found, *formula))
        check(f"place {i}", *named, torch.bfloat16)
    assert cache.lengths.tolist() == [140, 140]


def test_two_streams_at_once() -> None:
    problems = [make(1, 2048, 8, 8, 64) for _ in range(4)]
    want = [rl.attention(*p, causal=True) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(10):
        got = []
        for stream, p in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                got.append(rl.attention(*p, causal=True))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    tensors, options = make(), {"causal": True, "softcap": 20.0}

    def fn(q, k, v):
        return sine(rl.attention(q * 1.5, k, v, **options, return_lse=True))

    def formula(dtype):
        def whole(t, o):
            return sine(dense((t[0] * 1.5, *t[1:]), o, dtype))

        return run(whole, tensors, options, dtype)

    def sine(pair):
        return pair[0].sin(), pair[1]

    compiled = torch.compile(fn, fullgraph=True)
    got = run(lambda t, o: compiled(*t), tensors, options, torch.bfloat16)
    check("compiled", got, formula(torch.bfloat16), formula(torch.float64), torch.bfloat16)


def test_offsets_beyond_32_bits() -> None:
    """Rows of a fused QKV buffer whose stride times length passes 2^31 elements."""
    length, width = 40_000, 60_000  # 2.4e9 elements, 4.8 GB
    fused = torch.zeros(1, length, width, dtype=torch.bfloat16, device="cuda")
    q, k, v = (fused[..., n * 128 : (n + 1) * 128].unflatten(-1, (2, 64)) for n in range(3))
    for t in (q, k, v):
        t.copy_(torch.randn(1, length, 2, 64, device="cuda"))
    dout = torch.randn(1, length, 2, 64, dtype=torch.bfloat16, device="cuda")
    far, near = (
        results([t.detach().requires_grad_() for t in tensors], dout)
        for tensors in ((q, k, v), [t.contiguous() for t in (q, k, v)])
    )
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


@pytest.mark.parametrize("layout", ["sequence-major", "batch-major"])
def test_fifteen_thousand_sequences(layout) -> None:
    """Sequence-major, their rows of 40 heads lie 38.4e6 elements apart: a tile of 64 passes 2^31."""
    batch, length, shape = 15_000, 72, (40, 64)  # 2.8e9 elements
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("eight tensors of 5.5 GB need 60 GiB")

    def far() -> torch.Tensor:
        order = (length, batch) if layout == "sequence-major" else (batch, length)
        t = torch.empty(*order, *shape, dtype=torch.bfloat16, device="cuda").normal_()
        return t if layout == "batch-major" else t.transpose(0, 1)

    q, k, v, dout = (far() for _ in range(4))
    chosen = torch.tensor([0, 1, batch // 2, batch - 1], device="cuda")
    near = [t[chosen].contiguous().requires_grad_() for t in (q, k, v)]
    want = results(near, dout[chosen].contiguous(), backend="triton")
    got = results([t.requires_grad_() for t in (q, k, v)], dout, backend="triton")
    assert all(torch.equal(a[chosen], b) for a, b in zip(got, want, strict=True))


def results(leaves, dout, **options):
    """Out and gradients, whose bits do not depend on the order of programs."""
    out = rl.attention(*leaves, causal=True, deterministic=True, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}], ids=["causal", "window"])
def test_deterministic_is_bit_for_bit(options, dim) -> None:
    q, k, v = make(2, 1500, 8, 2, dim, grad=True)
    dout = torch.randn_like(q)

    def grads():
        out = rl.attention(q, k, v, causal=True, deterministic=True, **options)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = grads()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, grads(), strict=True))


def test_memory_is_linear() -> None:
    peaks = []
    for length in (8192, 16384, 32768):
        q, k, v = make(1, length, 8, 8, 64, grad=True)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        rl.attention(q, k, v, causal=True).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - base)
    assert peaks[2] < 2.2 * peaks[1] < 2.2 * 2.2 * peaks[0]


def test_strides_without_a_contiguous_last_dimension_are_copied() -> None:
    tensors = tuple(t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in make(1, 100))
    assert all(t.stride(-1) != 1 for t in tensors)
    judge("strides", tensors, {"causal": True}, torch.bfloat16)


def test_bad_cu_seqlens_stay_inside_the_tensors() -> None:
    """The device cannot be asked without waiting; kernels clamp instead of reading beyond."""
    q, k, v = (t[0] for t in make(1, 100))
    cu = torch.tensor([0, 60, 5000], dtype=torch.int32, device="cuda")
    rl.attention_varlen(q, k, v, cu, cu, 100, 100, causal=True)
    torch.cuda.synchronize()
