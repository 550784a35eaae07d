"""One optimizer step of a job, the way a careful user would write it.

The same code runs on a GPU and is rehearsed on fake tensors (rule 1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from oomph.job import AUTOCAST, Job, batch_size, compute_loss, split_batch

Around = Callable[[], AbstractContextManager[Any]]


def autocast(job: Job, device_type: str) -> AbstractContextManager[Any]:
    """The job's autocast region, or nothing where its precision has none."""
    dtype = AUTOCAST.get(job.precision)
    return torch.autocast(device_type, dtype=dtype) if dtype else contextlib.nullcontext()


def make_scaler(job: Job, device_type: str) -> torch.amp.GradScaler | None:
    """fp16's loss scaler; other precisions need none."""
    return torch.amp.GradScaler(device_type) if job.precision == "fp16-mixed" else None


def train_step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    device_type: str = "cuda",
    scaler: torch.amp.GradScaler | None = None,
    around_forward: Around = contextlib.nullcontext,
    choose_parts: Callable[[list[Any]], list[Any]] = list,
) -> None:
    """Forward and backward over the batch in micro-batches, then one optimizer step."""
    total = batch_size(batch)
    parts = choose_parts(split_batch(batch, job.micro_batch)) if job.micro_batch else [batch]
    for part in parts:
        with around_forward(), autocast(job, device_type):
            loss = compute_loss(job, model, part)
            if len(parts) > 1:
                loss = loss * (batch_size(part) / total)
        (scaler.scale(loss) if scaler is not None else loss).backward()
        del loss
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def evaluate(job: Job, model: nn.Module, batch: Any, *, device_type: str = "cuda") -> None:
    """One batch without gradients, in the job's micro-batches."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(job, device_type):
            for part in split_batch(batch, job.micro_batch) if job.micro_batch else [batch]:
                compute_loss(job, model, part)
    finally:
        model.train(was_training)
