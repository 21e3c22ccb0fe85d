"""Hugging Face Transformers over several ranks: `attn_implementation="relampago_cp"`, inside `use_plan(plan)`.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="relampago_cp")
    plan = ContextParallelPlan(group, length)
    with use_plan(plan):
        logits = model(plan.shard(tokens), position_ids=plan.position_ids()[None]).logits

No private function is patched: this is the library's own AttentionInterface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from relampago.distributed.attention import attention
from relampago.distributed.plan import ContextParallelPlan
from relampago.errors import InvalidInput, Unsupported

_plan: ContextVar[ContextParallelPlan] = ContextVar("relampago_cp_plan")


@contextlib.contextmanager
def use_plan(plan: ContextParallelPlan) -> Iterator[ContextParallelPlan]:
    """Inside, models with attn_implementation="relampago_cp" attend over this plan; a backward may follow outside."""
    token = _plan.set(plan)
    try:
        yield plan
    finally:
        _plan.reset(token)


def register(name: str = "relampago_cp") -> None:
    """Make the implementation known to Transformers, with flash attention's masks (none, unless there is padding)."""
    from transformers import AttentionInterface  # pyright: ignore
    from transformers.masking_utils import (  # pyright: ignore
        ALL_MASK_ATTENTION_FUNCTIONS,
        AttentionMaskInterface,
    )

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of Transformers: query (B, H, L, D) to (B, L, H, E).

    A sliding window of n sees the row itself and n - 1 keys before it, as Transformers means it.

    Raises:
        InvalidInput: outside of `use_plan`.
        Unsupported: a mask (padding: give documents to the plan instead), dropout.
    """
    plan = _plan.get(None)
    if plan is None:
        raise InvalidInput("plan is missing; expected the model to run inside `use_plan(plan)`")
    if attention_mask is not None or dropout:
        raise Unsupported(
            "attention_mask and dropout: attention over several ranks does not know them"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else (sliding_window - 1, None)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = attention(
        q,
        k,
        v,
        plan=plan,
        causal=causal,
        window=window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None
