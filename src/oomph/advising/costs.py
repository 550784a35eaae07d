"""Computes what a step of a job costs by rehearsing it: memory, arithmetic, seconds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from oomph.advising.anatomy import Anatomy, examine
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.hardware.timing.work import Work
from oomph.jobs.job import Job, batch_size, make_batch
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.replaying import add_up, replay
from oomph.rehearsal.timeline import Category, Timeline

#: Changes a model in place; returns an undo.
Edit = Callable[[nn.Module], Callable[[], None]]
#: Number of micro-batches that a rehearsal runs.
_REHEARSED_PARTS = 2


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One optimizer step, predicted."""

    peak: int
    """Bytes of device memory, or on the CPU of tensors."""
    flops: float
    parameters: int
    state_bytes: int
    """Bytes of optimizer state."""
    scores: int
    """Bytes of attention weights kept for backward."""


@dataclass(frozen=True, kw_only=True)
class _CountingClock(Clock):
    """A clock that also counts operations."""

    flops: list[float] = field(default_factory=lambda: [0.0])

    def seconds(self, work: Work) -> float:
        self.flops[0] += work.flops
        return super().seconds(work)


def cost_of(job: Job, gpu: GPU | None) -> tuple[Cost, Anatomy]:
    """Rehearse one step, and determine the model's anatomy on the way."""
    seen: list[Anatomy] = []

    def look(model: nn.Module, *_: Any) -> None:
        seen.append(examine(model))

    base = Clock.of(gpu)
    clock = _CountingClock(gpu=base.gpu, efficiency=base.efficiency)
    timeline = rehearse(job, gpu, ("step",), watch=look, clock=clock, skip_first_step=True)
    shown = replay(timeline, AllocatorSettings()) if gpu is not None else add_up(timeline)
    peak = shown.peak(("step",))
    alive = timeline.alive_at(peak.event)
    return (
        Cost(
            peak=peak.reserved + device_overhead(gpu).expected,
            flops=clock.flops[0] * _parts_left_out(job),
            parameters=seen[0].parameters,
            state_bytes=sum(b.size for b in alive if b.category is Category.OPTIMIZER),
            scores=_scores(timeline),
        ),
        seen[0],
    )


@contextlib.contextmanager
def edited(job: Job, edit: Edit) -> Iterator[Job]:
    """The job with its model edited; for a given model, the edit is undone afterwards."""
    model = job.model
    if isinstance(model, nn.Module):
        undo = edit(model)
        try:
            yield job
        finally:
            undo()
        return
    build: Callable[[], nn.Module] = model

    def build_edited() -> nn.Module:
        built = build()
        edit(built)
        return built

    yield dataclasses.replace(job, model=build_edited)


def _parts_left_out(job: Job) -> float:
    """A rehearsal runs only the first micro-batches: the ratio of all of them to those."""
    if job.micro_batch is None:
        return 1.0
    with torch.device("meta"):
        parts = -(-batch_size(make_batch(job)) // job.micro_batch)
    return parts / min(parts, _REHEARSED_PARTS)


def _scores(timeline: Timeline) -> int:
    """Softmaxes kept for backward, which are attention weights without a fused kernel."""
    return sum(
        block.size
        for block in timeline.blocks
        if block.op.startswith("aten._softmax.") and block.category is Category.ACTIVATION
    )
