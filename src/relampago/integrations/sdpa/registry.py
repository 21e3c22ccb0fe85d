"""relampago as a flash attention of torch's own dispatcher (torch 2.11 and later): forward, backward, ragged, paged.

`register()` makes it known; `torch.nn.attention.activate_flash_attention_impl("relampago")` exchanges the kernels of
aten's flash attention ops, below autograd. Torch chooses when to call them: no mask, causal only for equal lengths.
The same kernels can be put on the CPU's dispatch key, where torch has none: that is how they are tested.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from relampago.cache import CacheView
from relampago.integrations.refusals import expect, refuses
from relampago.lower import Call, prepare
from relampago.op import backward_op, forward_op
from relampago.options import Options, Packing

NAME = "relampago"


class Handle:
    """Keeps the kernels in torch's dispatcher until `remove`."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        """Give torch its own kernels back."""
        if self.library is not None:
            self.library._destroy()
        self.library = None


def register() -> None:
    """Make relampago known to torch, for `torch.nn.attention.activate_flash_attention_impl("relampago")`.

    Raises:
        Unsupported: torch is older than 2.11.
    """
    from relampago.errors import Unsupported

    known = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if known is None:
        raise Unsupported(f"torch {torch.__version__} has no registry; needs 2.11 or newer")
    known(NAME, register_fn=activate)


def activate(key: str = "CUDA") -> Handle:
    """Put the kernels into torch's dispatcher; `register` has torch call this.

    Args:
        key: the dispatch key.
    """
    library = torch.library.Library("aten", "IMPL", key)
    kernels = {
        "_flash_attention_forward": forward,
        "_flash_attention_forward_no_dropout_inplace": forward_into,
        "_flash_attention_backward": backward,
        "_scaled_dot_product_flash_attention": sdpa_forward,
        "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    }
    with (
        warnings.catch_warnings()
    ):  # torch warns that a kernel is exchanged, which is what was asked for
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, kernel in kernels.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, kernel, key)
    return Handle(library)


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    longest: tuple[int, int],
    is_causal: bool,
    scale: float | None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    window: tuple[int | None, int | None] = (None, None),
    alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Call:
    """What aten's arguments ask for, as relampago's op takes it; tensors are (B, L, heads, D) or packed."""
    left, right = (None if side is None or side < 0 else side for side in window)
    options = Options(
        causal=is_causal, window=None if left is right is None else (left, right), scale=scale,
        dropout_p=dropout_p, dropout_seed=seed, alibi_slopes=alibi_slopes,
        precision="full",  # the backward is another call, which takes this one's out and LSE
    )  # fmt: skip
    ragged = cum_seq_q is not None
    if block_table is None and seqused_k is None:
        packing = Packing(cum_seq_q, cum_seq_k, *longest) if ragged else None
        return prepare(q, k, v, options, packing=packing)
    if seqused_k is None:
        expect(
            cum_seq_k is not None, "cum_seq_k is None; expected it, or seqused_k, with block_table"
        )
        assert cum_seq_k is not None
        seqused_k = cum_seq_k.diff()
    if block_table is None and cum_seq_k is not None:
        k, v, block_table = one_token_pages(k, v, cum_seq_k, longest[1])
    view = CacheView(k, v, seqused_k, block_table)
    packing = Packing(cum_seq_q, None, longest[0]) if ragged else None
    return prepare(q, k, v, options, packing=packing, cache=view)


def one_token_pages(
    k: Tensor, v: Tensor, cu: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed keys as pages of one token each, so that any number of a sequence's first keys can be read."""
    place = cu[:-1, None] + torch.arange(longest, device=cu.device, dtype=torch.int32)
    table = place.clamp(0, max(0, k.shape[0] - 1))
    return k.unsqueeze(1), v.unsqueeze(1), table


@refuses
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_forward`; the seed of dropout travels in rng_state."""
    expect(not return_debug_mask, "return_debug_mask is True; expected False: the mask is not kept")
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    seed = None
    if dropout_p:
        seed = torch.randint(2**62, (), device=query.device)
        rng_state.view(torch.int64)[0] = seed
    call = call_of(
        query, key, value, cum_seq_q, cum_seq_k, (max_q, max_k), is_causal, scale, dropout_p=dropout_p, seed=seed,
        window=(window_size_left, window_size_right), alibi_slopes=alibi_slopes, seqused_k=seqused_k,
        block_table=block_table,
    )  # fmt: skip
    out, lse = forward_op(*call)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, rng_state, unused, query.new_empty(0)


def forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: writes the output, returns LSE."""
    found, lse, *_ = forward(*args, **kwargs)
    out.copy_(found)
    return lse


@refuses
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_backward`."""
    ragged = cum_seq_q is not None and cum_seq_q.numel() > 0
    call = call_of(
        query, key, value, cum_seq_q if ragged else None, cum_seq_k if ragged else None, (max_q, max_k), is_causal,
        scale, dropout_p=dropout_p, seed=rng_state.view(torch.int64)[0] if dropout_p else None,
        window=(window_size_left, window_size_right),
    )  # fmt: skip
    wanted = [True, True, True, False, False]
    return backward_op(grad_out, None, out, logsumexp, wanted, *call)[:3]


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`, on (B, heads, L, D); the output lies as query does."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    found, lse, rng_state, unused, debug = forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale
    )  # fmt: skip
    out = found.transpose(1, 2)
    like = torch.empty_like(query)
    if like.stride() != out.stride():
        out = like.copy_(out)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, unused, debug


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_backward`."""
    g, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    grads = backward(
        g, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
        scale=scale,
    )  # fmt: skip
    return tuple(grad.transpose(1, 2) for grad in grads)
