"""Trains under a plan: one event per step, and measurements beside the predictions.

Nothing here prints; that is up to the caller.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, OomphError
from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job, batch_size, make_batch
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Plan
from oomph.runs.batches import Batches
from oomph.runs.loading import Resumed, Stored
from oomph.runs.run import apply, enforce
from oomph.torch_compat.pytree import tree_leaves

SCHEMA_VERSION = 1
#: The first steps compile, warm caches and create the optimizer's state: they are not timed.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One completed optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    seconds: float
    samples: int
    tokens: int
    """0 if the batch has none."""
    memory: Ledgers | None
    """Peak memory so far; None on the CPU, where it is not measured."""
    changes: tuple[str, ...] = ()
    """Changes of the plan right before this step or in it."""
    saved: Path | None = None
    """The checkpoint written after it."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where a training writes checkpoints, and after how many steps; always after the last."""

    folder: Path
    every: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """All steps of a training, and the plan that predicted them."""

    plan: Plan
    device: str
    steps: tuple[StepDone, ...]

    @property
    def seconds(self) -> float:
        """The median step time after the warm-up."""
        timed = self.steps[WARM_UP:] or self.steps[-1:]
        return statistics.median(done.seconds for done in timed)

    @property
    def memory(self) -> Ledgers | None:
        """Peak memory."""
        return self.steps[-1].memory

    def as_dict(self) -> dict[str, Any]:
        """The training as plain JSON; these keys stay."""
        predicted, memory = self.plan.predicted, self.memory
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.plan.verdict,
            "job": self.plan.made_for.job,
            "gpu": self.plan.made_for.gpu,
            "device": self.device,
            "steps": len(self.steps),
            # JSON cannot represent non-finite numbers.
            "losses": [done.loss if math.isfinite(done.loss) else None for done in self.steps],
            "first_step": self.steps[0].step,
            "saved": [str(done.saved) for done in self.steps if done.saved is not None],
            "step_seconds": [done.seconds for done in self.steps],
            "plan_changes": [change for done in self.steps for change in done.changes],
            "predicted": {"peak": predicted.peak.as_dict(), "seconds": predicted.seconds},
            "measured": {"peak": memory.as_dict() if memory else None, "seconds": self.seconds},
            "plan": self.plan.as_dict(),
        }


def choose_device(asked: str | None) -> torch.device:
    """`cpu` or `cuda`; by default the GPU if there is one."""
    there = torch.cuda.is_available()
    if asked not in (None, "cpu", "cuda"):
        raise BadInput(f"training runs on cpu or cuda, not {asked!r}")
    if asked == "cuda" and not there:
        raise BadInput("PyTorch finds no GPU here; --device cpu trains without one")
    return torch.device(asked or ("cuda" if there else "cpu"))


def card_of(device: torch.device) -> GPU | None:
    """The device's entry in the GPU catalogue; None for the CPU."""
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def train(
    plan: Plan,
    job: Job,
    *,
    device: torch.device,
    steps: int,
    loader: Iterable[Any] | None = None,
    saving: Saving | None = None,
    resume: Path | Stored | None = None,
    tell: Callable[[Resumed], None] = lambda _: None,
    elastic: bool = False,
) -> Iterator[StepDone]:
    """Apply the plan and train up to step `steps`; on a GPU its budget is enforced.

    Batches come from the loader, which is restarted when it ends; without a loader, the job's own
    batch is used. With `resume`, training continues from that checkpoint, and `tell` is called with
    what was in it. `elastic` is as for `fit`.
    """
    if steps < 1:
        raise BadInput(f"training takes at least one step, not {steps}")
    if isinstance(job.model, nn.Module):
        job.model.to(device)
    card = card_of(device)
    if card is not None:
        torch.cuda.reset_peak_memory_stats(device)
        if plan.budget < card.memory:
            enforce(plan.budget, card, device)
    with apply(plan, job, device=device, elastic=elastic) as run:
        batches = run.batches(loader) if loader is not None else None
        if resume is not None:
            tell(run.load(resume))
        if run.steps >= steps:
            raise BadInput(
                f"the checkpoint has {run.steps} steps behind it already, and training was to go"
                f" to {steps}; name a later step"
            )
        todo = range(run.steps + 1, steps + 1)
        for step, batch in zip(todo, _batches(job, batches), strict=False):
            changed = len(run.events)
            began = time.perf_counter()
            loss = float(run.step(batch))  # reading the number waits for the GPU
            seconds = time.perf_counter() - began
            due = saving is not None and (step == steps or step % (saving.every or steps) == 0)
            yield StepDone(
                step=step,
                loss=loss,
                seconds=seconds,
                samples=batch_size(batch),
                tokens=count_tokens(batch),
                memory=run.measured(),
                changes=tuple(map(str, run.events[changed:])),
                saved=run.save(saving.folder) if saving is not None and due else None,
            )


def _batches(job: Job, batches: Batches | None) -> Iterator[Any]:
    """Endless batches, each in the job's dtype."""
    while True:
        if batches is None:
            yield make_batch(job)
            continue
        empty = not batches.taken  # a resumed pass may have no batches left
        try:
            for batch in batches:
                empty = False
                yield make_batch(dataclasses.replace(job, batch=batch))
        except OomphError:
            raise
        except Exception as error:
            raise BadInput(f"the loader failed: {type(error).__name__}: {error}") from error
        if empty:
            raise BadInput("the loader gives no more batches; return one that can begin again")


def count_tokens(batch: Any) -> int:
    """Tokens in a batch; 0 if nothing in it looks like tokens."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max(
        (leaf.numel() for leaf in leaves if not leaf.is_floating_point() and leaf.dim() == 2),
        default=0,
    )
