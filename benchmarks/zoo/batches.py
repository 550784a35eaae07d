"""Batches for the models of the zoo: each of another size and length, the first the largest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Of five batches: samples, and tokens of each.
SIZES = (6, 5, 2, 4, 3)
LENGTHS = (24, 17, 24, 12, 20)
VOCABULARY = 96


def shapes() -> Iterator[tuple[int, int, torch.Generator]]:
    """Of each batch: its samples, their length, and a stream of random numbers."""
    for at, (size, length) in enumerate(zip(SIZES, LENGTHS, strict=True)):
        yield size, length, torch.Generator().manual_seed(at)


def _mask(size: int, length: int, full: bool) -> Tensor:
    mask = torch.ones(size, length, dtype=torch.long)
    for row in range(0 if full else size):
        mask[row, length - (row * length) // (2 * size) :] = 0
    return mask


def texts(
    labels: str = "tokens", *, vocabulary: int = VOCABULARY, classes: int = 2, padded: bool = True
) -> list[dict[str, Any]]:
    """Padded texts, sorted by length; `labels` are tokens, a token each, classes or spans."""
    batches = []
    for at, (size, length, stream) in enumerate(shapes()):
        ids = torch.randint(5, vocabulary, (size, length), generator=stream)
        mask = _mask(size, length, full=at == 0 or not padded)
        batch: dict[str, Any] = {"input_ids": ids}
        if padded:
            batch["attention_mask"] = mask
        if labels == "tokens":
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        elif labels == "masked":
            chosen = torch.rand(size, length, generator=stream) < 0.3
            chosen[:, 0] = True
            batch["labels"] = ids.masked_fill(~(chosen & (mask == 1)), -100)
        elif labels == "class":
            batch["labels"] = torch.randint(classes, (size,), generator=stream)
        elif labels == "score":
            batch["labels"] = torch.randn(size, generator=stream)
        elif labels == "each":
            each = torch.randint(classes, (size, length), generator=stream)
            batch["labels"] = each.masked_fill(mask == 0, -100)
        elif labels == "span":
            batch["start_positions"] = torch.randint(length // 2, (size,), generator=stream)
            batch["end_positions"] = torch.randint(length // 2, (size,), generator=stream)
        batches.append(batch)
    return batches


def translations(vocabulary: int = VOCABULARY) -> list[dict[str, Any]]:
    """Texts and their padded translations."""
    batches = texts(labels="", vocabulary=vocabulary)
    for (size, length, stream), batch in zip(shapes(), batches, strict=True):
        words = length // 2 + 3
        target = torch.randint(5, vocabulary, (size, words), generator=stream)
        batch["labels"] = target.masked_fill(_mask(size, words, full=False) == 0, -100)
    return batches


def images(
    pixels: int = 32, *, labels: str = "class", classes: int = 5, channels: int = 3
) -> list[dict[str, Any]]:
    """Images with a class each, a class for each pixel, or none."""
    batches = []
    for size, _, stream in shapes():
        shape = size, channels, pixels, pixels
        batch: dict[str, Any] = {"pixel_values": torch.randn(shape, generator=stream)}
        if labels == "class":
            batch["labels"] = torch.randint(classes, (size,), generator=stream)
        elif labels == "pixels":
            of_pixels = torch.randint(classes, (size, pixels, pixels), generator=stream)
            of_pixels[:, : size * 2] = 255  # pixels of no class
            batch["labels"] = of_pixels
        batches.append(batch)
    return batches


def pictures(pixels: int = 32, classes: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Images with a class each, as a loader gives them."""
    return [(one["pixel_values"], one["labels"]) for one in images(pixels, classes=classes)]


def sounds(samples: int = 1600, *, labels: str = "letters") -> list[dict[str, Any]]:
    """Waves of sound, padded, with what is said or a class."""
    batches = []
    for at, (size, length, stream) in enumerate(shapes()):
        long = samples * length // LENGTHS[0]
        batch: dict[str, Any] = {
            "input_values": torch.randn(size, long, generator=stream),
            "attention_mask": _mask(size, long, full=at == 0),
        }
        if labels == "letters":
            said = torch.randint(1, 20, (size, 4), generator=stream)
            said[size // 2 :, 2:] = -100
            batch["labels"] = said
        else:
            batch["labels"] = torch.randint(4, (size,), generator=stream)
        batches.append(batch)
    return batches
