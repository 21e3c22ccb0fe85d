"""`relampago.statistics` over a sequence that is spread over ranks: the same answers, of this rank's rows or keys.

    lse, entropy, max_logits = rows(q, k, plan=plan, causal=True)     # (B, H, L) of own rows; (B, H) of all
    received = column_sums(q, k, plan=plan, causal=True)              # (B, H, L) of own keys, from all rows
    some = weights(q, k, [0, -1], plan=plan, causal=True)             # (B, H, 2, L): rows by global position
    heavy, keys = top_keys(q, k, [0, -1], 3, plan=plan, causal=True)  # (B, H, 2, 3), the same on all ranks

All ranks call with the same options. Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relampago.distributed import measure
from relampago.distributed.attention import agreed, check_plan, refusing
from relampago.distributed.exchange import Scores
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.program import Course
from relampago.distributed.sight import Sight
from relampago.distributed.transport import Program, drive
from relampago.errors import InvalidInput
from relampago.lower import autocast
from relampago.problem import RowStatistics, accumulate_dtype

OPTIONS = ("causal", "window", "mask", "scale", "softcap", "sinks", "backend")
Make = Callable[..., Program]


def rows(q: Tensor, k: Tensor, *, plan: ContextParallelPlan, **options: Any) -> RowStatistics:
    """LSE and entropy of this rank's rows, and each head's largest logit over all ranks, in one pass over the keys.

    Args:
        q: this rank's queries (B, L, H, D), as in `distributed.attention`.
        k: its keys (B, L, G, D).
        plan: who holds which tokens, and how they meet.
        options: causal, window, mask, scale, softcap, sinks, backend: as in `distributed.attention`.

    Returns:
        as `relampago.statistics.rows`: lse and entropy (B, H, L); max_logits (B, H), the same on all ranks.

    Raises:
        InvalidInput: as `distributed.attention`; an option that is none of these.
        Unsupported: likewise, or no backend can run the call.
        RankFailure: another rank died or hung.
    """
    return _run(measure.rows, "rows", q, k, plan, options, lambda: ())


def column_sums(
    q: Tensor, k: Tensor, *, plan: ContextParallelPlan, last: int | None = None, lse: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The attention that each of this rank's keys receives from the rows of all ranks, or from the sequence's last.

    Args:
        q: as in `rows`.
        k: as in `rows`.
        plan: as in `rows`.
        last: how many rows count, from the end of the whole sequence; all if None.
        lse: of this rank's rows (B, H, L), as `rows` or `attention(return_lse=True)` gives it; spares a pass. On all
            ranks or on none.
        options: as in `rows`.

    Returns:
        (B, H, L) in fp32 (fp64 for fp64 input).

    Raises:
        InvalidInput: as `rows`.
        Unsupported: as `rows`.
        RankFailure: as `rows`.
    """

    def more() -> tuple[Any, ...]:
        if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
            raise InvalidInput(f"last is {last!r}; expected an int of at least 1, or None")
        shape = (q.shape[0], q.shape[2], q.shape[1])
        if lse is not None and tuple(lse.shape) != shape:
            raise InvalidInput(f"lse has shape {tuple(lse.shape)}; expected {shape}")
        wide = None if lse is None else lse.detach().to(accumulate_dtype(q.dtype))
        return wide, plan.length if last is None else min(last, plan.length)

    name = f"column sums of the last {last}, {'LSE unknown' if lse is None else 'LSE given'}"
    return _run(measure.columns, name, q, k, plan, options, more)


def weights(
    q: Tensor, k: Tensor, rows: Tensor | Sequence[int], *, plan: ContextParallelPlan, **options: Any
) -> Tensor:
    """The weights of some rows over this rank's keys.

    Args:
        q: as in `rows` of this module.
        k: likewise.
        rows: which, by position in the whole sequence: ints (R,), the same on all ranks; negative from the end.
        plan: as in `rows`.
        options: as in `rows`.

    Returns:
        (B, H, R, L) in fp32 (fp64 for fp64 input), keys in the order of plan.positions().

    Raises:
        InvalidInput: as `rows`.
        Unsupported: as `rows`.
        RankFailure: as `rows`.
    """

    def more() -> tuple[Any, ...]:
        return (_positions(rows, plan),)

    name = f"weights of {_listed(rows)}"  # which may be others each time: not kept
    return _run(measure.chosen_weights, name, q, k, plan, options, more, kept=False)


def top_keys(
    q: Tensor, k: Tensor, rows: Tensor | Sequence[int], n: int, *, plan: ContextParallelPlan, **options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The n keys that some rows weigh most, of all ranks' keys, heaviest first.

    Args:
        q: as in `weights`.
        k: likewise.
        rows: likewise.
        n: how many keys.
        plan: as in `rows`.
        options: as in `rows`.

    Returns:
        (weights, keys), each (B, H, R, n), the same on all ranks. Keys are positions in the whole sequence; where a row
        sees fewer than n keys the rest have weight 0 and key -1.

    Raises:
        InvalidInput: as `rows`.
        Unsupported: as `rows`.
        RankFailure: as `rows`.
    """

    def more() -> tuple[Any, ...]:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidInput(f"n is {n!r}; expected an int of at least 1")
        return _positions(rows, plan), n

    name = f"top {n} keys of {_listed(rows)}"
    return _run(measure.chosen_keys, name, q, k, plan, options, more, kept=False)


def _run(
    make: Make, name: str, q: Tensor, k: Tensor, plan: ContextParallelPlan, options: dict[str, Any],
    more: Callable[[], tuple[Any, ...]], kept: bool = True,
) -> Any:  # fmt: skip
    """Check a call, agree on it with the other ranks, and run its program; `more` checks what else that takes."""
    check_plan(plan)
    if odd := sorted(set(options) - {*OPTIONS}):
        raise InvalidInput(f"{odd[0]} is no option of a statistic; expected {', '.join(OPTIONS)}")
    seen = {name: options[name] for name in ("causal", "window", "mask") if name in options}
    sight = refusing(plan, lambda: Sight.of(plan.length, documents=plan.documents, **seen))
    scores = Scores(options.get("scale"), options.get("softcap"), backend=options.get("backend"))
    sinks = options.get("sinks")
    q, k, _ = autocast(q, k, k)

    def settle() -> tuple[Course, tuple[Any, ...]]:
        return plan.course(q, k, k, sight, scores, sinks=sinks), more()

    text = f"{name}, {(tuple(sight), tuple(scores))}"
    course, extra = agreed(plan, q, k, k, text, settle, kept)
    sinks = None if sinks is None else sinks.detach()
    return drive(make(course, plan.links(course), q.detach(), k.detach(), sinks, *extra))


def _listed(rows: Any) -> Any:
    return rows.tolist() if isinstance(rows, Tensor) else rows


def _positions(rows: Tensor | Sequence[int], plan: ContextParallelPlan) -> Tensor:
    """Checked positions (R,): int64 on the CPU."""
    at = torch.as_tensor(rows).cpu()
    if at.is_floating_point() or at.dtype == torch.bool or at.ndim != 1 or not at.numel():
        raise InvalidInput(f"rows is {at.dtype} of shape {tuple(at.shape)}; expected ints (R,)")
    low, high = int(at.min()), int(at.max())
    if low < -plan.length or high >= plan.length:
        raise InvalidInput(
            f"rows reaches from {low} to {high}; expected {-plan.length} to {plan.length - 1}"
        )
    return at.long().remainder(plan.length)
