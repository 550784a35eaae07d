"""Reshapes a job's sample batch to a given number of samples and length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oomph.errors import BadInput
from oomph.jobs.job import Job, batch_size, make_batch
from oomph.torch_compat.pytree import tree_leaves, tree_map


def sequence_length(batch: Any) -> int:
    """Tokens per sample in a batch: the second dimension that most of its tensors share."""
    samples = batch_size(batch)
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(named, Tensor):
        return named.shape[1]
    widths = [
        leaf.shape[1]
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] == samples
    ]
    if not widths:
        raise BadInput("the job's batch holds no tensor of samples × tokens: its length is unknown")
    return max(widths, key=widths.count)


def in_shape(job: Job, samples: int, length: int) -> Job:
    """The job with a batch of `samples` samples of length `length`.

    Every dimension of the sample batch that equals its length gets the new one; the data is
    repeated or cut. Tensors that are not per sample stay as they are.
    """
    batch = make_batch(job)
    rows, width = batch_size(batch), sequence_length(batch)

    def reshape(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        leaf = leaf.index_select(0, torch.arange(samples, device=leaf.device) % rows)
        for dim in range(1, leaf.dim()):
            if leaf.shape[dim] == width:
                leaf = leaf.index_select(dim, torch.arange(length, device=leaf.device) % width)
        return leaf

    return dataclasses.replace(job, batch=tree_map(reshape, batch))
