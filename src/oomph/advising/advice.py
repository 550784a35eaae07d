"""`oomph.advise(job)`: what a model costs as it is built, and what would change that."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from oomph.advising.anatomy import token_shape
from oomph.advising.costs import cost_of
from oomph.advising.suggestions import Case, Suggestion, find_suggestions
from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job, make_batch
from oomph.rendering import Printed

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Advice(Printed):
    """Suggestions for one job, which is not changed."""

    job: str
    gpu: str | None
    parameters: int
    peak: int
    """Bytes of a step as it is, predicted: device memory, or on the CPU that of tensors."""
    flops: float
    """Operations of a step as it is, predicted."""
    suggestions: tuple[Suggestion, ...]
    """Largest savings first."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON; these keys stay."""
        return {
            "kind": "oomph advice",
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "gpu": self.gpu,
            "parameters": self.parameters,
            "peak": self.peak,
            "flops": self.flops,
            "suggestions": [one.as_dict() for one in self.suggestions],
            "seconds": self.seconds,
        }


def advise(job: Job, *, gpu: str | GPU | None = None) -> Advice:
    """Look for costly parts of the architecture, with bytes and operations for this job.

    The job is rehearsed as it is and with each change that can be rehearsed; nothing is run or
    changed.
    """
    began = time.perf_counter()
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    cost, anatomy = cost_of(job, card)
    with torch.device("meta"):
        samples, tokens = token_shape(make_batch(job))
    case = Case(job=job, gpu=card, cost=cost, anatomy=anatomy, samples=samples, tokens=tokens)
    return Advice(
        job=job.name,
        gpu=card.name if card is not None else None,
        parameters=cost.parameters,
        peak=cost.peak,
        flops=cost.flops,
        suggestions=find_suggestions(case),
        seconds=time.perf_counter() - began,
    )
