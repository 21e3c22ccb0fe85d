"""The public calls. Each does the same six steps: validate, describe, choose, plan, launch, save (see ARCHITECTURE.md).

Legend of shapes, here and everywhere: B sequences, H query heads, G kv heads (H a multiple of G), Lq and Lk lengths,
D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relampago import quant, validate, warm
from relampago.cache import KVCache
from relampago.derivatives import run
from relampago.errors import InvalidInput
from relampago.masks.spec import Causal, Extent, Mask, Window, resolve
from relampago.measure import forward_max
from relampago.mods import ScoreMod, alibi, constant, register
from relampago.mods import softcap as softcap_mod
from relampago.plan import Plan
from relampago.problem import Facts
from relampago.select import by_name


class _Forced(threading.local):
    """What `using` asks for, per thread; a ContextVar would break a torch.compile graph."""

    backend: str | None = None
    plan: tuple[tuple[str, int], ...] = ()
    batch_invariant: bool | None = None
    precision: str | None = None

    def now(self) -> tuple[Any, ...]:
        """Backend, plan and precision."""
        return self.backend, self.plan, self.precision


_forced = _Forced()
_everywhere = os.environ.get("RELAMPAGO_BATCH_INVARIANT", "0") == "1"


@contextlib.contextmanager
def using(
    *, backend: str | None = None, plan: Plan | None = None, batch_invariant: bool | None = None,
    precision: str | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside, on this thread, calls that do not say otherwise use this backend, plan, batch invariance and precision.

    Nothing falls back. Shards, caches and statistics have the precision of their tensors whatever stands here.

    Raises:
        InvalidInput: there is no backend or precision of that name.
    """
    if backend is not None:
        by_name(backend)
    validate.precision(precision)
    outer = (_forced.backend, _forced.plan, _forced.batch_invariant, _forced.precision)
    _forced.backend = backend or outer[0]
    _forced.plan = plan.items() if plan else outer[1]
    _forced.batch_invariant = outer[2] if batch_invariant is None else bool(batch_invariant)
    _forced.precision = precision or outer[3]
    try:
        yield
    finally:
        _forced.backend, _forced.plan, _forced.batch_invariant, _forced.precision = outer


def set_batch_invariant(on: bool) -> bool:
    """Whether calls of the whole process are batch-invariant where neither they nor `using` say; returns what was.

    RELAMPAGO_BATCH_INVARIANT=1 in the environment starts a process with it on.
    """
    global _everywhere
    before, _everywhere = _everywhere, bool(on)
    return before


class Call(NamedTuple):
    """A validated call: what the ops take, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    lens_k: Tensor | None
    page_table: Tensor | None
    row_start: Tensor | None
    row_end: Tensor | None
    seed: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    blocks: list[Tensor]
    mod_args: list[Tensor]
    sizes: list[int]  # offset, longest q, longest k
    facts: str


class Packing(NamedTuple):
    """cu_seqlens (B + 1,) and the longest lengths; keys in a cache need neither."""

    cu_q: Tensor
    cu_k: Tensor | None
    max_q: int
    max_k: int = 0


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


class Options(NamedTuple):
    """The keyword arguments that all calls share."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Any = None
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    deterministic: bool | None = None
    batch_invariant: bool | None = None
    backend: str | None = None
    precision: str | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


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
        fp8 = (options.precision or _forced.precision) == "fp8" or options.q_descale is not None
        validate.require([("return_max_logits", "is True with FP8 products", "False", not fp8)])
        out, lse, top = forward_max(*prepare(q, k, v, options, packing=packing))
        return (out, lse, top) if with_lse else (out, top)
    out, lse = _answer(q, k, v, options, packing)
    return (out, lse) if with_lse else out


