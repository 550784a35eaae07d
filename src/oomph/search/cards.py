"""Which card holds it? One job, judged on every card of the catalogue."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oomph.hardware import GPU, known_gpus
from oomph.jobs.job import Job
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import SCHEMA_VERSION, Estimate, Verdict, judge
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rendering import Printed
from oomph.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class CardVerdict:
    """One card and what the job would be on it."""

    gpu: GPU
    estimate: Estimate | None
    """None where the card lacks the job's number format."""

    @property
    def verdict(self) -> Verdict | Literal["no_bf16"]:
        """The estimate's verdict, or why there is none."""
        return self.estimate.verdict if self.estimate is not None else "no_bf16"

    def as_dict(self) -> dict[str, Any]:
        """The card as plain JSON; `peak` and `interval` are null where nothing was judged."""
        shown = self.estimate.as_dict() if self.estimate is not None else {}
        return {
            "name": self.gpu.name,
            "verdict": self.verdict,
            "memory": self.gpu.memory,
            "peak": shown.get("peak"),
            "interval": shown.get("interval"),
        }


@dataclass(frozen=True, kw_only=True)
class CardSurvey(Printed):
    """A job on every card, smallest memory first."""

    job: str
    cards: tuple[CardVerdict, ...]
    left_out: tuple[str, ...]
    """Cards that CUDA's rules say nothing about."""
    rehearsals: int
    seconds: float

    @property
    def fitting(self) -> tuple[CardVerdict, ...]:
        """The cards that hold the job."""
        return tuple(card for card in self.cards if card.verdict == "fits")

    @property
    def verdict(self) -> Verdict:
        """Whether any card surely holds the job."""
        return "fits" if self.fitting else "does_not_fit"

    def as_dict(self) -> dict[str, Any]:
        """The survey as plain JSON; these keys stay."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "verdict": self.verdict,
            "cards": [card.as_dict() for card in self.cards],
            "left_out": list(self.left_out),
            "rehearsals": self.rehearsals,
            "seconds": self.seconds,
        }


def survey_cards(
    job: Job,
    *,
    budget: str | int | None = None,
    phases: Sequence[str] = PHASES,
    allocator: str | AllocatorSettings = "",
) -> CardSurvey:
    """Judge the job on every NVIDIA card of the catalogue.

    With a `budget` it may use no more than that on any card, nor more than the card has.
    """
    began = time.perf_counter()
    limit = parse_bytes(budget) if budget is not None else None
    settings = AllocatorSettings.parse(allocator) if isinstance(allocator, str) else allocator
    needs_bf16 = job.precision in ("bf16", "bf16-mixed")
    cards: list[CardVerdict] = []
    rehearsals = 0
    nvidia = sorted(
        (gpu for gpu in known_gpus().values() if gpu.compute_capability is not None), key=_rules
    )
    for _, group in itertools.groupby(nvidia, key=_rules):
        alike = list(group)
        if needs_bf16 and not alike[0].has_bf16:
            cards += [CardVerdict(gpu=gpu, estimate=None) for gpu in alike]
            continue
        # One rehearsal for all of them. What else differs is the number of multiprocessors:
        # scratch memory grows with it, so the card with most of them errs on the safe side.
        timeline = rehearse(job, max(alike, key=lambda gpu: gpu.sm_count), phases)
        rehearsals += 1
        for gpu in alike:
            judged = judge(
                timeline,
                job=job.name,
                gpu=gpu,
                budget=min(limit, gpu.memory) if limit is not None else gpu.memory,
                settings=settings,
                phases=phases,
                seconds=time.perf_counter() - began,
            )
            cards.append(CardVerdict(gpu=gpu, estimate=judged))
    return CardSurvey(
        job=job.name,
        cards=tuple(sorted(cards, key=lambda card: (card.gpu.memory, card.gpu.name))),
        left_out=tuple(gpu.name for gpu in known_gpus().values() if gpu.compute_capability is None),
        rehearsals=rehearsals,
        seconds=time.perf_counter() - began,
    )


def _rules(gpu: GPU) -> tuple[int, int]:
    """Cards of one compute capability choose the same kernels."""
    assert gpu.compute_capability is not None
    return gpu.compute_capability
