"""Forward-mode AD and double backward on the Triton kernels, run by `test_interpreter.py` in a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run this through test_interpreter.py"

from budget import check
from contract.test_contract import call
from interpreter import exact
from oracle import dense
from second import seconds, tangents

import relampago as rl
from relampago.api import Options, prepare
from relampago.backends import triton as backend
from relampago.backends.triton.backward_tangent import backward_tangent
from relampago.backends.triton.tangent import tangent
from relampago.cases import Case, find
from relampago.masks.blocks import BlockSparse
from relampago.masks.spec import Causal, Document, Prefix, Window
from relampago.op import arrays_of, backward_tangent_op, tangent_op
from relampago.plan import Plan
from relampago.problem import Moving, Saved, Tangents, Wanted

exact.patch()
torch.set_num_threads(1)
# torch's own forward mode of a dense softmax compiles decompositions by torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

TILES = Plan(block_q=16, block_k=32, fused=1)  # two of each
LEAST = torch.finfo(torch.bfloat16).min


def _tiny(name: str, **more: Any) -> Case:
    """20 queries against 40 keys: the interpreter's time goes by tiles."""
    given: dict[str, Any] = {"batch": 1, "heads": 2, "len_q": 20, "len_k": 40, "dim": 16, **more}
    return Case(name=name, **given)


def _mod(g: torch.Generator) -> rl.ScoreMod:
    own = find("user-mod").make(torch.float32)[1]["score_mod"]
    return replace(own, args=[("head", torch.rand(2, generator=g)), 0.2])


def _blocks(g: torch.Generator) -> BlockSparse:
    """Patterns of both heads, and a tile that nobody sees."""
    mask = torch.rand(1, 2, 20, 40, generator=g) < 0.4
    mask[:, :, :16, 16:32] = False
    return BlockSparse.from_mask(mask, block=(16, 16))


def _padding(g: torch.Generator) -> torch.Tensor:
    """Row 3 sees nothing but finfo.min, key 7 nobody."""
    bias = torch.randn(1, 1, 20, 40, generator=g)
    bias[:, :, 3] = LEAST
    bias[..., 7] = float("-inf")
    return bias


CASES = {
    case.name: case
    for case in (
        _tiny("gqa-dims", kv_heads=1, dim=24, dim_v=40, options={"causal": True}),
        _tiny("tables", batch=2, heads=1, options={
            "mask": Causal() & Document(torch.tensor([[0, 9, 30], [3, 20, 36]]))}),
        _tiny("prefix-window", options={"mask": Prefix(10) & Window(9, None)}),
        _tiny("block-sparse", kv_heads=1, options={"mask": _blocks}),
        _tiny("dense-mask", options={"mask": lambda g: torch.rand(1, 1, 20, 40, generator=g) < 0.7}),
        _tiny("mods-bias", options={"score_mod": _mod, "softcap": 2.0,
            "bias": lambda g: torch.randn(1, 2, 20, 40, generator=g)}),
        _tiny("bias-row", options={"bias": lambda g: torch.randn(1, 1, 1, 40, generator=g)}),
        _tiny("bias-padding", options={"bias": _padding}),
        _tiny("sinks-window", options={"window": (2, 2), "sinks": torch.tensor([0.5, -1.0])}),
        _tiny("dropout", kv_heads=1, options={"dropout_p": 0.3, "dropout_seed": 7}),
        _tiny("packed", kv_heads=1, len_q=(5, 18, 0, 3), len_k=(17, 9, 4, 0), options={
            "causal": True, "sinks": torch.tensor([0.5, -1.0])}),
        _tiny("no-keys", len_k=0, options={"sinks": torch.tensor([0.5, -1.0])}),
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for every kernel, in place of the machine's table."""
    monkeypatch.setattr(backend, "first_match", lambda *_: TILES)


def agree(name: str, dtype: torch.dtype, compute: Any, **more: Any) -> None:
    tensors, options = CASES[name].make(dtype)
    options.update(more)
    got = compute(lambda t, o: call(t, {**o, "backend": "triton"}), tensors, options, dtype)
    standard = compute(lambda t, o: dense(t, o, dtype), tensors, options, dtype)
    oracle = compute(lambda t, o: dense(t, o, torch.float64), tensors, options, torch.float64)
    check(f"triton {name}", got, standard, oracle, dtype)


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", CASES)
def test_fp32(name: str, compute: Any) -> None:
    agree(name, torch.float32, compute)


@pytest.mark.parametrize("compute", [tangents, seconds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half(dtype: torch.dtype, compute: Any) -> None:
    agree("gqa-dims", dtype, compute)


@pytest.mark.parametrize("name", ["gqa-dims", "bias-row", "packed"])
def test_deterministic(name: str) -> None:
    agree(name, torch.float32, seconds, deterministic=True)


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("moving", ["q", "k", "v", "dout"])
def test_one_tangent_alone(moving: str, fused: int) -> None:
    """What stands still is no array of zeros, and costs no product."""
    tensors, options = CASES["gqa-dims"].make(torch.float32)
    given = prepare(*tensors, Options(**options))
    cpu = prepare(*tensors, Options(**options, backend="cpu"))
    x, plan = arrays_of(given), replace(TILES, fused=fused)
    along = Tangents(
        *(torch.ones_like(t) if n == moving else None for n, t in zip("qkv", given, strict=False))
    )
    out, lse, tout, tlse = expected = tangent_op(*along, *cpu)
    if moving != "dout" and not fused:
        torch.testing.assert_close(tangent(x, plan, along), expected)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    tdout = dout.flip(1) if moving == "dout" else None
    wanted = Wanted(True, moving != "q", moving != "k")
    got = backward_tangent(
        x, plan, plan, Moving(along, tout, tlse, tdout, None), Saved(out, lse), dout, None, wanted, False
    )  # fmt: skip
    rest = (dout, None, out, lse, tdout, None, tout, tlse, list(wanted[:5]))
    expected = backward_tangent_op(*rest, *along, *cpu)
    for name, mine, theirs in zip("qkv", got, expected, strict=False):
        if getattr(wanted, name):
            torch.testing.assert_close(mine, theirs)
