"""Higher derivatives as a PyTorch user takes them: torch.func, forward-mode AD, create_graph, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import relampago as rl
from relampago.api import Options, prepare
from relampago.cases import find
from relampago.mods import relative_bias
from relampago.op import backward_tangent_op, tangent_op

# torch's own forward mode of a dense softmax compiles decompositions by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
B, L, H, G, D = 2, 4, 2, 1, 3
SHAPES = ((B, L, H, D), (B, L, G, D), (B, L, G, D))


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


q, k, v = draw(*SHAPES)
tq, tk, tv = draw(*SHAPES, seed=1)
samples = torch.stack([q, q + 1, q * 2])
(bias,) = draw((1, H, L, L), seed=2)


def dense(q, k, v, bias=None):
    """The formula."""
    k, v = (t.repeat_interleave(H // G, 2) for t in (k, v))
    s = torch.einsum("blhd,bmhd->bhlm", q, k) / D**0.5
    s = s if bias is None else s + bias
    return torch.einsum("bhlm,bmhd->blhd", s.softmax(-1), v)


def ours(q, k, v, bias=None):
    return rl.attention(q, k, v, bias=bias)


def loss(f):
    return lambda q, k, v: f(q, k, v).sin().sum()


def penalty(f):
    w = [t.clone().requires_grad_() for t in (q, k, v)]
    first = torch.autograd.grad(loss(f)(*w), w, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), w)


def consistency(f):
    """A loss of a function's value and its tangent, differentiated by parameters."""
    w = [t.clone().requires_grad_() for t in (q, k, v)]
    out, tangent = jvp(lambda x: f(x * w[0], w[1] + x[:, :, :1], w[2]), (q,), (tq,))
    return torch.autograd.grad((out * tangent.detach()).sum() + tangent.square().sum(), w)


