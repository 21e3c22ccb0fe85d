"""vLLM's three classes: what the backend can do, what a step needs, and a layer. Written against vLLM 0.25 to 0.33."""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from relampago.integrations.vllm.layer import Batch, Layer, write
from relampago.quant import E4M3

SHARED = 256  # keys of a common prefix from which on a cascade pays
EIGHTS = ("fp8", "fp8_e4m3")  # vLLM's names of a cache in e4m3, which it keeps as bytes
ADA = (8, 9)  # the first NVIDIA machine that has e4m3
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class RelampagoBackend(AttentionBackend):
    """What vLLM asks before it chooses."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *EIGHTS]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's enumeration."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RelampagoImpl]:
        """The layer."""
        return RelampagoImpl

    @staticmethod
    def get_builder_cls() -> type[RelampagoMetadataBuilder]:
        """What prepares a step."""
        return RelampagoMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any page; multiples of 16 load in whole tiles."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """vLLM up to 0.27 asks: (pages, 2, page, G, D). Later ones lay pages out themselves."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """As the shape; a dimension of layers stands behind the pages."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to 512, whatever the number."""
        return 0 < head_size <= 512

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A scale of keys and values per head."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        """What cannot go together: a cache in e4m3, and a machine that has none."""
        capability = kwargs.get("device_capability") or args[-1]
        if kv_cache_dtype in EIGHTS and (
            tuple(capability) < ADA or current_platform.fp8_dtype() != E4M3
        ):
            return "a KV cache in FP8 needs a machine that has e4m3 (sm89 or newer)"
        return None

    @classmethod
    def supports_sink(cls) -> bool:
        """Learnt sinks (GPT-OSS)."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Tokens that see what follows them, in pages too."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders, and cross attention."""
        return attn_type in (*ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)


@dataclass
class RelampagoMetadata(AttentionMetadata):
    """A step, for all layers of a group."""

    batch: Batch
    slots: Tensor

    @property
    def num_actual_tokens(self) -> int:
        """Rows that count: vLLM's own layers read it."""
        return self.batch.tokens


class RelampagoMetadataBuilder(AttentionMetadataBuilder[RelampagoMetadata]):
    """Prepares a step. Nothing is read from the device, and launches depend on shapes alone: graphs replay."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RelampagoMetadata:
        """The step as relampago's layer reads it; vLLM gives a prefix only where `use_cascade_attention` agreed."""
        common = common_attn_metadata
        batch = Batch(
            cu_seqlens_q=common.query_start_loc,
            lengths=common.seq_lens,
            table=common.block_table_tensor,
            tokens=common.num_actual_tokens,
            longest_q=common.max_query_len,
            causal=bool(common.causal),
            shared=common_prefix_len,
        )
        return RelampagoMetadata(batch, common.slot_mapping)

    def update_block_table(
        self, metadata: RelampagoMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> RelampagoMetadata:
        """The same step of another group of layers."""
        batch = Batch(**{**metadata.batch.__dict__, "table": blk_table})
        return RelampagoMetadata(batch, slot_mapping)

    def use_cascade_attention(self, common_prefix_len: int, *args: Any, **kwargs: Any) -> bool:
        """Whether a common prefix is worth two launches: long enough, and nothing counts distances."""
        distances = ("use_alibi", "use_sliding_window", "use_local_attention")
        names = ("query_lens", "num_query_heads", "num_kv_heads", *distances)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        measured = any(given.get(name) for name in distances)
        several = len(given.get("query_lens", ())) > 1
        return common_prefix_len >= SHARED and several and not measured


class RelampagoImpl(AttentionImpl[RelampagoMetadata]):
    """One layer."""

    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in RelampagoBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"relampago has no KV cache of dtype {kv_cache_dtype!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        window = None
        if sliding_window is not None:
            reach = sliding_window - 1
            window = (reach, reach if attn_type in ENCODERS else 0)
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.layer = Layer(self.scale, window, logits_soft_cap or None, slopes, sinks)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put this step's tokens into pages; vLLM calls it before `forward`, and not for layers that share a cache."""
        if self.attn_type not in ENCODERS:
            write(key, value, *self.pages(kv_cache), slot_mapping, *self.scales(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RelampagoMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """A step of this layer: query (T, H, D) to output (T, H, D)."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("relampago does not quantise its output")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        self._settle(query.device)
        batch = attn_metadata.batch
        if self.attn_type in ENCODERS:
            found = self.layer.attend_unpaged(query, key, value, batch)
        else:
            found = self.layer.attend(query, *self.pages(kv_cache), batch, *self.scales(layer))
        output[: batch.tokens].copy_(found.view_as(output[: batch.tokens]))
        return output

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as (pages, page, G, D): one behind the other (to 0.27), or side by side in the last dim."""
        if self.kv_cache_dtype in EIGHTS:
            kv_cache = kv_cache.view(E4M3)
        if kv_cache.ndim == 5:
            k, v = kv_cache.unbind(1)
            return k, v
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., : self.head_size], by_token[..., self.head_size :]

    def scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """What keys and values in e4m3 are multiplied by, (G,): vLLM's layer has one number, or one per head."""
        if self.kv_cache_dtype not in EIGHTS:
            return None, None
        k, v = (scale.reshape(-1).expand(self.num_kv_heads) for scale in (layer._k_scale, layer._v_scale))  # fmt: skip
        return k, v

    def _settle(self, device: torch.device) -> None:
        """ALiBi's slopes move to the device once."""
        slopes = self.layer.options["alibi_slopes"]
        if slopes is not None and slopes.device != device:
            self.layer.options["alibi_slopes"] = self.layer.alibi_slopes = slopes.to(device)
