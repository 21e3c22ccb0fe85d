"""The diffusers backend: a tiny random Flux pipeline paints the same image."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

import relampago as rl
from relampago.integrations import diffusers as integration
from relampago.integrations import sdpa


def pipeline():
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(4,), latent_channels=1, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5,
    )  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=transformer.eval(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    words = torch.randn(1, 6, 32, generator=g)
    out = pipe(
        prompt_embeds=words, pooled_prompt_embeds=words[:, 0], height=16, width=16, num_inference_steps=3,
        generator=g, output_type="pt",
    )  # fmt: skip
    return (out.images * 255).round().to(torch.uint8)


def test_the_same_image() -> None:
    pipe = pipeline()
    want = image(pipe)
    assert want.unique().numel() > 20
    calls = []
    seen = integration.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return seen(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "scaled_dot_product_attention", counted)
        pipe.transformer.set_attention_backend("relampago")
        assert torch.equal(image(pipe), want)
    assert len(calls) == 3 * 2
    pipe.transformer.reset_attention_backend()
    with sdpa.routed():
        assert torch.equal(image(pipe), want)


def test_layout_and_refusals() -> None:
    q = torch.randn(1, 5, 2, 8)
    mask = torch.rand(5, 5) > 0.3
    got = integration.attention(q, q, q, mask)
    torch.testing.assert_close(got, rl.attention(q, q, q, mask=mask))
    with pytest.raises(rl.Unsupported, match="context parallelism"):
        integration.attention(q, q, q, return_lse=True)
