"""Will it fit? A rehearsal replayed through the allocator, with a verdict and an interval."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oomph.gpus import GPU, find_gpu
from oomph.job import Job
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.allocator.replay import SHARED_SEGMENT
from oomph.rehearsal.hidden import DeviceOverhead, Uncertainty, device_overhead, uncertainty
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.replaying import PhasePeak, Replay, add_up, replay, replay_within
from oomph.rehearsal.timeline import Timeline
from oomph.units import parse_bytes

SCHEMA_VERSION = 1
Verdict = Literal["fits", "does_not_fit", "inconclusive"]
LEDGERS = ("allocated", "reserved", "device")


@dataclass(frozen=True, kw_only=True)
class Ledgers:
    """One amount of memory, counted in the three ways that are never mixed."""

    allocated: int
    """What PyTorch handed out, as `torch.cuda.memory_allocated` counts it."""
    reserved: int
    """What its allocator took from the driver."""
    device: int
    """What `nvidia-smi` shows: reserved, the CUDA context and loaded kernels."""

    def as_dict(self) -> dict[str, int]:
        """Plain numbers by ledger."""
        return {name: getattr(self, name) for name in LEDGERS}


@dataclass(frozen=True, kw_only=True)
class PeakAt:
    """Where the peak of allocated memory is."""

    phase: str
    module: str
    op: str
    event: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The range a prediction should not leave, and why it is that wide."""

    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
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
    """Reserved but not allocated, as a part of reserved, at the peak of reserved."""
    allocator_retries: int
    """Times the allocator had to give cached blocks back to stay inside the budget."""
    step_retries: int
    """How often it has to in each step, once the first ones are over."""
    smallest_budget: int
    """The least device memory, cached blocks given back, with which it would run."""
    notes: tuple[str, ...]
    seconds: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether the verdict is that it fits."""
        return self.verdict == "fits"

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON; these keys stay."""
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
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def save_html(self, path: str | Path) -> None:
        """Write a report as one HTML file that needs nothing else."""
        from oomph.reporting.page.document import save_page
        from oomph.reporting.page.sources import page_of_estimate

        save_page(page_of_estimate(self), path)

    def export(self, path: str | Path) -> None:
        """Write memory over time for other programs: .csv, .json, .perfetto.json or .pickle."""
        from oomph.reporting.exports.formats import save_export
        from oomph.reporting.history import history_of

        save_export(history_of(self), path)

    def __str__(self) -> str:
        from oomph.reporting.text import render_text

        return render_text(self)

    def _repr_html_(self) -> str:
        from oomph.reporting.html import render_html

        return render_html(self)


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
    # Larger workspaces can leave a better-fitting cache behind: the predicted peak counts as well.
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
    """Whether it fits, and what happens then.

    At the cap the allocator gives its cached blocks back before it fails, so a job can fit although
    it would reserve more without one: the verdict replays what happens at the cap, once with the
    least that is allowed for and once with the most.
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
    """Whether `judge` would say that it fits, and no more: a part of its replays tells."""
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
    """What happens within the budget with the most that the interval allows for, if it fits."""
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
    """The least device memory with which it surely runs, to within 1 %."""
    if gpu is None:
        return peak.allocated
    low, high = peak.allocated, peak.reserved
    # Before an expandable segment grows, the whole request is held against the cap, although part
    # of it may be mapped already: what was reserved without a cap may not be enough under one.
    while replay_within(timeline, settings, high, doubtful=2.0) is None:
        low, high = high, high + max(peak.reserved // 20, SHARED_SEGMENT)
    while high - low > peak.reserved // 100:
        middle = (low + high) // 2
        if replay_within(timeline, settings, middle, doubtful=2.0) is None:
            low = middle
        else:
            high = middle
    # One byte more for the rounding of the division that `_verdict` makes.
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
