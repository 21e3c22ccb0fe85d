"""Every bad argument gives one InvalidInput that names it, what came and what was expected."""

from __future__ import annotations

import math

import pytest
import torch

import relampago as rl
from relampago import statistics


def t(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


GOOD = {"q": t(2, 8, 4, 16), "k": t(2, 8, 2, 16), "v": t(2, 8, 2, 16)}

DENSE = {
    "rank": ({"q": t(8, 4, 16)}, r"q has 3 dimensions; expected 4: \(batch, length, heads, dim\)"),
    "not a tensor": ({"k": [1.0]}, "k is a list; expected a tensor"),
    "nothing": ({"q": None}, "q is a NoneType; expected a tensor"),
    "sparse": ({"q": t(2, 8, 4, 16).to_sparse()}, "q is torch.sparse_coo; expected strided"),
    "jagged": ({"q": torch.nested.nested_tensor([t(3, 4, 16), t(5, 4, 16)], layout=torch.jagged)},
               "q is torch.jagged; expected strided"),
    "no query heads": ({"q": t(2, 8, 0, 16)}, "q has 0 heads; expected at least 1"),
    "heads": ({"k": t(2, 8, 3, 16), "v": t(2, 8, 3, 16)}, "k has a number of heads that does not divide"),
    "kv heads differ": ({"v": t(2, 8, 1, 16)}, "v has another number of heads; expected that of k"),
    "no heads": ({"k": t(2, 8, 0, 16), "v": t(2, 8, 0, 16)}, "k has 0 heads"),
    "batch": ({"k": t(3, 8, 2, 16), "v": t(3, 8, 2, 16)}, "k has another batch; expected that of q"),
    "dtype": ({"k": t(2, 8, 2, 16, dtype=torch.bfloat16)}, "k has dtype torch.bfloat16; expected torch.float32"),
    "integers": ({"q": torch.ones(2, 8, 4, 16, dtype=torch.int64)}, "q has dtype torch.int64; expected fp16"),
    "device": ({"v": t(2, 8, 2, 16).to("meta")}, "v is on meta; expected cpu"),
    "head dim": ({"k": t(2, 8, 2, 8)}, "k has another head dim"),
    "head dim 0": ({"q": t(2, 8, 4, 0), "k": t(2, 8, 2, 0)}, "q has head dim 0; expected at least 1"),
    "lengths": ({"v": t(2, 9, 2, 16)}, "v has another length; expected that of k"),
    "window negative": ({"window": (-1, 0)}, "window has left = -1; expected an int >= 0, or None"),
    "window single": ({"window": 5}, r"window is 5; expected a pair"),
    "scale": ({"scale": math.inf}, "scale is inf; expected a finite number"),
    "scale nan": ({"scale": math.nan}, "scale is nan; expected a finite number"),
    "softcap": ({"softcap": 0.0}, "softcap is 0.0; expected a number > 0"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p is 1.0; expected a number in \[0, 1\)"),
    "dropout negative": ({"dropout_p": -0.1}, "dropout_p is -0.1"),
    "dropout seed": ({"dropout_p": 0.1, "dropout_seed": "x"}, "dropout_seed is 'x'"),
    "mask shape": ({"mask": torch.ones(3, 3).bool()}, r"mask has shape \(3, 3\); expected one that broadcasts"),
    "mask dtype": ({"mask": t(8, 8)}, r"mask has dtype torch.float32; expected bool \(a float mask goes to bias=\)"),
    "mask type": ({"mask": 3}, "mask is a int; expected a mask such as"),
    "mask function": ({"mask": lambda b, h, q, k: q + k}, "mask: the function returned torch.int64; expected a bool"),
    "mask blocks": (
        {"mask": rl.BlockSparse.from_mask(torch.ones(9, 9, dtype=torch.bool))},
        r"mask: BlockSparse was made for lengths \(9, 9\); expected \(8, 8\)",
    ),
    "mask window": ({"mask": rl.Window(-1, 0)}, "mask: Window has left = -1; expected an int >= 0, or None"),
    "mask window type": ({"mask": rl.Causal() & rl.Window("a", 0)}, "mask: Window has left = 'a'"),
    "mask prefix": ({"mask": rl.Prefix(1.5)}, "mask: Prefix length is 1.5; expected an int >= 0"),
    "mask prefix negative": ({"mask": rl.Prefix(-1)}, "mask: Prefix length is -1"),
    "mask prefix none": ({"mask": rl.Prefix(None)}, "mask: Prefix length is None"),
    "documents bool": ({"mask": rl.Document(torch.ones(3).bool())}, "mask: Document starts is"),
    "documents": ({"mask": rl.Document(t(3))}, r"mask: Document starts is \(3,\) torch.float32; expected ints"),
    "prefix": ({"mask": rl.Prefix(torch.ones(5, dtype=torch.int64))}, r"mask: Prefix length is \(5,\)"),
    "bias shape": ({"bias": t(2, 4, 8, 7)}, r"bias has shape \(2, 4, 8, 7\); expected one that broadcasts to"),
    "bias dtype": ({"bias": torch.ones(8, 8, dtype=torch.bool)}, "bias has dtype torch.bool; expected a float dtype"),
    "sinks": ({"sinks": t(3)}, r"sinks has shape \(3,\); expected \(4,\)"),
    "slopes": ({"alibi_slopes": t(3, 4)}, r"alibi_slopes has shape \(3, 4\); expected \(4,\) or \(2, 4\)"),
    "backend": ({"backend": "warp"}, "backend is 'warp'; expected one of"),
    "backend type": ({"backend": {}}, "backend is {}; expected one of"),
    "precision type": ({"precision": {}}, "precision is {}; expected None, 'full' or 'fp8'"),
    "score mod type": ({"score_mod": 3}, "score_mod is a int; expected a ScoreMod"),
    "score mod's result": (
        {"score_mod": rl.ScoreMod(lambda s, q, k, head, args, math: 0.5)},
        "score_mod: the function returned a float; expected a score for each",
    ),
    "score mod's shape": (
        {"score_mod": rl.ScoreMod(lambda s, q, k, head, args, math: s.sum(-1))},
        r"score_mod: the function returned \(.*\); expected a score for each",
    ),
    "mask function's shape": (
        {"mask": lambda b, h, q, k: (q > k)[..., :3]},
        r"mask: the function returned shape \(1, 1, 8, 3\); expected one that broadcasts",
    ),
    "score mod": ({"score_mod": [3]}, "score_mod is a int; expected a ScoreMod"),
    "mod argument": (
        {"score_mod": rl.ScoreMod(max, max, [("k", t(5))])},
        r"score_mod has an argument by 'k' of shape \(5,\)",
    ),
    "mod gradient": (
        {"score_mod": rl.ScoreMod(max, max, [("k", t(8).requires_grad_())])},
        "score_mod has an argument that requires a gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense(name) -> None:
    change, words = DENSE[name]
    arguments = {**GOOD, **change}
    tensors = [arguments.pop(n) for n in "qkv"]
    with pytest.raises(rl.InvalidInput, match=words):
        rl.attention(*tensors, **arguments)


def test_a_mods_result_by_the_reference() -> None:
    mod = rl.ScoreMod(lambda s, q, k, head, args, math: 0.5)
    with pytest.raises(rl.InvalidInput, match="score_mod: the function returned a float"):
        rl.attention(*GOOD.values(), score_mod=mod, backend="reference")


def cu(*ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype)


PACKED = {
    "start": ({"cu_seqlens_q": cu(1, 8, 16)}, "cu_seqlens_q starts at 1; expected 0"),
    "decreasing": ({"cu_seqlens_k": cu(0, 9, 5)}, r"cu_seqlens_k decreases: \[0, 9, 5\]; expected a non-decreasing"),
    "dtype": ({"cu_seqlens_q": cu(0, 8, 16, dtype=torch.int64)}, "cu_seqlens_q has dtype torch.int64; expected"),
    "beyond": ({"cu_seqlens_k": cu(0, 8, 17)}, "cu_seqlens_k ends at 17; expected at most the 16 rows of k"),
    "lengths": ({"cu_seqlens_k": cu(0, 16)}, "cu_seqlens_k has another length; expected that of cu_seqlens_q"),
    "max": ({"max_seqlen_q": 7}, "max_seqlen_q is 7; expected at least 8"),
    "max type": ({"max_seqlen_k": 7.5}, "max_seqlen_k is 7.5; expected an int"),
    "rank": ({"cu_seqlens_q": torch.zeros(2, 2, dtype=torch.int32)}, r"cu_seqlens_q has shape \(2, 2\)"),
    "documents": ({"mask": rl.Document(torch.tensor([0]))}, "mask gives tables per row or tile; expected Causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed(name) -> None:
    change, words = PACKED[name]
    arguments = {
        "cu_seqlens_q": cu(0, 8, 16), "cu_seqlens_k": cu(0, 8, 16), "max_seqlen_q": 8, "max_seqlen_k": 8, **change,
    }  # fmt: skip
    with pytest.raises(rl.InvalidInput, match=words):
        rl.attention_varlen(t(16, 4, 16), t(16, 2, 16), t(16, 2, 16), **arguments)


def test_merge_and_partial_backward() -> None:
    out, lse = t(1, 5, 3, 4), t(1, 3, 5)
    with pytest.raises(rl.InvalidInput, match="parts is empty"):
        rl.merge()
    with pytest.raises(rl.InvalidInput, match=r"parts\[1\]: out has shape"):
        rl.merge((out, lse), (t(1, 5, 3, 5), lse))
    with pytest.raises(
        rl.InvalidInput, match=r"lse has shape \(1, 5, 3\); expected heads before rows"
    ):
        rl.merge((out, t(1, 5, 3)), (out, t(1, 5, 3)))
    q, k, v = GOOD.values()
    with pytest.raises(rl.InvalidInput, match=r"lse has shape \(2, 8, 4\); expected \(2, 4, 8\)"):
        rl.partial_backward(q, q, k, v, q, t(2, 8, 4))
    lse = t(2, 4, 8)
    for change, words in (
        ({"dout": q.long()}, "dout has dtype torch.int64"),
        ({"dout": q.to("meta")}, "dout is on meta; expected cpu, as q"),
        ({"out": None}, "out is a NoneType; expected a tensor"),
        ({"lse": lse.half()}, "lse has dtype torch.float16"),
        ({"dlse": t(2, 8, 4)}, r"dlse has shape \(2, 8, 4\); expected \(2, 4, 8\)"),
        ({"dlse": 3}, "dlse is a int; expected a tensor"),
        ({"into": 3}, r"into is a int; expected \(dq, dk, dv\)"),
        ({"offset": 2.5}, "offset is 2.5; expected an int or None"),
    ):
        given = {"dout": q, "q": q, "k": k, "v": v, "out": q, "lse": lse, **change}
        with pytest.raises(rl.InvalidInput, match=words):
            rl.partial_backward(**given)
    for into, words in (
        (3, r"into is a int; expected \(out, lse\)"),
        ((q, 3), "into's lse is a int"),
    ):
        with pytest.raises(rl.InvalidInput, match=words):
            rl.partial(q, k, v, into=into)
    with pytest.raises(rl.InvalidInput, match=r"parts\[0\] is a NoneType; expected a pair"):
        rl.merge(None)
    with pytest.raises(rl.InvalidInput, match="lse is a str; expected a tensor"):
        statistics.column_sums(q, k, lse="x")
    with pytest.raises(rl.InvalidInput, match="into has one of dk and dv; expected both or none"):
        rl.partial_backward(q, q, k, v, q, lse, into=(q, k, None))
    with pytest.raises(rl.InvalidInput, match=r"into's dv has shape \(2, 8, 4, 16\); expected"):
        rl.partial_backward(q, q, k, v, q, lse, into=(q, k, q))
    with pytest.raises(rl.InvalidInput, match=r"into's dq has dtype torch\.float64; expected"):
        rl.partial_backward(q, q, k, v, q, lse, into=(q.double(), None, None))


def test_message_shows_the_tensors() -> None:
    with pytest.raises(rl.InvalidInput) as caught:
        rl.attention(GOOD["q"], t(2, 8, 3, 16), t(2, 8, 3, 16))
    assert "\n  q (2, 8, 4, 16) float32 cpu\n  k (2, 8, 3, 16) float32 cpu" in str(caught.value)


def test_unsupported_lists_every_reason_and_names_never_fall_back() -> None:
    q, k, v = (x.requires_grad_() for x in (t(1, 4, 1, 8), t(1, 4, 1, 8), t(1, 4, 1, 8)))
    mod = rl.ScoreMod(lambda s, q, k, head, args, math: s * 2)
    out = rl.attention(q, k, v, score_mod=mod)
    with pytest.raises(rl.Unsupported, match="no backend can run") as caught:
        out.sum().backward()
    assert "has no dfn, which the backward needs" in str(caught.value)
    named = rl.attention(q, k, v, score_mod=mod, backend="cpu")
    with pytest.raises(rl.Unsupported, match="backend 'cpu' cannot run"):
        named.sum().backward()


def test_plan_values() -> None:
    from relampago.plan import Plan

    with pytest.raises(rl.InvalidInput, match="plan: block_q is 0; expected"):
        Plan(block_q=0, block_k=1)
