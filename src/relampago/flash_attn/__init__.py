"""flash-attn's names: `from relampago.flash_attn import flash_attn_func` where it said `from flash_attn import …`.

Signatures, defaults and returns are those of flash-attn 2.8; what FlashAttention-3 adds follows as keywords. Any
device, dtype and head dim that relampago knows will do, any page size, and dropout together with softcap. What
differs: docs/switching.md.
"""

from relampago.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from relampago.flash_attn.install import install, uninstall
from relampago.flash_attn.kvcache import flash_attn_with_kvcache
from relampago.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from relampago.integrations.refusals import Refused

__all__ = [
    "Refused",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
