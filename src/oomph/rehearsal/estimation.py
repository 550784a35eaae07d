"""Will it fit? Replays a rehearsal through the allocator for a verdict and an interval."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job
from oomph.plans.ledgers import Ledgers
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.allocator.replay import SHARED_SEGMENT
from oomph.rehearsal.hidden import DeviceOverhead, Uncertainty, device_overhead, uncertainty
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.replaying import PhasePeak, Replay, add_up, replay, replay_within
from oomph.rehearsal.timeline import Timeline
from oomph.rendering import Exported
from oomph.units import parse_bytes

SCHEMA_VERSION = 1
Verdict = Literal["fits", "does_not_fit", "inconclusive"]
#: More than any request asks for: the end of an upward search.
MOST_MEMORY = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PeakAt:
    """Where the peak of allocated memory occurs."""

    phase: str
    module: str
    op: str
    event: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The range that the real value should not leave."""

    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class Estimate(Exported):
    """The predicted memory of a job on a GPU. All sizes are bytes."""

    job: str
    gpu: str | None
    allocator: str
    """The allocator's settings, as PYTORCH_CUDA_ALLOC_CONF takes them; empty for the defaults."""
    verdict: Verdict
    budget: int | None
    peak: Ledgers
    interval: dict[str, Interval]
    interval_reasons: tuple[str, ...]
    phases: dict[str, Ledgers]
    categories_at_peak: dict[str, int]
    modules_at_peak: dict[str, int]
    peak_at: PeakAt
    fragmentation: float
    """Reserved but unallocated memory, as a fraction of reserved, at the peak of reserved."""
    allocator_retries: int
    """How often the allocator had to return cached blocks to stay inside the budget."""
    step_retries: int
    """How often it has to in each step, once the first steps are over."""
    smallest_budget: int
    """The least device memory with which the job would run, returning cached blocks as needed."""
    warnings: tuple[str, ...]
    """Why the rehearsal cannot be what the user meant; the verdict is then never "fits"."""
    notes: tuple[str, ...]
    seconds: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether the verdict is "fits"."""
        return self.verdict == "fits"

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON; these keys are stable."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "gpu": self.gpu,
            "allocator": self.allocator,
            "verdict": self.verdict,
            "budget": self.budget,
            "peak": self.peak.as_dict(),
            "interval": {
                name: {"low": interval.low, "high": interval.high}
                for name, interval in self.interval.items()
            },
            "interval_reasons": list(self.interval_reasons),
            "phases": {name: ledgers.as_dict() for name, ledgers in self.phases.items()},
            "categories_at_peak": self.categories_at_peak,
            "modules_at_peak": self.modules_at_peak,
            "peak_at": {
                "phase": self.peak_at.phase,
                "module": self.peak_at.module,
                "op": self.peak_at.op,
            },
            "fragmentation": self.fragmentation,
            "allocator_retries": self.allocator_retries,
            "step_retries": self.step_retries,
            "smallest_budget": self.smallest_budget,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def estimate(
    job: Job,
    gpu: str | GPU | None = None,
    *,
    budget: str | int | None = None,
    phases: Sequence[str] = PHASES,
    allocator: str | AllocatorSettings = "",
) -> Estimate:
    """Predict the job's peak memory on a GPU, and say whether it fits the budget.

    Without `gpu` the job is rehearsed for the CPU. Without `budget` the GPU's whole memory counts.
    """
    started = time.perf_counter()
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    limit = parse_bytes(budget) if budget is not None else (card.memory if card else None)
    settings = AllocatorSettings.parse(allocator) if isinstance(allocator, str) else allocator
    timeline = rehearse(job, card, phases)
    return judge(
        timeline,
        job=job.name,
        gpu=card,
        budget=limit,
        settings=settings,
        phases=phases,
        seconds=time.perf_counter() - started,
    )


def judge(
    timeline: Timeline,
    *,
    job: str,
    gpu: GPU | None,
    budget: int | None,
    settings: AllocatorSettings,
    phases: Sequence[str],
    seconds: float,
) -> Estimate:
    """Replay a timeline through the allocator and compare it with the budget."""
    shown = replay(timeline, settings) if gpu is not None else add_up(timeline)
    overhead = device_overhead(gpu)
    doubt = uncertainty(timeline, gpu, expandable=settings.expandable_segments)

    def ledgers(peak: PhasePeak) -> Ledgers:
        return Ledgers(
            allocated=peak.allocated,
            reserved=peak.reserved,
            device=peak.reserved + overhead.expected,
        )

    highest = shown.peak(phases)
    alive = timeline.alive_at(highest.event)
    newest = max(alive, key=lambda block: block.birth, default=None)
    verdict, within = _verdict(timeline, settings, budget, gpu, overhead, doubt, highest)
    if verdict == "fits" and timeline.warnings:
        verdict = "inconclusive"
    return Estimate(
        job=job,
        gpu=gpu.name if gpu is not None else None,
        allocator=settings.as_text(),
        verdict=verdict,
        budget=budget,
        peak=ledgers(highest),
        interval=_intervals(timeline, settings, phases, highest, overhead, doubt),
        interval_reasons=(*doubt.reasons, *overhead.reasons),
        phases={name: ledgers(shown.phases[name]) for name in phases if name in shown.phases},
        categories_at_peak=_totals((str(block.category), block.size) for block in alive),
        modules_at_peak=_totals((_anonymous(block.module), block.size) for block in alive),
        peak_at=PeakAt(
            phase=timeline.span_at(highest.event),
            module=newest.module if newest else "",
            op=newest.op if newest else "",
            event=highest.event,
        ),
        fragmentation=highest.fragmentation,
        allocator_retries=within.retries,
        step_retries=within.step_retries,
        smallest_budget=_smallest_budget(timeline, settings, gpu, overhead, doubt, highest),
        warnings=tuple(timeline.warnings),
        notes=tuple(timeline.notes),
        seconds=seconds,
        timeline=timeline,
    )


def _intervals(
    timeline: Timeline,
    settings: AllocatorSettings,
    phases: Sequence[str],
    peak: PhasePeak,
    overhead: DeviceOverhead,
    doubt: Uncertainty,
) -> dict[str, Interval]:
    """What the job could take if every doubtful workspace were absent, or twice as large."""
    # Larger workspaces can leave a better-fitting cache: the predicted peak counts as well.
    peaks = [peak]
    if doubt.doubtful:
        peaks += [replay(timeline, settings, doubtful=size).peak(phases) for size in (0.0, 2.0)]
    allocated = Interval(
        low=int(min(p.allocated for p in peaks) * (1 - doubt.allocated)),
        high=int(max(p.allocated for p in peaks) * (1 + doubt.allocated)) + doubt.unchecked,
    )
    reserved = Interval(
        low=max(int(min(p.reserved for p in peaks) * (1 - doubt.reserved)), allocated.low),
        high=int(max(p.reserved for p in peaks) * (1 + doubt.reserved)) + doubt.unchecked,
    )
    device = Interval(low=reserved.low + overhead.low, high=reserved.high + overhead.high)
    return {"allocated": allocated, "reserved": reserved, "device": device}


def _verdict(
    timeline: Timeline,
    settings: AllocatorSettings,
    budget: int | None,
    gpu: GPU | None,
    overhead: DeviceOverhead,
    doubt: Uncertainty,
    peak: PhasePeak,
) -> tuple[Verdict, Replay]:
    """The verdict, and the replay at the cap.

    At the cap the allocator returns its cached blocks before it fails, so a job can fit although it
    would reserve more without a cap: the verdict replays what happens at the cap, once with the
    smallest cap that the interval allows for and once with the largest.
    """
    if budget is None:
        return "fits", Replay(phases={})
    if gpu is None:
        return ("fits" if peak.allocated <= budget else "does_not_fit"), Replay(phases={})
    surely = _replay_surely(timeline, settings, budget, overhead, doubt)
    if surely is not None:
        return "fits", surely
    lucky = int((budget - overhead.low) / (1 - doubt.reserved))
    perhaps = replay_within(timeline, settings, lucky, doubtful=0.0)
    return ("inconclusive", perhaps) if perhaps is not None else ("does_not_fit", Replay(phases={}))


def surely_fits(timeline: Timeline, *, gpu: GPU, budget: int, settings: AllocatorSettings) -> bool:
    """Whether `judge` would say "fits": cheaper, as it needs only part of the replays."""
    doubt = uncertainty(timeline, gpu, expandable=settings.expandable_segments)
    overhead = device_overhead(gpu)
    return _replay_surely(timeline, settings, budget, overhead, doubt) is not None


def _replay_surely(
    timeline: Timeline,
    settings: AllocatorSettings,
    budget: int,
    overhead: DeviceOverhead,
    doubt: Uncertainty,
) -> Replay | None:
    """The replay within the budget at the interval's worst case; None if it does not fit."""
    sure = int((budget - overhead.high - doubt.unchecked) / (1 + doubt.reserved))
    return replay_within(timeline, settings, sure, doubtful=2.0)


