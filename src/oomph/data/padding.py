"""Pads samples of different lengths to the longest, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.data.samples import IGNORED, tokens_and_labels
from oomph.errors import BadInput


def pad_samples(
    samples: Sequence[Any], *, longest: int | None = None, multiple: int = 1, pad_token: int = 0
) -> dict[str, Tensor]:
    """A batch of tokens, labels and the attention mask; padding is on the right and not learned.

    `longest` and `multiple` are those of the `TokenBatches` that chose the samples:
    `DataLoader(…, collate_fn=functools.partial(pad_samples, longest=batches.longest))`.
    """
    if not samples:
        raise BadInput("a batch needs at least one sample")
    pairs = [tokens_and_labels(sample, longest) for sample in samples]
    most = max(len(tokens) for tokens, _ in pairs)
    shape = len(pairs), -(-most // multiple) * multiple
    ids = torch.full(shape, pad_token, dtype=torch.long, device="cpu")
    targets = torch.full(shape, IGNORED, dtype=torch.long, device="cpu")
    mask = torch.zeros(shape, dtype=torch.long, device="cpu")
    for row, (tokens, labels) in enumerate(pairs):
        ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens)] = labels
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": targets}
