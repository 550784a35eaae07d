"""Evaluation within a training's budget, without gradients and in the plan's micro-batches.

Outputs leave the device as soon as they are made. A loss that averages over targets is averaged
over those of all batches, so a batch with more valid targets counts more: the result is that of one
large batch. How a batch's loss is made of those of its parts is read from the graph of the forward
in evaluation mode, which may compute something else than in training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oomph.engine.step import Stage, refuse_uneven_parts
from oomph.errors import BadInput, StalePlan
from oomph.jobs.job import compute_loss, make_batch, split_batch
from oomph.process.interrupts import interrupts
from oomph.process.random_state import random_state_kept
from oomph.techniques.autocast import autocast
from oomph.techniques.batch_calls import unwatched
from oomph.techniques.generation_cache import evaluating_the_loss
from oomph.techniques.lazy_logits import LazyLogits
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.micro_batch import LossChanged, Weigher, count_targets
from oomph.techniques.parts_trial import in_evaluation
from oomph.torch_compat.pytree import tree_leaves, tree_map

#: Called with the model's output for a part of a batch, and that part, both on the host.
Metric = Callable[[Any, Any], Any]


class FindSplit(Protocol):
    """Finds how a batch's loss in evaluation is made of its parts': as for the batches before
    it, or analysed `anew`; None if the job's user says how, or if it cannot be known."""

    def __call__(self, batch: Any, *, anew: bool = False) -> LossSplit | None: ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of evaluating a model on some batches."""

    loss: float
    """Over all valid targets, or all samples, of all batches; NaN if there were none."""
    samples: int
    results: tuple[Any, ...]
    """The metric's result for each micro-batch, in order."""


def evaluate(
    stage: Stage,
    batches: Iterable[Any],
    metric: Metric | None,
    *,
    device: torch.device,
    planned: Sequence[Sequence[int]],
    find_split: FindSplit,
) -> Evaluation:
    """Go over the batches once; `planned` holds the tensor shapes of the batch planned for.

    `find_split` is called for the first batch that is split, and for one whose loss is computed
    differently. The model's mode and all random state are restored afterwards.
    """
    results: list[Any] = []
    totals: list[tuple[Tensor, Tensor]] = []
    samples = 0
    size = stage.job.micro_batch or max(shape[0] for shape in planned if shape)
    weigher = Weigher(stage.job.normalizer)
    weigher.trusted |= stage.weigher is not None and stage.weigher.trusted
    is_known = False
    with random_state_kept(device):
        for given in batches:
            interrupts.let_through()
            batch = make_batch(dataclasses.replace(stage.job, batch=given))
            _check_shapes(batch, planned)
            if not is_known and len(split_batch(batch, size)) > 1:
                weigher.split, is_known = find_split(batch), True
            evaluation = _BatchEvaluation(stage, batch, device, weigher, metric)
            try:
                evaluation.run(size)
            except LossChanged:
                if (split := find_split(batch, anew=True)) is None:
                    raise
                weigher.look_again(split)
                evaluation = _BatchEvaluation(stage, batch, device, weigher, metric)
                evaluation.run(size)
            totals.append(evaluation.total())
            results += evaluation.results
            samples += weigher.samples(batch)
    if not totals:
        raise BadInput("there is no batch to evaluate; a loader that was used up gives none")
    losses, counts = (torch.stack(column).double().cpu() for column in zip(*totals, strict=True))
    # A batch without targets counts zero; its own mean is NaN.
    loss = (torch.where(counts > 0, losses, 0.0) * counts).sum() / counts.sum()
    return Evaluation(loss=float(loss), samples=samples, results=tuple(results))


def evaluate_batch(stage: Stage, batch: Any) -> None:
    """Run a batch without gradients, in the job's micro-batches."""
    size = stage.job.micro_batch
    parts = split_batch(batch, size) if size else [batch]
    _evaluate_parts(stage, parts, lambda part: compute_loss(stage.job, stage.model, part))


def _evaluate_parts(stage: Stage, parts: Iterable[Any], each: Callable[[Any], object]) -> None:
    """Call `each`, which computes the loss, with every part in evaluation mode."""
    stage.settle()
    with torch.no_grad(), in_evaluation(stage.model), evaluating_the_loss():
        for part in parts:
            interrupts.let_through()
            with autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache):
                each(part)


class _BatchEvaluation:
    """Computes the loss of one batch, part by part, and the metric on its outputs."""

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
        self._samples = weigher.samples(batch)
        self._losses: list[Tensor] = []
        self._count: Any = None
        self._parts_weighed = False

    def run(self, size: int) -> None:
        """Evaluate the batch in parts of at most `size` samples."""
        _evaluate_parts(self._stage, self._weigher.parts(self._batch, size), self._add)

    def _add(self, part: Any) -> None:
        """Compute what a part adds to the loss of the batch."""
        compute = functools.partial(self._compute, part)
        share = self._weigher.samples(part) / self._samples
        if share == 1.0:
            loss, self._count = count_targets(compute)
        else:
            loss = self._weigh(part, share, compute)
        self._losses.append(loss)

    def total(self) -> tuple[Tensor, Tensor]:
        """The loss of the batch, and its weight relative to others."""
        count = self._count
        if self._parts_weighed:
            self._weigher.finish()
            count = self._weigher.counted()
        if self._stage.job.normalizer is not None:
            count = self._stage.job.normalizer(self._batch)
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
            some = self._weigher.parts(self._batch, 2)[0]
            refuse_uneven_parts(self._stage, self._moved(some), self._weigher.split)
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
        with unwatched(), torch.autocast(stage.device_type, enabled=False):
            self.results.append(self._metric(outputs[-1], tree_map(_on_host, part)))
        return loss

    def _moved(self, part: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, part
        )


def _keep_on_host(outputs: list[Any]) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_: nn.Module, __: Any, output: Any) -> None:
        with unwatched():
            outputs.append(tree_map(_on_host, output))

    return keep


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, LazyLogits):
        return leaf.on_host()
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _check_shapes(batch: Any, planned: Sequence[Sequence[int]]) -> None:
    """Refuse samples longer than planned; more samples only make more micro-batches."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    for now, then in zip(shapes, planned, strict=False):
        if any(a > b for a, b in zip(now[1:], then[1:], strict=False)):
            raise StalePlan(
                f"the plan is for samples of up to {tuple(then[1:])}, and this batch has"
                f" {now[1:]}; plan with the largest batch there will be"
            )
