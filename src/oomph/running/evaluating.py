"""Evaluation inside a training's budget: no gradients, the plan's micro-batches, and outputs that
leave the device as they are made.

A loss that averages over targets is averaged over those of all batches, so a batch with more valid
targets counts more: the result is that of one large batch. Where a loss has other terms beside such
a mean, they are weighed by samples within a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import BadInput, StalePlan
from oomph.job import batch_size, compute_loss, make_batch, split_batch
from oomph.running.random_state import random_state_kept
from oomph.running.step import Stage, refuse_uneven_parts
from oomph.techniques.autocast import autocast
from oomph.techniques.generation_cache import evaluating_the_loss
from oomph.techniques.lazy_logits import LazyLogits
from oomph.techniques.micro_batch import Weigher, count_targets, in_evaluation

#: Given the model's output for a part of a batch, and that part, both on the host.
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model makes of some batches."""

    loss: float
    """Over all valid targets, or all samples, of all batches; NaN where there were none."""
    samples: int
    results: tuple[Any, ...]
    """What the metric returned for each micro-batch, in order."""


def evaluate(
    stage: Stage,
    batches: Iterable[Any],
    metric: Metric | None,
    *,
    device: torch.device,
    planned: Sequence[Sequence[int]],
) -> Evaluation:
    """Go over the batches once; `planned` are the shapes of the batch that was planned for.

    The model's mode and all random streams are afterwards what they were before.
    """
    results: list[Any] = []
    totals: list[tuple[Tensor, Tensor]] = []
    samples = 0
    size = stage.job.micro_batch or max(shape[0] for shape in planned if shape)
    weigher = Weigher(stage.job.items)
    weigher.trusted |= stage.weigher is not None and stage.weigher.trusted
    with random_state_kept(device):
        for given in batches:
            batch = make_batch(dataclasses.replace(stage.job, batch=given))
            _check_shapes(batch, planned)
            evaluation = _BatchEvaluation(stage, batch, device, weigher, metric)
            evaluate_batch(stage, batch, size, evaluation.add)
            totals.append(evaluation.total())
            results += evaluation.results
            samples += batch_size(batch)
    if not totals:
        raise BadInput("there is no batch to evaluate; a loader that was used up gives none")
    losses, counts = (torch.stack(column).double().cpu() for column in zip(*totals, strict=True))
    # One that has no target counts nothing, and its own mean is no number.
    loss = (torch.where(counts > 0, losses, 0.0) * counts).sum() / counts.sum()
    return Evaluation(loss=float(loss), samples=samples, results=tuple(results))


def evaluate_batch(
    stage: Stage,
    batch: Any,
    micro_batch: int | None = None,
    each: Callable[[Any], None] | None = None,
) -> None:
    """Run a batch without gradients, in micro-batches of this size or the job's.

    `each` is called with every part, inside evaluation; it computes the loss where it is not given.
    """
    stage.settle()
    size = micro_batch or stage.job.micro_batch
    with torch.no_grad(), in_evaluation(stage.model), evaluating_the_loss():
        for part in split_batch(batch, size) if size else [batch]:
            with autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache):
                if each is None:
                    compute_loss(stage.job, stage.model, part)
                else:
                    each(part)


class _BatchEvaluation:
    """The loss of one batch, part by part, and what a metric makes of its outputs."""

    def __init__(
        self,
        stage: Stage,
        batch: Any,
        device: torch.device,
        weigher: Weigher,
        metric: Metric | None,
    ) -> None:
        self.results: list[Any] = []
        self._stage = stage
        self._batch = batch
        self._device = device
        self._weigher = weigher
        self._metric = metric
        self._samples = batch_size(batch)
        self._losses: list[Tensor] = []
        self._count: Any = None
        self._parts_weighed = False

    def add(self, part: Any) -> None:
        """Compute what a part adds to the loss of the batch."""
        compute = functools.partial(self._compute, part)
        share = batch_size(part) / self._samples
        if share == 1.0:
            loss, self._count = count_targets(compute)
        else:
            loss = self._weigh(part, share, compute)
        self._losses.append(loss)

    def total(self) -> tuple[Tensor, Tensor]:
        """The loss of the batch, and how much it counts beside others."""
        count = self._count
        if self._parts_weighed:
            self._weigher.finish()
            count = self._weigher.counted()
        if self._stage.job.items is not None:
            count = self._stage.job.items(self._batch)
        if count is None:
            count = self._samples
        loss = torch.stack(self._losses).sum() if len(self._losses) > 1 else self._losses[0]
        return loss, torch.as_tensor(count, device=loss.device)

    def _weigh(self, part: Any, share: float, compute: Callable[[], Tensor]) -> Tensor:
        if not self._parts_weighed:
            self._weigher.begin(self._batch)
            self._parts_weighed = True
        loss = self._weigher.weigh(part, share, compute)
        if not self._weigher.trusted:
            refuse_uneven_parts(self._stage, self._moved(split_batch(self._batch, 2)[0]))
            self._weigher.trusted = True
        return loss

    def _compute(self, part: Any) -> Tensor:
        stage, moved = self._stage, self._moved(part)
        if self._metric is None:
            return compute_loss(stage.job, stage.model, moved)
        outputs: list[Any] = []
        hook = stage.model.register_forward_hook(_keep_on_host(outputs))
        try:
            loss = compute_loss(stage.job, stage.model, moved)
        finally:
            hook.remove()
        if not outputs:
            raise BadInput("the loss did not call the model, so there is no output to measure")
        with torch.autocast(stage.device_type, enabled=False):
            self.results.append(self._metric(outputs[-1], tree_map(_on_host, part)))
        return loss

    def _moved(self, part: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, part
        )


def _keep_on_host(outputs: list[Any]) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(tree_map(_on_host, output))

    return keep


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, LazyLogits):
        return leaf.on_host()
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _check_shapes(batch: Any, planned: Sequence[Sequence[int]]) -> None:
    """More samples make more micro-batches; longer ones were not planned for."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    for now, then in zip(shapes, planned, strict=False):
        if any(a > b for a, b in zip(now[1:], then[1:], strict=False)):
            raise StalePlan(
                f"the plan is for samples of up to {tuple(then[1:])}, and this batch has"
                f" {now[1:]}; plan with the largest batch there will be"
            )
