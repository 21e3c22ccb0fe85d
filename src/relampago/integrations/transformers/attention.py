"""The attention function that Transformers' models call under `attn_implementation="relampago"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relampago.api import attention, attention_varlen
from relampago.integrations.transformers.masks import BandMask
from relampago.masks.spec import All, Document


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; weights are never formed, so none are returned.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: (B, H, Lq, D).
        key: (B, G, Lk, D).
        value: (B, G, Lk, E).
        attention_mask: None, a `BandMask`, bool (True is visible) or float (added), broadcasting to (B, H, Lq, Lk).
        dropout: probability of dropping a weight.
        scaling: D ** -0.5 if None.
        is_causal: without a mask, whether rows see what stands before them; a single row sees all.
        position_bias: added to the scores (T5); gets its gradient.
        softcap: Gemma 2's bound of the scores.
        s_aux: (H,), learnt sinks (GPT-OSS).
        sliding_window: keys a row sees, itself included; without a mask, and with cu_seq_lens, it counts here.
        cu_seq_lens_q: int32 (sequences + 1,), sequences packed in a batch of 1, used where there is no mask.
        cu_seq_lens_k: likewise.
        max_length_q: the longest.
        max_length_k: likewise.
        kwargs: what other implementations need.

    Returns:
        (output (B, Lq, H, E), None).
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if attention_mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        window = (sliding_window - 1, 0) if sliding_window and causal else None
        lengths = (int(max_length_q or q.shape[1]), int(max_length_k or k.shape[1]))
        cu = (cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32))
        tq, tk, tv = (t.flatten(0, 1) for t in (q, k, v))
        out = attention_varlen(tq, tk, tv, *cu, *lengths, causal=causal, window=window, **options)
        return out.view(*q.shape[:2], *out.shape[1:]), None
    if isinstance(attention_mask, BandMask):
        k, v, seen = banded(k, v, attention_mask)
    elif attention_mask is None:
        k, v, seen = unmasked(q, k, v, causal)
    else:
        seen = written(attention_mask, k.shape[1])
    if position_bias is not None:
        bias = position_bias[..., : k.shape[1]]
        seen["bias"] = bias if seen.get("bias") is None else seen["bias"] + bias
    return attention(q, k, v, **seen, **options), None


def banded(k: Tensor, v: Tensor, mask: BandMask) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys that some row may see, and the words for their mask."""
    band, n = mask.band, mask.visible
    seen: dict[str, Any] = {"causal": band.right == 0}
    if band.left is not None or band.right:
        seen["window"] = (band.left, band.right or None)
    if mask.keys is not None:
        seen["mask"] = mask.keys[:, None, None, :n]
    if band.ids is not None:
        documents = Document.from_ids(band.ids)
        seen["mask"] = All.of(documents, seen["mask"]) if "mask" in seen else documents
    return k[:, :n], v[:, :n], seen


def unmasked(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Without a mask: rows stand at the front of the keys, as an empty static cache has it; a single row sees all."""
    if not causal or q.shape[1] == 1:
        return k, v, {}
    n = q.shape[1]
    return k[:, :n], v[:, :n], {"causal": True}


def written(mask: Tensor, length: int) -> dict[str, Any]:
    """A dense mask, bool or float; a static cache's may be longer than the keys."""
    mask = mask[..., :length]
    return {"mask": mask} if mask.dtype == torch.bool else {"bias": mask}
