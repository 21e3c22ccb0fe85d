"""The public calls. Each does the same six steps: validate, describe, choose, plan, launch, save (see ARCHITECTURE.md).

Legend of shapes, here and everywhere: B sequences, H query heads, G kv heads (H a multiple of G), Lq and Lk lengths,
D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from relampago import defaults, validate
from relampago.answer import answer
from relampago.lower import prepare
from relampago.masks.spec import Mask
from relampago.measure import forward_max
from relampago.mods import ScoreMod
from relampago.options import Options, Packing


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    precision: str | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any:
    """Exact attention, softmax(scale · q·kᵀ + …)·v, in O(N) memory (FlashAttention-2, arXiv 2307.08691).

    A score passes through, in this order: scale, softcap, ALiBi, score mods, bias, mask.

    Args:
        q: queries (B, Lq, H, D), any strides; fp16, bf16, fp32 or fp64.
        k: keys (B, Lk, G, D), same dtype; H must be a multiple of G (MHA, GQA, MQA).
        v: values (B, Lk, G, E).
        causal: no key after the row's own position; aligned to the bottom right when Lq != Lk.
        window: (left, right), how many keys before and after the row's own position; None is unbounded.
        mask: `Causal()`, `Window(…)`, `Prefix(…)`, `Document(…)`, a `BlockSparse`, a combination by `&`, a bool
            tensor that broadcasts to (B, H, Lq, Lk) with True for visible, or a function fn(b, h, q, k) -> bool on
            index tensors.
        scale: factor of q·kᵀ; D ** -0.5 if None.
        softcap: c for c · tanh(score / c).
        alibi_slopes: (H,) or (B, H); subtracts slope · distance (arXiv 2108.12409). Gets its gradient.
        score_mod: one `ScoreMod` or several, applied in order. Arguments with a derivative get their gradients.
        bias: float tensor that broadcasts to (B, H, Lq, Lk), added to the scores. Gets its gradient.
        sinks: (H,), a learnable score per head that takes part in the softmax and has no value. Gets its gradient.
        dropout_p: probability in [0, 1) of dropping a weight.
        dropout_seed: fixes which; the same weights are dropped in forward and backward, whatever the tiling.
        deterministic: bit-for-bit the same gradients in each run; None follows torch.use_deterministic_algorithms.
        batch_invariant: a sequence's results are the same to the bit whatever else is in the batch, wherever it
            stands, however it is laid out and cut (docs/batch-invariance.md); None follows `using`, then
            `set_batch_invariant`.
        precision: "fp8" for products of e4m3 numbers, which Hopper forms at twice the rate: q, k and v are rotated and
            cast here, the backward runs in their own dtype (docs/fp8.md). A CPU emulates the same arithmetic. "full"
            for their own dtype; None follows `using`.
        q_descale: fp32 scales of a q that is float8_e4m3fn already: (B, G), or as `quant.quantise` gives them.
        k_descale: likewise of k.
        v_descale: likewise of v. Out is then bf16.
        return_lse: also return log Σ exp(scores): fp32 (fp64 for fp64 input), natural logarithm, (B, H, Lq);
            differentiable.
        return_max_logits: also return, as the last, each head's largest scale · q·kᵀ among the pairs that the masks
            show, (B, H), before softcap, mods and bias; -inf where no pair is visible. It is what QK-Clip compares
            with its threshold (arXiv 2507.20534, section 2.1). In LSE's dtype; no gradient.
        backend: a backend's name; it never falls back. None takes the first that can.

    Returns:
        out (B, Lq, H, E), or (out, lse), (out, max_logits), (out, lse, max_logits). A row that sees no key gives 0
        and LSE -inf.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
        Unsupported: no backend can run the call; the message lists each one's reason.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> attention(q, k, v, causal=True).shape
        torch.Size([1, 128, 8, 64])
    """
    options = Options(causal, window, mask, scale, softcap, alibi_slopes, score_mod, bias, sinks, dropout_p,
                      dropout_seed, deterministic, batch_invariant, backend, precision, q_descale, k_descale,
                      v_descale)  # fmt: skip
    return _respond(q, k, v, options, None, return_lse, return_max_logits)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    precision: str | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any:
    """`attention` over packed sequences: sequence i owns rows cu_seqlens[i] to cu_seqlens[i + 1].

    Args:
        q: (Tq, H, D).
        k: (Tk, G, D).
        v: (Tk, G, E).
        cu_seqlens_q: int32 (B + 1,), starting at 0, non-decreasing, on q's device.
        cu_seqlens_k: likewise for keys.
        max_seqlen_q: the longest sequence of queries.
        max_seqlen_k: the longest sequence of keys.
        causal: as in `attention`, within each sequence.
        window: as in `attention`.
        mask: `Causal`, `Window` or an int `Prefix`.
        scale: as in `attention`.
        softcap: as in `attention`.
        alibi_slopes: as in `attention`.
        score_mod: as in `attention`; positions count within a sequence.
        bias: broadcasts to (B, H, max_seqlen_q, max_seqlen_k); each sequence reads its upper left part.
        sinks: as in `attention`.
        dropout_p: as in `attention`.
        dropout_seed: as in `attention`.
        deterministic: as in `attention`.
        batch_invariant: as in `attention`.
        precision: as in `attention`.
        q_descale: as in `attention`.
        k_descale: as in `attention`.
        v_descale: as in `attention`.
        return_lse: LSE is (H, Tq).
        return_max_logits: as in `attention`, (B, H).
        backend: as in `attention`.

    Returns:
        out (Tq, H, E), or a tuple as in `attention`. Rows beyond cu_seqlens_q[-1] get 0, LSE -inf and zero gradients.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
        Unsupported: no backend can run the call.
    """
    options = Options(causal, window, mask, scale, softcap, alibi_slopes, score_mod, bias, sinks, dropout_p,
                      dropout_seed, deterministic, batch_invariant, backend, precision, q_descale, k_descale,
                      v_descale)  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _respond(q, k, v, options, packing, return_lse, return_max_logits)


def _respond(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    packing: Packing | None,
    with_lse: bool,
    with_max: bool,
) -> Any:
    """Out, and what else was asked for."""
    if with_max:
        fp8 = (
            options.precision or defaults.forced.precision
        ) == "fp8" or options.q_descale is not None
        validate.require([("return_max_logits", "is True with FP8 products", "False", not fp8)])
        out, lse, top = forward_max(*prepare(q, k, v, options, packing=packing))
        return (out, lse, top) if with_lse else (out, top)
    out, lse = answer(q, k, v, options, packing)
    return (out, lse) if with_lse else out
