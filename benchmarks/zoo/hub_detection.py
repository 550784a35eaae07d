"""Models of transformers that find things in images: boxes and masks, matched to labels by cost."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub


def with_boxes(pixels: int = 64, *, mask: bool = False) -> list[dict[str, Any]]:
    """Images with one to three boxes each."""
    batches = []
    for size, _, stream in made.shapes():
        labels = []
        for image in range(size):
            count = 1 + image % 3
            centres = torch.rand(count, 2, generator=stream) * 0.4 + 0.3
            sizes = torch.rand(count, 2, generator=stream) * 0.2 + 0.1
            kinds = torch.randint(5, (count,), generator=stream)
            labels.append({"class_labels": kinds, "boxes": torch.cat([centres, sizes], -1)})
        images = torch.randn(size, 3, pixels, pixels, generator=stream)
        batch: dict[str, Any] = {"pixel_values": images, "labels": labels}
        if mask:
            batch["pixel_mask"] = torch.ones(size, pixels, pixels, dtype=torch.long)
        batches.append(batch)
    return batches


def with_masks(pixels: int = 64) -> list[dict[str, Any]]:
    """Images with a mask for each of their one to three things."""
    batches = []
    for size, _, stream in made.shapes():
        counts = [1 + image % 3 for image in range(size)]
        batches.append(
            {
                "pixel_values": torch.randn(size, 3, pixels, pixels, generator=stream),
                "mask_labels": [
                    (torch.rand(count, pixels, pixels, generator=stream) > 0.5).float()
                    for count in counts
                ],
                "class_labels": [torch.randint(5, (count,), generator=stream) for count in counts],
            }
        )
    return batches


_NARROW: dict[str, Any] = {
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
}
_RESNET: dict[str, Any] = {f"backbone_config__{name}": value for name, value in _NARROW.items()}
_DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": lambda: _resnet(["stage4"]),
    "num_queries": 6,
    "auxiliary_loss": True,
}
_SWIN: dict[str, Any] = {
    "backbone_config__embed_dim": 8,
    "backbone_config__depths": [1, 1, 1, 1],
    "backbone_config__num_heads": [1, 2, 2, 4],
    "backbone_config__window_size": 4,
    "backbone_config__patch_size": 4,
}
hub("detr", "detr", "DetrForObjectDetection", lambda: with_boxes(mask=True), **_DETR)
hub(
    "conditional-detr",
    "conditional_detr",
    "ConditionalDetrForObjectDetection",
    lambda: with_boxes(mask=True),
    **_DETR,
)
hub("dab-detr", "dab-detr", "DabDetrForObjectDetection", lambda: with_boxes(mask=True), **_DETR)
hub(
    "deformable-detr",
    "deformable_detr",
    "DeformableDetrForObjectDetection",
    lambda: with_boxes(mask=True),
    **{**_DETR, "backbone_config": lambda: _resnet(["stage3", "stage4"])},
    num_feature_levels=2,
)
hub(
    "table-transformer",
    "table-transformer",
    "TableTransformerForObjectDetection",
    lambda: with_boxes(mask=True),
    **_DETR,
)
hub(
    "rt-detr",
    "rt_detr",
    "RTDetrForObjectDetection",
    with_boxes,
    **_RESNET,
    encoder_in_channels=[16, 16, 32],
    feat_strides=[8, 16, 32],
    encoder_hidden_dim=32,
    decoder_in_channels=[32, 32, 32],
    num_queries=6,
    num_denoising=0,
)
hub(
    "yolos",
    "yolos",
    "YolosForObjectDetection",
    with_boxes,
    image_size=[64, 64],
    patch_size=16,
    num_detection_tokens=6,
)
hub(
    "mask2former",
    "mask2former",
    "Mask2FormerForUniversalSegmentation",
    with_masks,
    draws=True,
    **_SWIN,
    feature_size=32,
    mask_feature_size=32,
    hidden_dim=32,
    encoder_feedforward_dim=32,
    dim_feedforward=32,
    num_queries=6,
    train_num_points=32,
)
hub(
    "maskformer",
    "maskformer",
    "MaskFormerForInstanceSegmentation",
    with_masks,
    **_SWIN,
    fpn_feature_size=32,
    mask_feature_size=32,
    decoder_config__num_queries=6,
)


def _resnet(features: list[str]) -> Any:
    import transformers

    return transformers.ResNetConfig(**_NARROW, out_features=features)
