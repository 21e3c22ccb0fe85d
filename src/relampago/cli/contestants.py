"""Who takes part in a benchmark: relampago's backends, and torch's SDPA asked for the same thing.

SDPA's counterpart of a case: `enable_gqa` where kv heads are shared, a boolean mask made beforehand for a window, a
padded batch made beforehand for packed sequences. What SDPA cannot say has no counterpart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import relampago as rl
from relampago.cases import Case, find
from relampago.cli.explain import torch_dtype

SDPA = "sdpa"
LARGEST_MASK = (
    2**29
)  # bytes of a boolean mask; beyond, SDPA does full causal work instead, and says so
_PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_PLAIN = {"causal", "window", "scale", *_PACKING}

Results = tuple[Tensor, ...]


class Contestant(NamedTuple):
    """One way to compute a case.

    Args:
        name: of the backend, or "sdpa".
        note: how it differs from what is asked; empty if it does not.
        call: what is timed: returns (out,) or (out, dq, dk, dv).
        unpad: turns each result into relampago's layout, (B, L, H, D) or (total, H, D).
        exact: whether the results are those asked for.
    """

    name: str
    note: str
    call: Callable[[], Results]
    unpad: Callable[[Tensor], Tensor] = lambda t: t
    exact: bool = True


def gradient(tensors: Results, direction: str) -> Tensor | None:
    """The gradient of the output for a race of "both" directions, fixed; None for "forward"."""
    if direction == "forward":
        return None
    q, _, v = tensors
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q)


def contestant(
    name: str, case: Case, tensors: Results, options: dict[str, Any], dout: Tensor | None = None
) -> Contestant | None:
    """By name; None where SDPA cannot say what the case asks.

    Args:
        name: a backend, or "sdpa".
        case: the case.
        tensors: q, k and v, as `case.make` gives them.
        options: likewise.
        dout: gradient of the output, shaped as relampago's; None for the forward only.
    """
    if name == SDPA:
        return _sdpa(case, tensors, options, dout)
    attend = rl.attention_varlen if case.packed else rl.attention
    forward = functools.partial(attend, **options, backend=name)
    return Contestant(name, "", _timed(forward, tensors, dout))


def _timed(
    forward: Callable[..., Tensor], tensors: Results, dout: Tensor | None
) -> Callable[[], Results]:
    """A call without arguments: forward only, or with all gradients."""
    if dout is None:

        def once() -> Results:
            with torch.no_grad():
                return (forward(*tensors),)

        return once
    leaves = [t.detach().requires_grad_() for t in tensors]

    def both() -> Results:
        out = forward(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return both


def _sdpa(
    case: Case, tensors: Results, options: dict[str, Any], dout: Tensor | None
) -> Contestant | None:
    if set(options) - _PLAIN:
        return None
    if case.packed:
        return _padded(case, tensors, options, dout)
    q, k, _ = tensors
    len_q, len_k = q.shape[1], k.shape[1]
    causal, window = options.get("causal", False), options.get("window")
    note, exact, mask = "", True, None
    if window is not None or (causal and 1 < len_q != len_k):
        if len_q * len_k <= LARGEST_MASK:
            mask = band(len_q, len_k, causal, window or (None, None), q.device)
            note, causal = "bool mask", False
        else:
            note, exact = "full causal", False
    asked = {"is_causal": causal and len_q > 1, "attn_mask": mask, "scale": options.get("scale")}
    return Contestant(SDPA, note, _timed(_torch(asked), tensors, dout), exact=exact)


def _torch(asked: dict[str, Any]) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = q.shape[2] != k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, **asked, enable_gqa=shared)
        return out.transpose(1, 2)

    return forward


def band(
    len_q: int, len_k: int, causal: bool, window: tuple[int | None, int | None], device: Any
) -> Tensor:
    """True where a row may see a key, aligned bottom right."""
    left, right = window
    right = 0 if causal else right
    distance = (
        torch.arange(len_k, device=device)[None] - torch.arange(len_q, device=device)[:, None]
    )
    distance -= len_k - len_q
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _padded(
    case: Case, tensors: Results, options: dict[str, Any], dout: Tensor | None
) -> Contestant | None:
    """Packed sequences as a padded batch. Padding keys come last: causal rows that count never see them."""
    lengths = case.len_q
    if case.len_q != case.len_k or not isinstance(lengths, tuple) or options.get("window"):
        return None

    def pad(t: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(t.split(lengths)), batch_first=True)

    padded = tuple(pad(t) for t in tensors)
    causal = options.get("causal", False)
    mask = None
    if not causal:
        counts = torch.tensor(lengths, device=tensors[0].device)
        mask = (torch.arange(max(lengths), device=counts.device) < counts[:, None])[:, None, None]
    asked = {"is_causal": causal, "attn_mask": mask, "scale": options.get("scale")}
    return Contestant(
        SDPA,
        "padded batch",
        _timed(_torch(asked), padded, None if dout is None else pad(dout)),
        lambda t: torch.cat([row[:n] for row, n in zip(t, lengths, strict=True)]),
    )


def for_memory(
    case: str, name: str, dtype: str, direction: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A small call and the one to measure, on the CPU, for `memory.on_cpu`."""
    whole = find(case)
    if whole.packed:
        small = dataclasses.replace(whole, len_q=(16, 32), len_k=(16, 32))
    else:
        assert isinstance(whole.len_q, int)
        assert isinstance(whole.len_k, int)
        small = dataclasses.replace(
            whole, batch=1, len_q=min(whole.len_q, 128), len_k=min(whole.len_k, 128)
        )
    calls = []
    for one in (small, whole):
        tensors, options = one.make(torch_dtype(dtype))
        entrant = contestant(name, one, tensors, options, gradient(tensors, direction))
        if entrant is None:
            raise rl.Unsupported(f"{name} has no counterpart of {case}")
        calls.append(entrant.call)
    return calls[0], calls[1]
