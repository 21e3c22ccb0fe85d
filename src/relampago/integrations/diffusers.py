"""diffusers: importing this registers the attention backend "relampago".

    import relampago.integrations.diffusers
    pipe.transformer.set_attention_backend("relampago")

Models of the older kind (UNets), which call PyTorch's function themselves, run under `relampago.integrations.sdpa`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from relampago.errors import Unsupported
from relampago.integrations.sdpa import scaled_dot_product_attention

NAME = "relampago"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """PyTorch's semantics in diffusers' layout.

    Args:
        query: (B, L, H, D).
        key: (B, S, G, D).
        value: (B, S, G, E).
        attn_mask: bool or float, broadcasts to (B, H, L, S).
        dropout_p: probability of dropping a weight.
        is_causal: aligned to the top left.
        scale: D ** -0.5 if None.
        enable_gqa: H may be a multiple of G.
        return_lse: refused if True.
        _parallel_config: diffusers' context parallelism, refused.

    Returns:
        (B, L, H, E).

    Raises:
        Unsupported: context parallelism is on, or LSE is asked for.
    """
    if _parallel_config is not None or return_lse:
        raise Unsupported("diffusers' context parallelism: use one of its own backends")
    out = scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, dropout_p, is_causal, scale,
        enable_gqa,
    )  # fmt: skip
    return out.transpose(1, 2)


def _member() -> Any:
    """The name as a member of diffusers' enumeration, which has no method to add one."""
    if NAME in AttentionBackendName._value2member_map_:
        return AttentionBackendName(NAME)
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    AttentionBackendName._member_names_.append(member._name_)
    return member


_AttentionBackendRegistry.register(_member())(attention)
