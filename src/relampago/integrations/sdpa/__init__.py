"""relampago behind PyTorch's `scaled_dot_product_attention`.

from relampago.integrations import sdpa

sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)   # the function itself
with sdpa.routed(): ...                                      # F.scaled_dot_product_attention, inside
sdpa.enable()                                                # from here on, in the whole process
sdpa.register()                                              # CUDA: torch's own dispatcher may call it
"""

from relampago.integrations.sdpa.function import scaled_dot_product_attention
from relampago.integrations.sdpa.registry import activate, register
from relampago.integrations.sdpa.switch import disable, enable, enabled, routed

__all__ = [
    "activate",
    "disable",
    "enable",
    "enabled",
    "register",
    "routed",
    "scaled_dot_product_attention",
]
