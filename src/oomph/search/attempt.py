"""One attempt to plan: a Plan, or the least memory for which there would be one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from oomph.errors import DoesNotFit, HostTooSmall
from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job
from oomph.plans.fidelity import Fidelity
from oomph.plans.migrations import SCHEMA_VERSION
from oomph.plans.plan import Plan
from oomph.rendering import Printed
from oomph.search.checker import Say
from oomph.search.planner import plan
from oomph.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class NoPlan(Printed):
    """No plan fits the budget."""

    job: str
    gpu: str | None
    budget: int
    smallest_budget: int
    """The least device memory for which there is a plan."""
    reason: str
    """The same in words, with what would help."""
    seconds: float
    """How long it took to find that out."""
    host_missing: int = 0
    """Bytes of host memory that would do as well; 0 where host memory is not what is short."""

    @property
    def verdict(self) -> Literal["does_not_fit"]:
        """What a Plan has as well."""
        return "does_not_fit"

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain JSON; these keys stay."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "gpu": self.gpu,
            "verdict": self.verdict,
            "budget": self.budget,
            "smallest_budget": self.smallest_budget,
            "reason": self.reason,
            "seconds": self.seconds,
            "host_missing": self.host_missing,
        }


Attempt = Plan | NoPlan


def try_plan(
    job: Job,
    *,
    budget: str | int | None = None,
    gpu: str | GPU | None = None,
    allow: str | Fidelity = Fidelity.ROUNDING,
    compile_blocks: bool = True,
    host: str | int | None = None,
    say: Say = lambda _: None,
) -> Attempt:
    """Plan, and answer where no plan fits instead of raising."""
    began = time.perf_counter()
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    try:
        return plan(
            job,
            budget=budget,
            gpu=card,
            allow=allow,
            compile_blocks=compile_blocks,
            host=host,
            say=say,
        )
    except DoesNotFit as error:
        limit = parse_bytes(budget) if budget is not None else card.memory if card else 0
        return NoPlan(
            job=job.name,
            gpu=card.name if card is not None else None,
            budget=limit,
            smallest_budget=error.smallest,
            reason=str(error),
            seconds=time.perf_counter() - began,
            host_missing=error.missing if isinstance(error, HostTooSmall) else 0,
        )
