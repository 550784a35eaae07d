"""Samples of a causal language model: their tokens and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oomph.errors import BadInput

#: Label that losses ignore, as `F.cross_entropy` does by default.
IGNORED = -100


def tokens_and_labels(sample: Any, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """The tokens of a sample and its labels, both cut to `longest`.

    A sample is a list of tokens, or a mapping with `input_ids` and perhaps `labels`. Labels are not
    shifted: the model does that.
    """
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise BadInput(f"a sample needs input_ids, and this one has {', '.join(sample)}")
        tokens = _as_tensor(sample["input_ids"])
        labels = _as_tensor(sample["labels"]) if "labels" in sample else tokens
    else:
        tokens = labels = _as_tensor(sample)
    if tokens.dim() != 1 or labels.shape != tokens.shape:
        raise BadInput(
            "a sample is one row of tokens with as many labels, not"
            f" {tuple(tokens.shape)} with {tuple(labels.shape)}"
        )
    return tokens[:longest], labels[:longest]


def _as_tensor(numbers: Any) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.as_tensor(numbers, device="cpu")
