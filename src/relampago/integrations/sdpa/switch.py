"""The switch: `F.scaled_dot_product_attention` becomes relampago's, for a block of code or for the whole process.

The attribute of `torch.nn.functional` is exchanged, so whoever looks it up there finds relampago's: nn.Transformer,
Transformers, diffusers, and torch.compile, which traces into it. Code that took the function itself earlier keeps it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from torch.nn import functional

from relampago.integrations.sdpa.function import covers, scaled_dot_product_attention

TORCHS = functional.scaled_dot_product_attention
_lock = threading.Lock()
_depth = 0


@functools.wraps(scaled_dot_product_attention)
def _routed(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any):
    if covers(query, key, value, attn_mask):
        return scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    return TORCHS(query, key, value, attn_mask, *args, **kwargs)


def enable() -> None:
    """From here on, the whole process uses relampago where it calls `F.scaled_dot_product_attention`.

    Tensor subclasses with rules of their own (DTensor) keep PyTorch's. Compiled code guards on the function it was
    traced with, and is compiled anew.

    Example:
        >>> from relampago.integrations import sdpa
        >>> sdpa.enable()
    """
    _shift(1)


def disable() -> None:
    """Undo one `enable`."""
    _shift(-1)


def enabled() -> bool:
    """Whether `F.scaled_dot_product_attention` is relampago's."""
    return functional.scaled_dot_product_attention is _routed


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """Inside, `F.scaled_dot_product_attention` is relampago's, in all threads.

    Example:
        >>> from relampago.integrations import sdpa
        >>> with sdpa.routed():
        ...     layer = torch.nn.TransformerEncoderLayer(16, 2)
    """
    enable()
    try:
        yield
    finally:
        disable()


def _shift(step: int) -> None:
    global _depth
    with _lock:
        before, _depth = _depth > 0, max(0, _depth + step)
        if before == (_depth > 0):
            return
        chosen = _routed if _depth else TORCHS
        functional.scaled_dot_product_attention = chosen  # type: ignore[assignment]
