"""How a training goes with a run for its first steps, held against how it goes untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from oomph.errors import OomphError
from oomph.jobs.job import Job, batch_size, compute_loss, split_batch
from oomph.runs.run import Run

#: Steps with a run; those that follow are the plain loop's, after the run was undone.
STEPS = 3
#: Settings of an optimizer that say how it steps, not what comes out.
_HOW_IT_STEPS = ("fused", "foreach", "capturable")

Snapshot = dict[str, Any]
#: Compares two tensors: how they differ, in words; empty where they do not.
Alike = Callable[[Tensor, Tensor], str]


def _nothing() -> None:
    """What most loops do beside their steps."""


@dataclass(kw_only=True)
class Training:
    """What a user has in hand before the first step."""

    model: nn.Module
    loss: Callable[..., Tensor] | nn.Module | None
    optimizer: torch.optim.Optimizer
    batches: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Those of `Job`."""
    after_step: Callable[[], Any] = _nothing
    """What the loop does after each step: a scheduler, an average of the weights."""
    state: Callable[[], Any] = _nothing
    """What else the training leaves behind: numbers and tensors that must come out the same."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of the model's repeated parts."""
        repeated = self.model.get_submodule("blocks") if hasattr(self.model, "blocks") else None
        return tuple(f"blocks.{name}" for name, _ in repeated.named_children()) if repeated else ()

    @property
    def head(self) -> str:
        """The path of its output layer; empty where it has none that makes logits."""
        return "head" if isinstance(getattr(self.model, "head", None), nn.Linear) else ""


@dataclass(kw_only=True)
class Course:
    """How a training went: what there was after each step, whoever made it."""

    snapshots: list[Snapshot] = field(default_factory=list)
    refusal: OomphError | None = None
    part: int | None = None
    """Samples in a part of a batch, while a run made the steps."""


def train_untouched(training: Training, part: int | None = None) -> Course:
    """As its user wrote it; in parts of so many samples while a run would make the steps."""
    course = Course()
    for number, batch in enumerate(training.batches):
        loss = _plain_step(training, batch, part if number < STEPS else None)
        training.after_step()
        course.snapshots.append(snapshot(training, loss))
    return course


def train_with(training: Training, start: Callable[[Training], Run]) -> Course:
    """The same with a run for the first steps: what it refuses is done by the plain loop."""
    course = Course()
    run: Run | None = None
    try:
        run = start(training)
        course.part = run.plan.choices.micro_batch
    except OomphError as error:
        course.refusal = error
    for number, batch in enumerate(training.batches):
        if run is not None and (number == STEPS or course.refusal is not None):
            run.undo()
            run = None
        loss = None
        if run is not None:
            try:
                loss = run.step(batch)
            except OomphError as error:
                course.refusal = error
                run.undo()
                run = None
        if loss is None:
            loss = _plain_step(training, batch)
        training.after_step()
        if run is not None:
            assert run.model is training.model  # which waits for what goes on beside the step
        course.snapshots.append(snapshot(training, loss))
    return course


def _plain_step(training: Training, batch: Any, part: int | None = None) -> Tensor:
    job = Job(training.model, training.loss, training.optimizer, batch, **training.options)
    losses = []
    for one in split_batch(batch, part) if part is not None else [batch]:
        share = batch_size(one) / batch_size(batch) if part is not None else 1.0
        loss = compute_loss(job, training.model, one) * share
        loss.backward()
        losses.append(loss.detach())
    if job.clip_norm is not None:
        owned = [p for group in training.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(owned, job.clip_norm)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return torch.stack(losses).sum()


def snapshot(training: Training, loss: Tensor) -> Snapshot:
    """All that a step may change."""
    model, state = training.model, training.optimizer.state_dict()
    groups = [
        {key: value for key, value in group.items() if key not in _HOW_IT_STEPS}
        for group in state["param_groups"]
    ]
    # Whether nothing is kept of a parameter or an empty dict is no difference.
    kept = {number: own for number, own in state["state"].items() if own}
    taken = {
        "loss": loss.detach(),
        "weights": model.state_dict(),
        "buffers": dict(model.named_buffers()),
        "optimizer": {"state": kept, "param_groups": groups},
        "user's state": training.state(),
        "next random number": torch.get_rng_state(),
    }
    return {what: tree_map(_copied, value) for what, value in taken.items()}


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def first_difference(course: Course, expected: Course, alike: Alike) -> str:
    """Where two trainings part, in words; empty where they never do."""
    for step, (one, other) in enumerate(zip(course.snapshots, expected.snapshots, strict=True)):
        for what in one:
            if found := difference(one[what], other[what], alike):
                return f"after step {step + 1}, {what}{found}"
    return ""


def difference(one: Any, other: Any, alike: Alike, where: str = "") -> str:
    """Where two values with anything inside are not the same, in words."""
    if isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{where}[{one.keys() ^ other.keys()}] is in one of them only"
        return _first(difference(one[key], other[key], alike, f"{where}[{key}]") for key in other)
    if isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{where} has {len(one)} values instead of {len(other)}"
        return _first(
            difference(*pair, alike, f"{where}[{at}]")
            for at, pair in enumerate(zip(one, other, strict=True))
        )
    if not isinstance(other, Tensor):
        return "" if one == other else f"{where} is {one!r} instead of {other!r}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{where} is {one.dtype}{[*one.shape]} instead of {other.dtype}{[*other.shape]}"
    return f"{where}{found}" if (found := alike(one, other)) else ""


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")
