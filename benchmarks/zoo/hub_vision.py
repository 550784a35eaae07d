"""Models of transformers that look at images: classes, pixels, reconstructions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub

_pixels = partial(made.images, labels="pixels")
_alone = partial(made.images, labels="")


def with_noise(patches: int) -> list[dict[str, Any]]:
    """Images without labels; what chooses the patches that are hidden comes with them."""
    batches = made.images(labels="")
    for (size, _, stream), batch in zip(made.shapes(), batches, strict=True):
        batch["noise"] = torch.rand(size, patches, generator=stream)
    return batches


def hidden_patches(patches: int) -> list[dict[str, Any]]:
    """Images and which patches of each are hidden."""
    batches = made.images(labels="")
    for (size, _, stream), batch in zip(made.shapes(), batches, strict=True):
        batch["bool_masked_pos"] = torch.rand(size, patches, generator=stream) < 0.5
    return batches


def videos() -> list[dict[str, Any]]:
    """Four frames each, with a class."""
    return [
        {
            "pixel_values": torch.randn(size, 4, 3, 16, 16, generator=stream),
            "labels": torch.randint(5, (size,), generator=stream),
        }
        for size, _, stream in made.shapes()
    ]


_PYRAMID: dict[str, Any] = {
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 2, 1],
    "num_attention_heads": [1, 2, 2, 4],
}
_SHALLOW: dict[str, Any] = {**_PYRAMID, "depths": [1, 1, 1, 1]}
hub("vit", "vit", "ViTForImageClassification", made.images)
hub("deit", "deit", "DeiTForImageClassification", made.images)
hub("beit", "beit", "BeitForImageClassification", made.images)
hub(
    "beit-masked", "beit", "BeitForMaskedImageModeling", lambda: _beit_masked(), use_mask_token=True
)
hub("vit-masked", "vit", "ViTForMaskedImageModeling", lambda: hidden_patches(16), encoder_stride=8)
hub(
    "vit-mae",
    "vit_mae",
    "ViTMAEForPreTraining",
    lambda: with_noise(16),
    decoder_hidden_size=32,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=4,
    decoder_intermediate_size=64,
)
hub("vit-msn", "vit_msn", "ViTMSNForImageClassification", made.images)
hub("dinov2", "dinov2", "Dinov2ForImageClassification", made.images)
hub("data2vec-vision", "data2vec-vision", "Data2VecVisionForImageClassification", made.images)
hub(
    "convnext",
    "convnext",
    "ConvNextForImageClassification",
    made.images,
    patch_size=4,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 3, 1],
)
hub(
    "convnextv2",
    "convnextv2",
    "ConvNextV2ForImageClassification",
    made.images,
    patch_size=4,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 3, 1],
)
hub(
    "resnet",
    "resnet",
    "ResNetForImageClassification",
    made.images,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 2, 2, 1],
)
hub(
    "regnet",
    "regnet",
    "RegNetForImageClassification",
    made.images,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 2, 2, 1],
    groups_width=4,
)
hub(
    "bit",
    "bit",
    "BitForImageClassification",
    made.images,
    embedding_size=32,
    num_groups=4,
    hidden_sizes=[32, 32, 64, 64],
    depths=[1, 1, 1, 1],
)
hub(
    "swin",
    "swin",
    "SwinForImageClassification",
    made.images,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=4,
)
hub(
    "swinv2",
    "swinv2",
    "Swinv2ForImageClassification",
    made.images,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=4,
)
hub(
    "cvt",
    "cvt",
    "CvtForImageClassification",
    made.images,
    embed_dim=[8, 16, 32],
    depth=[1, 2, 3],
    num_heads=[1, 2, 4],
    patch_sizes=[7, 3, 3],
    drop_path_rate=[0.0] * 3,
    drop_rate=[0.0] * 3,
    attention_drop_rate=[0.0] * 3,
)
hub("pvt", "pvt", "PvtForImageClassification", made.images, **_SHALLOW)
hub(
    "poolformer",
    "poolformer",
    "PoolFormerForImageClassification",
    made.images,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 2, 1],
)
hub(
    "mobilenet-v2",
    "mobilenet_v2",
    "MobileNetV2ForImageClassification",
    made.images,
    depth_multiplier=0.25,
)
hub(
    "mobilevit",
    "mobilevit",
    "MobileViTForImageClassification",
    made.images,
    hidden_sizes=[16, 24, 32],
    neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    image_size=32,
    patch_size=2,
)
hub(
    "efficientnet",
    "efficientnet",
    "EfficientNetForImageClassification",
    made.images,
    width_coefficient=0.25,
    depth_coefficient=0.5,
    hidden_dim=320,
)
hub(
    "levit",
    "levit",
    "LevitForImageClassification",
    lambda: made.images(64),
    image_size=64,
    patch_size=16,
    hidden_sizes=[16, 32, 48],
    depths=[1, 1, 1],
    key_dim=[4, 4, 4],
    num_attention_heads=[2, 4, 6],
)
hub(
    "focalnet",
    "focalnet",
    "FocalNetForImageClassification",
    made.images,
    patch_size=4,
    embed_dim=8,
    hidden_sizes=[8, 16],
    depths=[2, 2],
    focal_levels=[1, 1],
    focal_windows=[3, 3],
    stage_names=["stem", "stage1", "stage2"],
)
hub(
    "hiera",
    "hiera",
    "HieraForImageClassification",
    made.images,
    embed_dim=8,
    image_size=[32, 32],
    patch_size=[3, 3],
    patch_stride=[2, 2],
    patch_padding=[1, 1],
    depths=[1, 1, 2],
    num_heads=[1, 2, 4],
    masked_unit_size=[4, 4],
    query_stride=[2, 2],
    num_query_pool=2,
    masked_unit_attention=[True, True, False],
)
hub(
    "imagegpt",
    "imagegpt",
    "ImageGPTForCausalImageModeling",
    lambda: made.texts(padded=False),
    vocab_size=97,
)
hub(
    "perceiver-images",
    "perceiver",
    "PerceiverForImageClassificationLearned",
    lambda: _for_perceiver(),
    num_latents=8,
    d_latents=32,
    image_size=32,
)
hub(
    "segformer",
    "segformer",
    "SegformerForSemanticSegmentation",
    _pixels,
    **_PYRAMID,
    decoder_hidden_size=16,
)
hub(
    "upernet",
    "upernet",
    "UperNetForSemanticSegmentation",
    _pixels,
    hidden_size=16,
    auxiliary_in_channels=16,
    auxiliary_channels=8,
    backbone_config__hidden_sizes=[8, 16, 16, 32],
    backbone_config__depths=[1, 1, 1, 1],
)
hub(
    "dpt",
    "dpt",
    "DPTForSemanticSegmentation",
    lambda: made.images(64, labels="pixels"),
    image_size=64,
    patch_size=16,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 8, 16, 16],
    fusion_hidden_size=16,
)
hub("videomae", "videomae", "VideoMAEForVideoClassification", videos, image_size=16, num_frames=4)
hub(
    "timesformer",
    "timesformer",
    "TimesformerForVideoClassification",
    videos,
    image_size=16,
    num_frames=4,
)
hub(
    "vivit",
    "vivit",
    "VivitForVideoClassification",
    videos,
    image_size=16,
    num_frames=4,
    tubelet_size=[2, 8, 8],
)


def _beit_masked() -> list[dict[str, Any]]:
    batches = hidden_patches(16)
    for (size, _, stream), batch in zip(made.shapes(), batches, strict=True):
        batch["labels"] = torch.randint(96, (size, 16), generator=stream)[batch["bool_masked_pos"]]
    return batches


def _for_perceiver() -> list[dict[str, Any]]:
    return [{"inputs": one["pixel_values"], "labels": one["labels"]} for one in made.images(32)]
