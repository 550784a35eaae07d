"""One optimizer step of a job, the way a careful user would write it.

The same code runs on a GPU and is rehearsed on fake tensors (rule 1).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomph.job import AUTOCAST, Job, batch_size, compute_loss, split_batch
from oomph.techniques.autocast import autocast
from oomph.techniques.micro_batch import Weigher, check_parts
from oomph.techniques.optimizer_in_backward import OptimizerInBackward

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(kw_only=True)
class Stage:
    """What a step runs on: the job's model and optimizer, with whatever was applied to them."""

    job: Job
    """Its precision and micro-batch are those the step uses."""
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    device_type: str = "cuda"
    scaler: torch.amp.GradScaler | None = None
    cast_cache: bool = True
    in_backward: OptimizerInBackward | None = None
    weigher: Weigher | None = None
    """How parts of a batch are weighed where their samples do not count alike."""
    returns_loss: bool = False
    """Whether a step returns its loss, which takes a little memory to the end of it."""


def train_step(
    stage: Stage,
    batch: Any,
    *,
    around_forward: Around = contextlib.nullcontext,
    choose_parts: Callable[[list[Any]], list[Any]] = list,
) -> Tensor | None:
    """Forward and backward over the batch in micro-batches, then one optimizer step.

    Returns the loss of the whole batch where the stage says so.
    """
    job = stage.job
    whole = split_batch(batch, job.micro_batch) if job.micro_batch else [batch]
    parts = choose_parts(whole)
    weigher = stage.weigher if len(whole) > 1 else None
    if weigher is not None:
        weigher.begin(batch)
    total = batch_size(batch)
    losses: list[Tensor] = []
    for part in parts:
        share = batch_size(part) / total if len(parts) > 1 else 1.0
        with around_forward(), _autocast(stage):
            loss = _part_loss(stage, part, share, weigher)
        if weigher is not None and not weigher.trusted:
            _check_parts(stage, batch)
            weigher.trusted = True
        if stage.returns_loss:
            losses.append(loss.detach())
        with _arming(stage, last=part is parts[-1]):
            (stage.scaler.scale(loss) if stage.scaler is not None else loss).backward()
        del loss
    if weigher is not None:
        weigher.finish()
    if stage.in_backward is None:
        _step(stage)
    if len(losses) > 1:
        return torch.stack(losses).sum()
    return losses[0] if losses else None


def _part_loss(stage: Stage, part: Any, share: float, weigher: Weigher | None) -> Tensor:
    """What a part adds to the loss of its batch."""
    compute = functools.partial(compute_loss, stage.job, stage.model, part)
    if weigher is not None:
        return weigher.weigh(part, share, compute)
    return compute() * share if share != 1.0 else compute()


def _check_parts(stage: Stage, batch: Any) -> None:
    def compute(part: Any) -> Tensor:
        with _autocast(stage):
            return compute_loss(stage.job, stage.model, part)

    weights = {parameter.dtype for parameter in stage.model.parameters()}
    half = stage.job.precision in AUTOCAST or weights & set(AUTOCAST.values())
    check_parts(stage.model, batch, compute, tolerance=1e-2 if half else 1e-4)


def _autocast(stage: Stage) -> AbstractContextManager[Any]:
    return autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache)


def _arming(stage: Stage, *, last: bool) -> AbstractContextManager[Any]:
    if stage.in_backward is None or not last:
        return contextlib.nullcontext()
    return stage.in_backward.armed()


def _step(stage: Stage) -> None:
    """Clip where the job says so, then step, then forget the gradients."""
    optimizer, scaler = stage.optimizer, stage.scaler
    assert optimizer is not None, "a job without an optimizer is only evaluated"
    if stage.job.clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(owned, stage.job.clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def evaluate(stage: Stage, batch: Any) -> None:
    """One batch without gradients, in the job's micro-batches."""
    job, model = stage.job, stage.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _autocast(stage):
            for part in split_batch(batch, job.micro_batch) if job.micro_batch else [batch]:
                compute_loss(job, model, part)
    finally:
        model.train(was_training)