def _answer(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    """Out and LSE: by the short way if a like call has gone the long one, see `warm`."""
    o = options
    cu_q, cu_k, *longest = packing or (None, None)
    plain = (
        o.mask
        is o.alibi_slopes
        is o.score_mod
        is o.bias
        is o.dropout_seed
        is o.q_descale
        is o.k_descale
        is o.v_descale
        is None
        and o.dropout_p == 0.0
        and (o.window is None or type(o.window) is tuple)
    )
    if not torch.compiler.is_compiling() and plain and _on_device(cu_q, cu_k):
        numbers = (
            *longest, o.causal, o.window, o.scale, o.softcap, _deterministic(o.deterministic),
            _invariant(o.batch_invariant), o.backend, o.precision, *_forced.now(),
        )  # fmt: skip
        given = (q, k, v, o.sinks, cu_q, cu_k)
        key = warm.key_of(given, numbers)
        if key is not None:
            return warm.run(key, given, lambda: prepare(q, k, v, o, packing=packing))
    return run(*prepare(q, k, v, o, packing=packing))


def _on_device(*cu_seqlens: Tensor | None) -> bool:
    """Whether their values are no one's to check: those on the CPU are read at each call."""
    return all(cu is None or (isinstance(cu, Tensor) and cu.is_cuda) for cu in cu_seqlens)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    packing: Packing | None = None,
    offset: int | None = None,
    shard: bool = False,
    cache: KVCache | None = None,
) -> Call:
    """Validate a call and lower it to what the ops take; k and v are a cache's own where one is given."""
    o = options
    validate.tensors(q, k, v, packed=packing is not None, cached=cache is not None)
    validate.numbers(o.scale, o.softcap, o.dropout_p, o.window)
    q, k, v = autocast(q, k, v)
    if cache is not None:
        if packing is None:
            batch, len_q = q.shape[0], q.shape[1]
        else:
            validate.packed("q", q, packing.cu_q, packing.max_q)
            batch, len_q = packing.cu_q.shape[0] - 1, packing.max_q
        found, len_k = cache.batch, cache.longest
        validate.require(
            [("cache", ("holds {} sequences", found), ("{}, as q", batch), found == batch)]
        )
        offset = 0
    elif packing is None:
        batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
        offset = len_k - len_q if offset is None else offset
    else:
        validate.packing(q, k, *packing)
        batch, len_q, len_k = packing.cu_q.shape[0] - 1, packing.max_q, packing.max_k
        offset = 0
    full = (batch, q.shape[-2], len_q, len_k)
    asked = o.precision or (None if shard or cache is not None else _forced.precision)
    scales = validate.fp8(q, k, v, asked, (o.q_descale, o.k_descale, o.v_descale), full, shard)
    precision = "fp8" if q.dtype == quant.E4M3 or asked == "fp8" else None
    validate.extras(q, o.bias, o.sinks, o.alibi_slopes, full)
    seen = resolve(
        _mask(o), Extent(*full, offset, q.device, packing is not None or cache is not None)
    )
    mods = _mods(o)
    validate.score_args(mods, full, q.device)
    invariant = _invariant(o.batch_invariant)
    facts = Facts(
        scale=None if o.scale is None else constant(o.scale),
        left=seen.left,
        right=seen.right,
        prefix=seen.prefix,
        block=None if seen.blocks is None else seen.blocks.block,
        mods=tuple(register(mod) for mod in mods),
        dropout_p=constant(o.dropout_p),
        deterministic=_deterministic(o.deterministic) or invariant,
        dtype=_out_dtype(q, shard),
        shard=shard,
        backend=_backend(o.backend or _forced.backend),
        plan=_forced.plan,
        precision=precision,
        batch_invariant=invariant,
    )
    return Call(
        q=q,
        k=k,
        v=v,
        bias=None
        if o.bias is None
        else o.bias.reshape((1,) * (4 - o.bias.ndim) + tuple(o.bias.shape)),
        sinks=o.sinks,
        mask=seen.dense,
        cu_q=packing.cu_q if packing else None,
        cu_k=packing.cu_k if packing else None,
        lens_k=cache.lengths if cache else None,
        page_table=cache.page_table if cache else None,
        row_start=seen.row_start,
        row_end=seen.row_end,
        seed=_seed(o.dropout_seed, q.device) if o.dropout_p else None,
        q_scale=scales[0],
        k_scale=scales[1],
        v_scale=scales[2],
        blocks=list(seen.blocks.blocks) if seen.blocks is not None else [],
        mod_args=[tensor for mod in mods for tensor in mod.tensors],
        sizes=[offset, len_q, len_k],
        facts=facts.encode(),
    )


def _out_dtype(q: Tensor, shard: bool) -> str | None:
    """What out and gradients are held in, if not in q's dtype."""
    if shard:
        return "float64" if q.dtype == torch.float64 else "float32"
    return "bfloat16" if q.dtype == quant.E4M3 else None


def _mask(o: Options) -> Any:
    """All that restricts who sees whom, as one mask."""
    mask = o.mask
    if o.causal:
        mask = Causal() if mask is None else Causal() & mask
    if o.window is not None:
        window = Window(*o.window)
        mask = window if mask is None else window & mask
    return mask


def _mods(o: Options) -> tuple[ScoreMod, ...]:
    given = o.score_mod
    own = () if given is None else (given,) if isinstance(given, ScoreMod) else tuple(given)
    for mod in own:
        if not isinstance(mod, ScoreMod):
            raise InvalidInput(
                f"score_mod is a {type(mod).__name__}; expected a ScoreMod or a sequence of them"
            )
    capped = () if o.softcap is None else (softcap_mod(o.softcap),)
    sloped = () if o.alibi_slopes is None else (alibi(o.alibi_slopes),)
    return (*capped, *sloped, *own)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as torch.autocast asks, where it is active."""
    kind = q.device.type
    narrow = q.dtype not in (torch.float64, quant.E4M3)
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and narrow:
        dtype = torch.get_autocast_dtype(kind)
        return q.to(dtype), *(t if t.dtype == quant.E4M3 else t.to(dtype) for t in (k, v))  # type: ignore[return-value]
    return q, k, v


def _deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else bool(asked)


def _invariant(asked: bool | None) -> bool:
    asked = _forced.batch_invariant if asked is None else asked
    return _everywhere if asked is None else bool(asked)


def _backend(name: str | None) -> str | None:
    if name is not None:
        by_name(name)
    return name


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        validate.require(
            [("dropout_seed", ("is {} {}", tuple(seed.shape), seed.dtype), "an int64 scalar",
              seed.ndim == 0 and seed.dtype == torch.int64)]
        )  # fmt: skip
        return seed.to(device)
    whole = isinstance(seed, int) and -(2**63) <= seed < 2**63
    validate.require(
        [("dropout_seed", ("is {!r}", seed), "an int of 64 bits, a tensor or None", whole)]
    )
    return torch.full((), seed, dtype=torch.int64, device=device)