def _smallest_budget(
    timeline: Timeline,
    settings: AllocatorSettings,
    gpu: GPU | None,
    overhead: DeviceOverhead,
    doubt: Uncertainty,
    peak: PhasePeak,
) -> int:
    """The least device memory with which the job surely runs, to within 1 %."""
    if gpu is None:
        return peak.allocated
    low, high = peak.allocated, max(peak.reserved, 1)
    # Before an expandable segment grows, the whole request is checked against the cap, although
    # part of it may be mapped already: the memory reserved without a cap may not be enough as a
    # cap.
    stride = max(peak.reserved // 20, SHARED_SEGMENT)
    while replay_within(timeline, settings, high, doubtful=2.0) is None:
        assert high < MOST_MEMORY, "an allocator without a cap had enough"
        low, high, stride = high, high + stride, 2 * stride
    while high - low > max(peak.reserved // 100, 1):
        middle = (low + high) // 2
        if replay_within(timeline, settings, middle, doubtful=2.0) is None:
            low = middle
        else:
            high = middle
    # One byte more, for rounding in the division that `_verdict` makes.
    return int(high * (1 + doubt.reserved)) + 1 + doubt.unchecked + overhead.high


def _totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by name, largest first."""
    totals: dict[str, int] = defaultdict(int)
    for name, size in pairs:
        totals[name] += size
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _anonymous(module: str) -> str:
    """`model.layers.*.mlp`: blocks that differ only in their number count together."""
    parts = ("*" if part.isdigit() else part for part in module.split("."))
    return ".".join(parts) or "(outside the model)"
