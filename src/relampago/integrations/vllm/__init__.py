"""vLLM: an attention backend outside its tree. With relampago installed, `vllm serve … --attention-backend CUSTOM`.

vLLM calls `register` through its plugin entry point (`vllm.general_plugins`, in pyproject.toml), in every process.
Paged keys, prompts, chunked prompts and single tokens in one batch, shared prefixes by cascade, windows, softcap,
ALiBi, sinks, encoders and cross attention. The KV cache is fp16, bf16, fp32, or e4m3 (`--kv-cache-dtype fp8`).
"""

from __future__ import annotations

BACKEND = "relampago.integrations.vllm.backend.RelampagoBackend"


def register() -> None:
    """Stand behind vLLM's name CUSTOM, unless another plugin does already. Nothing else of vLLM changes."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
