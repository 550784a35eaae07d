"""Models of diffusers: denoisers, autoencoders, adapters that steer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo import batches as made
from benchmarks.zoo.entries import enter

Loss = Callable[[nn.Module, Any], Tensor]


def noisy(channels: int = 4, pixels: int = 16, width: int = 16) -> list[dict[str, Any]]:
    """Images with noise of a strength each, what the noise was, and a text or a class to go by."""
    batches = []
    for size, length, stream in made.shapes():
        shape = size, channels, pixels, pixels
        batches.append(
            {
                "sample": torch.randn(shape, generator=stream),
                "noise": torch.randn(shape, generator=stream),
                "timestep": torch.randint(1000, (size,), generator=stream),
                "text": torch.randn(size, length // 4, width, generator=stream),
                "pooled": torch.randn(size, width, generator=stream),
                "kind": torch.randint(5, (size,), generator=stream),
                "condition": torch.rand(size, 3, pixels * 2, pixels * 2, generator=stream),
            }
        )
    return batches


def _of_images(model: Any, batch: Any) -> Tensor:
    out = model(batch["sample"], batch["timestep"]).sample
    return F.mse_loss(out, batch["noise"])


def _of_classes(model: Any, batch: Any) -> Tensor:
    out = model(batch["sample"], batch["timestep"], class_labels=batch["kind"]).sample
    return F.mse_loss(out[:, : batch["noise"].shape[1]], batch["noise"])


def _by_text(model: Any, batch: Any) -> Tensor:
    out = model(batch["sample"], batch["timestep"], encoder_hidden_states=batch["text"]).sample
    return F.mse_loss(out, batch["noise"])


def _by_signal(model: Any, batch: Any) -> Tensor:
    """As latent diffusion is trained with weights by the signal beside the noise."""
    out = model(batch["sample"], batch["timestep"], encoder_hidden_states=batch["text"]).sample
    signal = 1 - batch["timestep"].float() / 1000
    off = F.mse_loss(out, batch["noise"], reduction="none").mean(dim=[1, 2, 3])
    weighed: Tensor = (off * signal.clamp(max=0.5)).mean()
    return weighed


def _by_both(model: Any, batch: Any) -> Tensor:
    out = model(
        batch["sample"],
        timestep=batch["timestep"],
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
    ).sample
    return F.mse_loss(out, batch["noise"])


def _of_texts(model: Any, batch: Any) -> Tensor:
    out = model(
        batch["sample"],
        timestep=batch["timestep"],
        encoder_hidden_states=batch["text"],
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return F.mse_loss(out[:, : batch["noise"].shape[1]], batch["noise"])


def _steered(model: Any, batch: Any) -> Tensor:
    down, middle = model(
        batch["sample"],
        batch["timestep"],
        encoder_hidden_states=batch["text"],
        controlnet_cond=batch["condition"],
        return_dict=False,
    )
    return torch.stack([(one - 0.1).square().mean() for one in (*down, middle)]).sum()


def _reconstructed(model: Any, batch: Any) -> Tensor:
    """Summed over all pixels, as autoencoders are trained, with the divergence of their latents."""
    posterior = model.encode(batch["sample"]).latent_dist
    made_again = model.decode(posterior.mode()).sample
    off = F.mse_loss(made_again, batch["sample"], reduction="sum")
    summed: Tensor = off + 1e-3 * posterior.kl().sum()
    return summed / len(batch["sample"])


def _quantized(model: Any, batch: Any) -> Tensor:
    latents = model.encode(batch["sample"]).latents
    out = model.decode(latents)
    codes: Tensor = out.commit_loss.mean()
    return F.l1_loss(out.sample, batch["sample"]) + codes


def _decoded(model: Any, batch: Any) -> Tensor:
    return F.l1_loss(model(batch["sample"]).sample, batch["sample"])


def diffusers(
    name: str, kind: str, loss: Loss, *, channels: int = 4, pixels: int = 16, **settings: Any
) -> None:
    """Enter a model of diffusers."""

    def make() -> Training:
        import diffusers as library

        model = getattr(library, kind)(**settings)
        steps = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = noisy(channels, pixels)
        return Training(model=model, loss=loss, optimizer=steps, batches=batches)

    enter(name, "diffusers", make)


_BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
_UNET: dict[str, Any] = {
    **_BLOCKS,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "sample_size": 16,
}
_CODER: dict[str, Any] = {
    **_BLOCKS,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
diffusers(
    "unet",
    "UNet2DModel",
    _of_images,
    **_BLOCKS,
    in_channels=4,
    out_channels=4,
    sample_size=16,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)
diffusers("unet-by-text", "UNet2DConditionModel", _by_text, **_UNET)
diffusers("unet-by-signal", "UNet2DConditionModel", _by_signal, **_UNET)
diffusers(
    "controlnet",
    "ControlNetModel",
    _steered,
    **{
        name: value
        for name, value in _UNET.items()
        if name not in ("up_block_types", "sample_size")
    },
    conditioning_embedding_out_channels=(8, 8),
)
_DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 3,
    "sample_size": 16,
    "patch_size": 4,
}
diffusers(
    "dit", "DiTTransformer2DModel", _of_classes, **_DIT, norm_num_groups=4, num_embeds_ada_norm=1000
)
diffusers(
    "pixart",
    "PixArtTransformer2DModel",
    _of_texts,
    **_DIT,
    cross_attention_dim=16,
    caption_channels=16,
    use_additional_conditions=False,
)
diffusers(
    "sd3",
    "SD3Transformer2DModel",
    _by_both,
    **_DIT,
    joint_attention_dim=16,
    caption_projection_dim=16,
    pooled_projection_dim=16,
    out_channels=4,
    pos_embed_max_size=8,
)
diffusers("kl-autoencoder", "AutoencoderKL", _reconstructed, **_CODER)
diffusers(
    "tiny-autoencoder",
    "AutoencoderTiny",
    _decoded,
    in_channels=4,
    out_channels=4,
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    num_encoder_blocks=(1, 2),
    num_decoder_blocks=(2, 1),
)
diffusers("vq-model", "VQModel", _quantized, **_CODER, num_vq_embeddings=16)
diffusers(
    "prior",
    "PriorTransformer",
    lambda model, batch: _prior(model, batch),
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=3,
    embedding_dim=16,
    num_embeddings=6,
    additional_embeddings=4,
)


def _prior(model: Any, batch: Any) -> Tensor:
    out = model(
        batch["pooled"],
        timestep=batch["timestep"],
        proj_embedding=batch["pooled"].flip(-1),
        encoder_hidden_states=F.pad(batch["text"], (0, 0, 0, 6 - batch["text"].shape[1])),
    ).predicted_image_embedding
    return F.mse_loss(out, batch["pooled"].roll(1, -1))
