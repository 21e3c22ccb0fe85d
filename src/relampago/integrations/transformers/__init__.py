"""Hugging Face Transformers: importing this registers `attn_implementation="relampago"`, attention and masks.

    import relampago.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="relampago")
    model.set_attn_implementation("relampago")      # or at run time

Continuous batching (`generate_batch`) takes no names but Transformers' own: there, use `relampago.flash_attn.install()`
and `attn_implementation="flash_attention_2"`, which runs on the same kernels, block tables included.
"""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from relampago.integrations.transformers.attention import attention_forward
from relampago.integrations.transformers.masks import BandMask, mask_for

NAME = "relampago"

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_for)

__all__ = ["NAME", "BandMask", "attention_forward", "mask_for"]
