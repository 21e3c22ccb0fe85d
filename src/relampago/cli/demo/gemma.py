"""Gemma 3 270M in plain torch, its attention a parameter: 18 layers, every sixth full causal, the rest a window of 512.

4 query heads share 1 kv head of dim 256. Sizes from the GGUF; the architecture as in arXiv 2503.19786.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import relampago as rl

DIM, HEAD_DIM, LAYERS, WINDOW, EPS = 640, 256, 18, 512, 1e-6
HEAD_ROWS = 256  # rows of logits at a time: the vocabulary has 262 144 entries

# (q, k, v, window) in (B, L, H, D); a row sees itself and window - 1 keys before it; None is full causal
Attention = Callable[[Tensor, Tensor, Tensor, "int | None"], Tensor]


def relampago(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """By the library."""
    return rl.attention(q, k, v, causal=True, window=None if window is None else (window - 1, 0))


def standard(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """As the formula reads, with the whole N×N matrix."""
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * HEAD_DIM**-0.5
    distance = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


def hidden_states(
    ids: Tensor, state: dict[str, Tensor], attention: Attention, dtype: torch.dtype
) -> Tensor:
    """Token ids (L,) to final hidden states (L, DIM), all in `dtype`."""
    x = state["token_embd.weight"][ids][None].to(dtype) * DIM**0.5
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        w = {
            name[len(prefix) : -len(".weight")]: t.to(dtype)
            for name, t in state.items()
            if name.startswith(prefix)
        }
        x = _block(x, w, attention, full=layer % 6 == 5)
    return _norm(x, state["output_norm.weight"].to(dtype))[0]


def _block(x: Tensor, w: dict[str, Tensor], attention: Attention, *, full: bool) -> Tensor:
    y = _norm(x, w["attn_norm"])
    q, k, v = ((y @ w[f"attn_{n}"].T).unflatten(-1, (-1, HEAD_DIM)) for n in "qkv")
    base = 1e6 if full else 1e4
    q, k = _rotate(_norm(q, w["attn_q_norm"]), base), _rotate(_norm(k, w["attn_k_norm"]), base)
    out = attention(q, k, v, None if full else WINDOW)
    x = x + _norm(out.flatten(2) @ w["attn_output"].T, w["post_attention_norm"])
    y = _norm(x, w["ffn_norm"])
    y = F.gelu(y @ w["ffn_gate"].T, approximate="tanh") * (y @ w["ffn_up"].T)
    return x + _norm(y @ w["ffn_down"].T, w["post_ffw_norm"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight  # GGUF stores 1 + w


def _rotate(x: Tensor, base: float) -> Tensor:
    """RoPE on (B, L, H, D)."""
    exponent = -torch.arange(0, HEAD_DIM, 2, device=x.device, dtype=torch.float64) / HEAD_DIM
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * base**exponent  # [L, D/2]
    cos, sin = (t[:, None].to(x.dtype) for t in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def losses(ids: Tensor, states: Tensor, state: dict[str, Tensor], last: int) -> Tensor:
    """Negative log likelihood of each of the last tokens."""
    head, found = state["token_embd.weight"], []
    for start in range(len(ids) - last, len(ids), HEAD_ROWS):
        end = min(start + HEAD_ROWS, len(ids))
        logits = states[start - 1 : end - 1] @ head.T
        found.append(F.cross_entropy(logits, ids[start:end], reduction="none"))
    return torch.cat(found)


def continuation(
    ids: list[int], state: dict[str, Tensor], attention: Attention, tokens: int
) -> list[int]:
    """The likeliest next tokens, one by one; everything is computed anew for each, the prompt being short."""
    head, ids = state["token_embd.weight"], list(ids)
    start = len(ids)
    for _ in range(tokens):
        known = torch.tensor(ids, device=head.device)
        states = hidden_states(known, state, attention, head.dtype)
        ids.append(int((head @ states[-1]).argmax()))
    return ids[start:]
