"""torch.compile(fullgraph=True) of whatever a call takes beside q, k and v: sizes known and symbolic, layouts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import relampago as rl
from relampago import flash_attn as fa
from relampago import statistics
from relampago.cache import KVCache, PagedKVCache
from relampago.integrations.sdpa import scaled_dot_product_attention
from relampago.lower import prepare
from relampago.mods import ScoreMod, relative_bias, t5_bias, window_bias
from relampago.op import backward_args_op, backward_op, forward_op
from relampago.options import Options


def make(batch=2, length=24):
    return tuple(torch.randn(batch, length, heads, 16) for heads in (4, 2, 2))


def compiled(fn, *, dynamic=None, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend)


def scaled(score, q, k, head, args, math):
    return score * args[0]


def heads_first(t):
    return t.transpose(1, 2)


HELD = {
    "relative": Parameter(torch.rand(4, 9)),
    "buckets": Parameter(torch.rand(32, 4)),
    "swin": Parameter(torch.rand(35, 4)),
    "bias": Parameter(torch.rand(1, 4, 24, 24)),
    "square": Parameter(torch.rand(24, 24)),
    "heads": Parameter(torch.rand(4)),
    "seen": torch.rand(24, 24) > 0.2,
    "starts": torch.tensor([[0, 9], [0, 3]]),
    "scale": torch.full((2, 2), 0.5),
}
for held in HELD.values():  # a parameter's are fixed in any case
    torch._dynamo.mark_static(held)
HELD_BY = {
    "relative bias": lambda q, k, v: rl.attention(q, k, v, score_mod=relative_bias(HELD["relative"])),
    "t5 bias": lambda q, k, v: rl.attention(q, k, v, score_mod=t5_bias(HELD["buckets"])),
    "swin bias": lambda q, k, v: rl.attention(
        q[:, :12], k[:, :12], v[:, :12], score_mod=window_bias(HELD["swin"], (3, 4))
    ),
    "bias": lambda q, k, v: rl.attention(q, k, v, bias=HELD["bias"]),
    "by head": lambda q, k, v: rl.attention(
        q, k, v, score_mod=ScoreMod(scaled, args=[("head", HELD["heads"].detach())])
    ),
    "mask": lambda q, k, v: rl.attention(q, k, v, mask=HELD["seen"]),
    "documents": lambda q, k, v: rl.attention(q, k, v, mask=rl.Document(HELD["starts"])),
    "slopes": lambda q, k, v: rl.attention(q, k, v, alibi_slopes=HELD["heads"]),
    "sinks": lambda q, k, v: rl.attention(q, k, v, sinks=HELD["heads"]),
    "flash-attn's sinks": lambda q, k, v: fa.flash_attn_func(q, k, v, s_aux=HELD["heads"]),
    "attn_mask": lambda q, k, v: scaled_dot_product_attention(
        *(heads_first(t) for t in (q, k, v)), attn_mask=HELD["square"], enable_gqa=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD_BY)
def test_a_parameter_whose_sizes_are_known_beside_symbols(name) -> None:
    """A module's own tensors have fixed sizes, inputs have symbols: both must be found to be equal."""
    tensors = make()
    got = compiled(HELD_BY[name], dynamic=True)(*tensors)
    torch.testing.assert_close(got, HELD_BY[name](*tensors))


@pytest.mark.parametrize("name", ["slopes", "sinks"])
def test_another_batch_or_number_of_sequences(name) -> None:
    option = {"slopes": "alibi_slopes", "sinks": "sinks"}[name]

    def fn(q, k, v):
        return rl.attention(q, k, v, **{option: HELD["heads"].detach()})

    step = compiled(fn)
    for batch in (2, 3, 4):
        tensors = make(batch)
        torch.testing.assert_close(step(*tensors), fn(*tensors))

    def packed(q, k, v, cu):
        return rl.attention_varlen(q, k, v, cu, cu, 24, 24, **{option: HELD["heads"].detach()})

    step, (q, k, v) = compiled(packed), (t.flatten(0, 1) for t in make())
    for ends in ((0, 24, 48), (0, 24, 30, 48), (0, 9, 20, 30, 48)):
        cu = torch.tensor(ends, dtype=torch.int32)
        torch.testing.assert_close(step(q, k, v, cu), packed(q, k, v, cu))


