"""What a JSON report by oomph must contain to be explained; it may contain more."""

from __future__ import annotations

from dataclasses import dataclass

from oomph.explaining.remedies import Remedy
from oomph.files.schema import Count
from oomph.plans.ledgers import Ledgers


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the device when it ran out, in bytes."""

    allocated: Count
    reserved: Count
    limit: Count
    total: Count
    free: Count


@dataclass(frozen=True, kw_only=True)
class HeldThere:
    """A holder in the program, and the line that fills it."""

    place: str | None
    name: str
    size: Count


@dataclass(frozen=True, kw_only=True)
class NamedCause:
    """A possible cause, as a sentence."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class WatchShape:
    """A report of `oomph.watch`."""

    headline: str
    memory: Memory
    asked: Count
    categories: dict[str, Count]
    modules: dict[str, Count]
    held: tuple[HeldThere, ...]
    remedies: tuple[Remedy, ...]
    causes: tuple[NamedCause, ...] = ()
    history: tuple[tuple[Count, Count, Count], ...] = ()
    """For each step: its number, allocated bytes after it, and the peak so far."""
    gpu: str | None = None
    torch: str | None = None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Where an estimate's peak is."""

    phase: str
    module: str
    op: str


@dataclass(frozen=True, kw_only=True)
class EstimateShape:
    """JSON of `oomph estimate`."""

    job: str
    gpu: str | None
    verdict: str
    budget: Count | None
    peak: Ledgers
    peak_at: Peak
    categories_at_peak: dict[str, Count]
    modules_at_peak: dict[str, Count]
    smallest_budget: Count


@dataclass(frozen=True, kw_only=True)
class PlannedFor:
    """The job of a plan."""

    job: str
    gpu: str | None
    torch: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedPeak:
    """What a plan's step is predicted to need."""

    peak: Ledgers
    categories_at_peak: dict[str, Count]


@dataclass(frozen=True, kw_only=True)
class PlannedChange:
    """One change that a plan makes."""

    technique: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """JSON of `oomph plan`."""

    made_for: PlannedFor
    budget: Count
    predicted: PlannedPeak
    changes: tuple[PlannedChange, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """Measured peak of a training; None on the CPU, where it is not measured."""

    peak: Ledgers | None


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """JSON of `oomph train`."""

    job: str
    steps: Count
    measured: MeasuredPeak
    plan: PlanShape


@dataclass(frozen=True, kw_only=True)
class NoPlanShape:
    """JSON of `oomph plan` if no plan fits."""

    job: str
    gpu: str | None
    smallest_budget: Count
    reason: str
    budget: Count | None = None