COMPOSED = {
    "jvp": lambda f: jvp(f, (q, k, v), (tq, tk, tv)),
    "jvp-of-q": lambda f: jvp(lambda q: f(q, k, v), (q,), (tq,)),
    "jvp-of-v": lambda f: jvp(lambda v: f(q, k, v), (v,), (tv,)),
    "jvp-of-bias": lambda f: jvp(lambda b: f(q, k, v, b), (bias,), (bias.cos(),)),
    "grad-grad": lambda f: grad(lambda q: grad(loss(f))(q, k, v).square().sum())(q),
    "jvp-grad": lambda f: jvp(grad(loss(f), argnums=(0, 1, 2)), (q, k, v), (tq, tk, tv)),
    "grad-jvp": lambda f: grad(
        lambda q, k, v: jvp(f, (q, k, v), (tq, tk, tv))[1].square().sum(), argnums=(0, 1, 2)
    )(q, k, v),
    "grad-jvp-by-tangent": lambda f: grad(
        lambda t: jvp(f, (q, k, v), (t, tk, tv))[1].square().sum()
    )(tq),
    "vjp-grad": lambda f: vjp(lambda q: grad(loss(f))(q, k, v), q)[1](tq),
    "jacrev": lambda f: jacrev(f)(q[:1], k[:1], v[:1]),
    "jacfwd": lambda f: jacfwd(f)(q[:1], k[:1], v[:1]),
    "hessian": lambda f: hessian(loss(f), argnums=(0, 1))(q[:1], k[:1], v[:1]),
    "jacrev-jacrev": lambda f: jacrev(jacrev(loss(f)))(q[:1], k[:1], v[:1]),
    "jacrev-jacfwd": lambda f: jacrev(jacfwd(loss(f)))(q[:1], k[:1], v[:1]),
    "hessian-of-a-shared-bias": lambda f: hessian(lambda b: f(q, k, v, b).sin().sum())(bias),
    "vmap-jvp": lambda f: vmap(lambda q: jvp(lambda q: f(q, k, v), (q,), (tq,))[1])(samples),
    "jvp-vmap": lambda f: jvp(vmap(lambda q: f(q, k, v)), (samples,), (samples.cos(),)),
    "vmap-grad-jvp": lambda f: vmap(
        grad(lambda q: jvp(lambda q: f(q, k, v), (q,), (tq,))[1].square().sum())
    )(samples),
    "vmap-hvp": lambda f: vmap(lambda q: jvp(grad(lambda q: loss(f)(q, k, v)), (q,), (tq,))[1])(
        samples
    ),
    "gradient-penalty": penalty,
    "consistency": consistency,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composes_as_the_formula_does(name) -> None:
    got, want = (tree_leaves(COMPOSED[name](f)) for f in (ours, dense))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


COMPILED = {
    "grad": lambda q: grad(loss(ours))(q, k, v),
    "grad-of-all": lambda q: grad(loss(ours), argnums=(0, 1, 2))(q, k, v),
    "vmap-grad": lambda q: vmap(grad(lambda q: loss(ours)(q, k, v)))(torch.stack([q, q + 1])),
    "grad-vmap": lambda q: grad(
        lambda q: vmap(lambda q: ours(q, k, v))(torch.stack([q, q + 1])).sin().sum()
    )(q),
    "jacrev": lambda q: jacrev(lambda q: ours(q, k[:1], v[:1]))(q[:1]),
    "vjp-grad": lambda q: vjp(lambda q: grad(loss(ours))(q, k, v), q)[1](tq),
    "grad-of-bias": lambda q: grad(lambda b: ours(q, k, v, b).sin().sum())(bias),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", COMPILED)
def test_transforms_inside_a_graph(name, dynamic) -> None:
    torch._dynamo.reset()
    fn = COMPILED[name]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(q), fn(q))


def test_reverse_over_plain_forward_mode() -> None:
    w = [t.clone().requires_grad_() for t in (q, k, v)]
    with forward_ad.dual_level():
        out = ours(forward_ad.make_dual(w[0], tq), w[1], w[2])
        got = torch.autograd.grad(forward_ad.unpack_dual(out).tangent.square().sum(), w)
    for a, b in zip(got, COMPOSED["grad-jvp-of-q"](dense), strict=True):
        torch.testing.assert_close(a, b)


COMPOSED["grad-jvp-of-q"] = lambda f: grad(
    lambda q, k, v: jvp(lambda q: f(q, k, v), (q,), (tq,))[1].square().sum(), argnums=(0, 1, 2)
)(q, k, v)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck_of_both_orders_and_modes(backend) -> None:
    shapes = ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 1), (1, 2, 3, 4), (2,))
    inputs = [t.requires_grad_() for t in draw(*shapes)]

    def fn(q, k, v, bias, sinks):
        return rl.attention(
            q, k, v, bias=bias, sinks=sinks, causal=True, softcap=3.0, return_lse=True,
            dropout_p=0.2, dropout_seed=3, backend=backend,
        )  # fmt: skip

    check = torch.autograd.gradgradcheck
    assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True)
    assert check(fn, inputs)
    assert check(
        fn, inputs, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    )


@pytest.mark.parametrize("name", ["gqa", "bias", "sinks", "packed", "user-mod"])
def test_opcheck(name) -> None:
    tensors, options = find(name).make(torch.float32)
    packing = None
    if "cu_seqlens_q" in options:
        from relampago.api import Packing

        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        packing = Packing(*(options.pop(n) for n in names))
    call = prepare(*tensors, Options(**options), packing=packing)
    moving = [None if t is None else torch.randn_like(t) for t in call[:5]]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(tangent_op, (*moving, *call), test_utils=tests)
    out, lse, tout, tlse = tangent_op(*moving, *call)
    wanted = [True, True, True, call.bias is not None, call.sinks is not None]
    args = (out, None, out, lse, tout, tlse, tout, tlse, wanted, *moving, *call)
    torch.library.opcheck(backward_tangent_op, args, test_utils=tests)


