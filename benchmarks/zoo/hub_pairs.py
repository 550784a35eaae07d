"""Models of transformers that compare images, texts and sounds with each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub


def captioned(pixels: int = 32, *, padded: bool = True) -> list[dict[str, Any]]:
    """Images with a text each, which are to be found by each other."""
    pairs = zip(made.texts("", padded=padded), made.images(pixels, labels=""), strict=True)
    return [{**text, **image, "return_loss": True} for text, image in pairs]


def ended(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The texts end with a token that says so."""
    for batch in batches:
        batch["input_ids"][:, -1] = 2
    return batches


def _described(*, padded: bool = True) -> list[dict[str, Any]]:
    return ended(captioned(padded=padded))


def profiles() -> list[dict[str, Any]]:
    """Sounds with a text each."""
    batches = []
    for text, (size, _, stream) in zip(made.texts(""), made.shapes(), strict=True):
        spectrum = torch.randn(size, 1, 64, 16, generator=stream)
        batches.append({**text, "input_features": spectrum, "return_loss": True})
    return batches


def asked() -> list[dict[str, Any]]:
    """Images, questions about them, and how likely each answer is."""
    batches = []
    for batch, (size, _, stream) in zip(captioned(), made.shapes(), strict=True):
        del batch["return_loss"]
        batch["labels"] = torch.rand(size, 5, generator=stream)
        batches.append(batch)
    return batches


def regions() -> list[dict[str, Any]]:
    """Texts about regions of an image, each given by its features."""
    batches = []
    for batch, (size, _, stream) in zip(made.texts("class", classes=5), made.shapes(), strict=True):
        batch["visual_embeds"] = torch.randn(size, 4, 16, generator=stream)
        batch["visual_attention_mask"] = torch.ones(size, 4)
        batches.append(batch)
    return batches


hub("clip", "clip", "CLIPModel", _described)
hub(
    "siglip",
    "siglip",
    "SiglipModel",
    partial(captioned, padded=False),
    text_config__projection_size=32,
)
hub("chinese-clip", "chinese_clip", "ChineseCLIPModel", captioned)
hub("altclip", "altclip", "AltCLIPModel", captioned, text_config__project_dim=32)
hub("clipseg", "clipseg", "CLIPSegModel", _described)
hub("metaclip-2", "metaclip_2", "MetaClip2Model", _described)
hub("blip-match", "blip", "BlipModel", captioned)
hub(
    "blip-captions",
    "blip",
    "BlipForConditionalGeneration",
    lambda: _to_write(),
    text_config__encoder_hidden_size=32,
)
hub("git-captions", "git", "GitForCausalLM", lambda: _to_write())
hub("vilt-answers", "vilt", "ViltForQuestionAnswering", asked, num_images=-1)
hub(
    "visual-bert-classes",
    "visual_bert",
    "VisualBertForQuestionAnswering",
    lambda: _likely_regions(),
    visual_embedding_dim=16,
)
hub(
    "clap",
    "clap",
    "ClapModel",
    profiles,
    audio_config__num_mel_bins=16,
    audio_config__spec_size=32,
    audio_config__patch_size=4,
    audio_config__patch_stride=[4, 4],
    audio_config__patch_embeds_hidden_size=8,
    audio_config__hidden_size=16,
    audio_config__depths=[1, 1],
    audio_config__num_attention_heads=[2, 2],
    audio_config__window_size=4,
)


def _to_write() -> list[dict[str, Any]]:
    batches = made.texts()
    for text, image in zip(batches, made.images(labels=""), strict=True):
        text.update(image)
    return batches


def _likely_regions() -> list[dict[str, Any]]:
    batches = regions()
    for batch, (size, _, stream) in zip(batches, made.shapes(), strict=True):
        batch["labels"] = torch.rand(size, 5, generator=stream)
    return batches
