"""Transformers' masks as relampago wants them: a window, a padding mask of the keys, documents, in O(N) memory.

Transformers hands a mask function to the interface and asks for a tensor. `mask_for` reads what the function says. What
it can read becomes a `BandMask`: a tensor of the right shape with nothing in it, which knows its band and turns into
the dense mask as soon as anybody computes with it. What it cannot read (unions, custom functions) is made dense.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

# What does not look at the elements; Dynamo and autograd ask for more of it than people do.
PROPERTIES = (
    "shape", "dtype", "device", "ndim", "layout", "is_nested", "requires_grad", "grad", "grad_fn", "is_leaf", "_base",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_mps", "is_xpu",
)  # fmt: skip
READS = {getattr(Tensor, name).__get__ for name in PROPERTIES} | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.__len__, Tensor.stride, Tensor.storage_offset,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_conj, Tensor.is_neg,
    Tensor.is_inference, Tensor.element_size, Tensor._is_view, Tensor.untyped_storage,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Band:
    """What a mask function says, if it can be said so: sides in keys, and which sequence each token belongs to."""

    left: int | None = None
    right: int | None = None
    ids: Tensor | None = None  # (B, L)
    remapped: bool = (
        False  # positions count within sequences: true to the sides only together with ids
    )

    def __and__(self, other: Band) -> Band | None:
        if self.ids is not None and other.ids is not None:
            return None
        return Band(
            _least(self.left, other.left),
            _least(self.right, other.right),
            self.ids if other.ids is None else other.ids,
            self.remapped or other.remapped,
        )


class BandMask(Tensor):
    """A mask (B, 1, Lq, Lk) that has not been written: a band and a padding mask; dense once it is computed with.

    Attributes:
        band: sides, and documents.
        keys: bool (B, Lk), True for a key that is no padding; None if none is.
        visible: how many keys the last row may see, from the front: rows align to the bottom right of those.
    """

    band: Band
    keys: Tensor | None
    visible: int
    _write: Callable[[], Tensor]

    @staticmethod
    def of(
        size: tuple[int, int, int],
        device: Any,
        band: Band,
        keys: Tensor | None,
        visible: int,
        write: Callable[[], Tensor],
    ) -> BandMask:
        """A mask of (B, Lq, Lk); `write` makes it dense."""
        batch, rows, length = size
        shell = torch.empty(1, dtype=torch.bool, device=device).expand(batch, 1, rows, length)
        mask = shell.as_subclass(BandMask)
        mask.band, mask.keys, mask.visible, mask._write = band, keys, visible, write
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in READS:
                return func(*args, **(kwargs or {}))
            args, kwargs = _dense(args), _dense(kwargs or {})
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BandMask({tuple(self.shape)}, {self.band})"

    def dense(self) -> Tensor:
        """The mask as a plain bool tensor."""
        return self._write()


def _dense(value: Any) -> Any:
    if isinstance(value, BandMask):
        return value._write()
    if isinstance(value, tuple | list):
        return type(value)(_dense(item) for item in value)
    if isinstance(value, dict):
        return {name: _dense(item) for name, item in value.items()}
    return value


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask interface: None where `is_causal` says it all, a `BandMask`, or a dense bool mask.

    Args:
        batch_size: B.
        q_length: rows.
        kv_length: keys.
        q_offset: position of the first row.
        kv_offset: position of the first key.
        mask_function: Transformers' own, fn(b, h, q, k) on positions.
        attention_mask: bool (B, positions), False for padding; or None.
        allow_is_causal_skip: whether None may stand for causal.
        allow_is_bidirectional_skip: whether None may stand for everything.
        use_vmap: whether the function is a user's.
        device: where the mask will be.
        kwargs: what other implementations need.

    Returns:
        None, or a mask (B, 1, q_length, kv_length).
    """

    arguments: Any = (
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
    )  # fmt: skip
    rest = {"use_vmap": use_vmap, "device": device, **kwargs}

    def write() -> Tensor:
        found = sdpa_mask(*arguments, allow_is_causal_skip=False, **rest)
        assert found is not None
        return found

    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    band = None if use_vmap or traced or q_length == 1 else band_of(mask_function)
    if band is None or (band.remapped and band.ids is None):
        skips = {"allow_is_bidirectional_skip": allow_is_bidirectional_skip}
        return sdpa_mask(*arguments, allow_is_causal_skip=allow_is_causal_skip, **skips, **rest)
    offset = int(q_offset) - int(kv_offset)
    visible = offset + q_length if band.right == 0 else kv_length
    placed = 0 <= visible <= kv_length and (
        band.right == 0 or (band.left is band.right is None) or offset + q_length == kv_length
    )
    if not placed:
        return write()
    keys = padding_of(attention_mask, kv_length, kv_offset, visible)
    plain = keys is None and band.ids is None and (band.left is None or band.left >= kv_length)
    if plain and band.right == 0 and offset == 0 and allow_is_causal_skip:
        return None  # `attention_forward` takes is_causal so: rows stand at the front of the keys
    if plain and band.right is None and allow_is_bidirectional_skip:
        return None
    return BandMask.of((batch_size, q_length, kv_length), device, band, keys, visible, write)


def padding_of(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int, visible: int
) -> Tensor | None:
    """Which keys are no padding, bool (B, kv_length); None if none of the visible ones is. Waits for the device."""
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    return None if bool(padding[:, :visible].all()) else padding


def band_of(function: Callable[..., Any]) -> Band | None:
    """What one of Transformers' mask functions says; None if it is no intersection of windows and documents."""
    if function is masking_utils.causal_mask_function:
        return Band(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Band()
    maker = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = inspect.getclosurevars(function).nonlocals
    if maker == "and_masks":
        band: Band | None = Band()
        for part in cells["mask_functions"]:
            other = None if band is None else band_of(part)
            band = None if band is None or other is None else band & other
        return band
    if maker == "sliding_window_overlay":
        return Band(left=int(cells["sliding_window"]) - 1)
    if maker == "sliding_window_bidirectional_overlay":
        return Band(left=int(cells["sliding_window"]), right=int(cells["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Band(ids=cells["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        inner = band_of(cells["mask_function"])
        return None if inner is None else inner & Band(remapped=True)
    return None


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
