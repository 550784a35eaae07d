"""Training for real under a plan: one event per step, and what was measured against the prediction.

Nothing here prints; whoever listens does.
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
from torch.utils._pytree import tree_leaves

from oomph.errors import BadInput, OomphError
from oomph.estimation import Ledgers
from oomph.gpus import GPU, find_gpu
from oomph.job import Job, batch_size, make_batch
from oomph.planning.plan import Plan
from oomph.running.batches import Batches
from oomph.running.loading import Resumed, Stored
from oomph.running.run import apply, enforce

SCHEMA_VERSION = 1
#: The first steps compile, warm caches and make the optimizer's state: they are not timed.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One optimizer step, done."""

    step: int
    """Counted from 1."""
    loss: float
    seconds: float
    samples: int
    tokens: int
    """0 where the batch holds none."""
    memory: Ledgers | None
    """The most so far; None on the CPU, where it is not measured."""
    changes: tuple[str, ...] = ()
    """Of the plan, right before this step or in it."""
    saved: Path | None = None
    """The checkpoint that was written after it."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where a training writes checkpoints, and after how many steps; always after the last."""

    folder: Path
    every: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """All steps of a training, beside the plan that predicted them."""

    plan: Plan
    device: str
    steps: tuple[StepDone, ...]

    @property
    def seconds(self) -> float:
        """The median step after the first ones."""
        timed = self.steps[WARM_UP:] or self.steps[-1:]
        return statistics.median(done.seconds for done in timed)

    @property
    def memory(self) -> Ledgers | None:
        """The most there was."""
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
            # JSON has no word for what is not finite.
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
    """`cpu` or `cuda`; where nothing was asked for, the GPU if there is one."""
    there = torch.cuda.is_available()
    if asked not in (None, "cpu", "cuda"):
        raise BadInput(f"training runs on cpu or cuda, not {asked!r}")
    if asked == "cuda" and not there:
        raise BadInput("PyTorch finds no GPU here; --device cpu trains without one")
    return torch.device(asked or ("cuda" if there else "cpu"))


def card_of(device: torch.device) -> GPU | None:
    """The card of the catalogue that the device is; None for the CPU."""
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
    """Apply the plan and train up to this step; on a GPU its budget is enforced.

    Batches are the loader's, from the beginning again where it ends; without one the job's own.
    With `resume` it goes on from that checkpoint, and `tell` is told what was in it. `elastic` is
    as for `fit`.
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
    """Batches without end, each in the dtype of the job."""
    while True:
        if batches is None:
            yield make_batch(job)
            continue
        empty = not batches.taken  # of a pass that is resumed there may be nothing left
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
    """Tokens in a batch; 0 where nothing in it looks like them."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max(
        (leaf.numel() for leaf in leaves if not leaf.is_floating_point() and leaf.dim() == 2),
        default=0,
    )
