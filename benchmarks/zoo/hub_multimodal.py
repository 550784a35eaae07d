"""Language models of transformers that look at images or listen, given in place of tokens."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub

#: Tokens that stand for images; texts have others.
IMAGE, VIDEO, START = 4, 3, 2


def with_images(tokens: int, pixels: int = 16, *, at: int = 1) -> list[dict[str, Any]]:
    """Texts, each with the tokens of an image near its beginning."""
    batches = []
    for batch, (size, length, stream) in zip(made.texts(), made.shapes(), strict=True):
        batch["input_ids"][:, at : at + tokens] = IMAGE
        batch["labels"][:, at : at + tokens] = -100
        del length
        batch["pixel_values"] = torch.randn(size, 3, pixels, pixels, generator=stream)
        batches.append(batch)
    return batches


def with_patches(grid: int, width: int) -> list[dict[str, Any]]:
    """Texts with an image each, whose patches lie one behind the other for the whole batch."""
    batches = []
    for batch, (size, _, stream) in zip(made.texts(), made.shapes(), strict=True):
        tokens = grid * grid // 4
        batch["input_ids"][:, 1] = START
        batch["input_ids"][:, 2 : 2 + tokens] = IMAGE
        batch["labels"][:, 1 : 2 + tokens] = -100
        batch["pixel_values"] = torch.randn(size * grid * grid, width, generator=stream)
        batch["image_grid_thw"] = torch.tensor([[1, grid, grid]]).repeat(size, 1)
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
        batches.append(batch)
    return batches


def _of_several_images() -> list[dict[str, Any]]:
    batches = with_images(4)
    for batch in batches:
        batch["pixel_values"] = batch["pixel_values"][:, None]
    return batches


_CLIP: dict[str, Any] = {
    "image_token_index": IMAGE,
    "image_token_id": IMAGE,
    "vision_config__image_size": 16,
    "vision_config__patch_size": 8,
    "vision_feature_layer": -2,
}
_QWEN: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_config__depth": 2,
    "vision_config__num_heads": 4,
    "vision_config__patch_size": 4,
    "text_config__rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    },
}
hub("llava", "llava", "LlavaForConditionalGeneration", lambda: with_images(4), **_CLIP)
hub(
    "vipllava",
    "vipllava",
    "VipLlavaForConditionalGeneration",
    lambda: with_images(4),
    **{**_CLIP, "vision_feature_layers": [-2, -3]},
)
hub(
    "paligemma",
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    lambda: _with_kinds(),
    **{
        **_CLIP,
        "vision_config__vision_use_head": False,
        "projection_dim": 32,
        "vision_config__projection_dim": 32,
    },
)
hub(
    "qwen2-vl",
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    lambda: with_patches(4, 3 * 2 * 4 * 4),
    **_QWEN,
    vision_config__embed_dim=32,
    vision_config__hidden_size=32,
)
hub(
    "qwen2-5-vl",
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    lambda: with_patches(4, 3 * 2 * 4 * 4),
    **_QWEN,
    vision_config__out_hidden_size=32,
    vision_config__window_size=16,
    vision_config__fullatt_block_indexes=[1],
)
hub(
    "qwen3-vl",
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    lambda: with_patches(4, 3 * 2 * 4 * 4),
    **_QWEN,
    vision_config__out_hidden_size=32,
    vision_config__deepstack_visual_indexes=[0],
    vision_config__num_position_embeddings=16,
)
hub(
    "gemma3-vl",
    "gemma3",
    "Gemma3ForConditionalGeneration",
    lambda: _with_kinds(),
    **_CLIP,
    mm_tokens_per_image=4,
)
hub(
    "internvl",
    "internvl",
    "InternVLForConditionalGeneration",
    lambda: with_images(1),
    **{
        **_CLIP,
        "vision_feature_layer": -1,
        "vision_config__image_size": [16, 16],
        "vision_config__patch_size": [8, 8],
    },
)
hub(
    "idefics3",
    "idefics3",
    "Idefics3ForConditionalGeneration",
    _of_several_images,
    **_CLIP,
    scale_factor=1,
)
hub("fuyu", "fuyu", "FuyuForCausalLM", made.texts)
hub(
    "aya-vision",
    "aya_vision",
    "AyaVisionForConditionalGeneration",
    lambda: with_images(1),
    **_CLIP,
    downsample_factor=2,
    adapter_layer_norm_eps=1e-6,
)
hub(
    "mistral3",
    "mistral3",
    "Mistral3ForConditionalGeneration",
    lambda: _sized(),
    **{**_CLIP, "vision_feature_layer": -1},
    spatial_merge_size=1,
)
hub(
    "blip-2",
    "blip-2",
    "Blip2ForConditionalGeneration",
    lambda: with_images(4),
    **_CLIP,
    num_query_tokens=4,
    qformer_config__encoder_hidden_size=32,
)
hub(
    "kosmos-2",
    "kosmos-2",
    "Kosmos2ForConditionalGeneration",
    lambda: _where_images_are(),
    latent_query_num=4,
    text_config__layers=2,
    text_config__attention_heads=4,
)
hub("trocr", "trocr", "TrOCRForCausalLM", made.texts)


def _with_kinds() -> list[dict[str, Any]]:
    batches = with_images(4)
    for batch in batches:
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batches


def _sized() -> list[dict[str, Any]]:
    batches = with_images(4)
    for batch in batches:
        batch["image_sizes"] = torch.tensor([[16, 16]]).repeat(len(batch["input_ids"]), 1)
    return batches


def _where_images_are() -> list[dict[str, Any]]:
    batches = with_images(4, pixels=32)
    for batch in batches:
        batch["image_embeds_position_mask"] = (batch["input_ids"] == IMAGE).long()
    return batches