@pytest.mark.parametrize("dynamic", [None, True])
def test_fp8_scales(dynamic) -> None:
    q, k, v = (t.to(torch.float8_e4m3fn) for t in make())
    one = HELD["scale"]

    def fn(q, k, v):
        return fa.flash_attn_func(q, k, v, q_descale=one, k_descale=one, v_descale=one)

    torch.testing.assert_close(compiled(fn, dynamic=dynamic)(q, k, v), fn(q, k, v))


def test_a_block_sparse_mask_as_an_argument() -> None:
    seen = rl.BlockSparse.from_mask(torch.rand(24, 24) > 0.3, block=(8, 8))

    def fn(q, k, v, mask):
        return rl.attention(q, k, v, mask=mask)

    tensors = make()
    got = compiled(fn, dynamic=True)(*tensors, seen)
    torch.testing.assert_close(got, fn(*tensors, seen))


@pytest.mark.parametrize("paged", [False, True], ids=["room", "pages"])
def test_decoding_appends(paged) -> None:
    def cache():
        made = (
            PagedKVCache(2, 9, 4, 2, 16, dtype=torch.float32)
            if paged
            else KVCache(2, 32, 2, 16, dtype=torch.float32)
        )
        if paged:
            made.reserve(16)
        return made

    step, (q, k, v) = compiled(rl.attention_decode), make(2, 3)
    ours, theirs = cache(), cache()
    for _ in range(2):
        got = step(q, ours, k, v)
        torch.testing.assert_close(got, rl.attention_decode(q, theirs, k, v))


@pytest.mark.parametrize("dynamic", [None, True])
def test_flash_attns_cache_appends(dynamic) -> None:
    q, k, v = make(2, 1)
    room_k, room_v = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
    lengths = torch.tensor([3, 4], dtype=torch.int32)

    def fn(q, k, v, room_k, room_v, lengths):
        return fa.flash_attn_with_kvcache(q, room_k, room_v, k, v, cache_seqlens=lengths)

    want = fn(q, k, v, room_k.clone(), room_v.clone(), lengths)
    got = compiled(fn, dynamic=dynamic)(q, k, v, room_k, room_v, lengths)
    torch.testing.assert_close(got, want)
    assert torch.equal(room_k[0, 3], k[0, 0])


REFUSED = {
    "a mask function": lambda q, k, v: rl.attention(q, k, v, mask=lambda b, h, i, j: j <= i),
    "chosen rows": lambda q, k, v: statistics.weights(q, k, [0]),
}


@pytest.mark.filterwarnings("ignore:.*lru_cache")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_named(name) -> None:
    """Without fullgraph=True it runs eagerly."""
    tensors = make()
    with pytest.raises(Exception, match=f"{name} inside a graph"):
        compiled(REFUSED[name])(*tensors)
    torch._dynamo.reset()
    broken = torch.compile(REFUSED[name], backend="aot_eager")
    torch.testing.assert_close(broken(*tensors), REFUSED[name](*tensors))


def turned(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


LYING = {
    "t5 bias": lambda: {"score_mod": t5_bias(torch.rand(32, 4))},
    "relative bias": lambda: {"score_mod": relative_bias(torch.rand(9, 4).T)},
    "bias": lambda: {"bias": torch.rand(24, 24, 4).permute(2, 0, 1)},
    "sinks": lambda: {"sinks": torch.rand(8)[::2]},
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", LYING)
def test_ops_return_what_their_fakes_say_however_inputs_lie(name, backend) -> None:
    options = LYING[name]()
    call = prepare(*map(turned, make()), Options(backend=backend, **options))
    torch.library.opcheck(forward_op, tuple(call), test_utils="test_faketensor")
    out, lse = forward_op(*call)
    wanted = [True, True, True, call.bias is not None, call.sinks is not None]
    given = (torch.ones_like(out), None, out, lse)
    torch.library.opcheck(backward_op, (*given, wanted, *call), test_utils="test_faketensor")
    wanted += [True] * len(call.mod_args)
    torch.library.opcheck(backward_args_op, (*given, wanted, *call), test_utils="test_faketensor")