def test_what_is_refused_says_so() -> None:
    def third(q):
        return grad(lambda q: grad(loss(ours))(q, k, v).square().sum())(q)

    with pytest.raises(rl.Unsupported, match="third derivatives"):
        grad(lambda q: third(q).sum())(q)
    with pytest.raises(rl.Unsupported, match="forward-mode AD over forward-mode AD"):
        jacfwd(jacfwd(loss(ours)))(q, k, v)
    with pytest.raises(rl.Unsupported, match="along a score mod's tensors"):
        jvp(lambda s: rl.attention(q, k, v, alibi_slopes=s), (torch.ones(H),), (torch.ones(H),))
    mod = rl.ScoreMod(lambda s, *_: s * 2, lambda s, *_: 2.0)
    with pytest.raises(rl.Unsupported, match="no ddfn, which second derivatives need"):
        penalty(lambda q, k, v: rl.attention(q, k, v, score_mod=mod))
    slopeless = rl.ScoreMod(lambda s, *_: s * 2)
    with pytest.raises(rl.Unsupported, match="no dfn"):
        jvp(lambda q: rl.attention(q, k, v, score_mod=slopeless), (q,), (tq,))
    with pytest.raises(rl.Unsupported, match="one shard of a larger attention"):
        penalty(lambda q, k, v: rl.partial(q, k, v)[0])


def test_compile_takes_forward_mode_eagerly_or_not_at_all() -> None:
    torch._dynamo.reset()

    def fn(q, t):
        return jvp(lambda q: ours(q, k, v), (q,), (t,))[1]

    torch.testing.assert_close(torch.compile(fn, backend="aot_eager")(q, tq), fn(q, tq))


def test_flops_of_the_derivatives() -> None:
    pairs = B * H * L * L
    with FlopCounterMode(display=False) as counter, forward_ad.dual_level():
        ours(*(forward_ad.make_dual(x, t) for x, t in ((q, tq), (k, tk), (v, tv))))
    assert counter.get_total_flops() == 2 * pairs * 6 * D


MEMORY = """
import torch, relampago as rl
from torch.func import jvp
from relampago.cli.memory import growth
torch.manual_seed(0)
n = {n}
q, k, v = (torch.randn(1, n, 2, 32, requires_grad={second}) for _ in range(3))
small = torch.randn(1, 64, 2, 32, requires_grad={second})
def step(q, k, v):
    def fn(q, k, v):
        return rl.attention(q, k, v, causal=True, backend="{backend}")
    if not {second}:
        return jvp(fn, (q, k, v), (v, q, k))
    first = torch.autograd.grad(fn(q, k, v).sin().sum(), (q, k, v), create_graph=True)
    sum(g.square().sum() for g in first).backward()
print(growth(lambda: step(small, small.clone(), small.clone()), lambda: step(q, k, v)))
"""


def growth(n: int, backend: str, second: bool) -> int:
    code = MEMORY.format(n=n, backend=backend, second=second)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="measured as Linux measures it"
)
@pytest.mark.parametrize("second", [False, True], ids=["jvp", "double-backward"])
def test_no_n_by_n_array(second) -> None:
    n = 6144
    matrix = 2 * n * n * 4  # the scores of 2 heads in fp32: 302 MB
    assert growth(n, "cpu", second) < matrix / 2
    if not second:
        assert growth(2048, "reference", False) > 2 * 2048 * 2048 * 4  # so it would see one


def test_refuses_second_derivatives_by_tables_and_of_fp8_products() -> None:
    q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    for wanted in ((q, table), (q,)):
        out = rl.attention(q, k, v, score_mod=relative_bias(table))
        first, *_ = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        with pytest.raises(rl.Unsupported, match="second derivatives by score mod arguments"):
            torch.autograd.grad(first.sum(), q)
    narrow = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(rl.Unsupported, match="FP8 products have no tangents"):
        jvp(lambda q: rl.attention(q, narrow, narrow, precision="fp8"), (narrow,), (narrow,))
