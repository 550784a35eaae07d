"""Will it fit? A rehearsal replayed through the allocator, with a verdict and an interval."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oomph.gpus import GPU, find_gpu
from oomph.job import Job
from oomph.rehearsal.allocator import Allocator, AllocatorSettings, OutOfMemory
from oomph.rehearsal.hidden import DeviceOverhead, Uncertainty, device_overhead, uncertainty
from oomph.rehearsal.phases import PHASES, rehearse
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
            "smallest_budget": self.smallest_budget,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        from oomph.reporting.text import render_text

        return render_text(self)

    def _repr_html_(self) -> str:
        from oomph.reporting.text import render_html

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
    replay = _replay(timeline, settings)
    overhead = device_overhead(gpu)
    doubt = uncertainty(timeline, gpu, replay.peak_event)

    def ledgers(allocated: int, reserved: int) -> Ledgers:
        if gpu is None:  # the CPU has no caching allocator: tensor bytes are all there is
            return Ledgers(allocated=allocated, reserved=allocated, device=allocated)
        return Ledgers(allocated=allocated, reserved=reserved, device=reserved + overhead.expected)

    peak = ledgers(replay.allocated, replay.reserved)
    interval = _intervals(peak, overhead, doubt)
    alive = timeline.alive_at(replay.peak_event)
    first = next((block for block in alive if block.birth == replay.peak_event), None)
    verdict, retries = _verdict(timeline, settings, budget, gpu, overhead, doubt, interval)
    return Estimate(
        job=job,
        gpu=gpu.name if gpu is not None else None,
        verdict=verdict,
        budget=budget,
        peak=peak,
        interval=interval,
        interval_reasons=(*doubt.reasons, *overhead.reasons),
        phases={name: ledgers(*replay.phases[name]) for name in phases if name in replay.phases},
        categories_at_peak=_totals((str(block.category), block.size) for block in alive),
        modules_at_peak=_totals((_anonymous(block.module), block.size) for block in alive),
        peak_at=PeakAt(
            phase=timeline.span_at(replay.peak_event),
            module=first.module if first else "",
            op=first.op if first else "",
            event=replay.peak_event,
        ),
        fragmentation=replay.fragmentation if gpu is not None else 0.0,
        allocator_retries=retries,
        smallest_budget=_smallest_budget(timeline, settings, gpu, overhead, peak),
        notes=tuple(timeline.notes),
        seconds=seconds,
        timeline=timeline,
    )


def _intervals(peak: Ledgers, overhead: DeviceOverhead, doubt: Uncertainty) -> dict[str, Interval]:
    allocated = Interval(
        low=int(peak.allocated * (1 - doubt.relative)) - doubt.below,
        high=int(peak.allocated * (1 + doubt.relative)) + doubt.above,
    )
    reserved = Interval(
        low=max(int(peak.reserved * (1 - doubt.reserved)) - doubt.below, allocated.low),
        high=int(peak.reserved * (1 + doubt.reserved)) + doubt.above,
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
    interval: dict[str, Interval],
) -> tuple[Verdict, int]:
    """Whether it fits, and how often the allocator has to clean up to make it so.

    At the cap the allocator gives its cached blocks back before it fails, so a job can fit although
    it would reserve more without one: the verdict replays what happens at the cap.
    """
    if budget is None or interval["device"].high <= budget:
        return "fits", 0
    if gpu is None:
        return ("does_not_fit" if interval["device"].low > budget else "inconclusive"), 0
    surely = _runs_within(timeline, settings, budget - overhead.high, slack=doubt.above)
    if surely is not None:
        return "fits", surely
    perhaps = _runs_within(timeline, settings, budget - overhead.low, slack=-doubt.below)
    return ("inconclusive", perhaps) if perhaps is not None else ("does_not_fit", 0)


def _runs_within(
    timeline: Timeline, settings: AllocatorSettings, cap: int, slack: int = 0
) -> int | None:
    """The allocator's retries when it may reserve `cap` less `slack`, or None if it fails."""
    if cap - slack <= 0:
        return None
    try:
        return _replay(timeline, settings, cap=cap - slack).retries
    except OutOfMemory:
        return None


def _smallest_budget(
    timeline: Timeline,
    settings: AllocatorSettings,
    gpu: GPU | None,
    overhead: DeviceOverhead,
    peak: Ledgers,
) -> int:
    """The least device memory with which it would run, to within 1 %."""
    if gpu is None:
        return peak.device
    low, high = peak.allocated, peak.reserved
    while high - low > peak.reserved // 100:
        middle = (low + high) // 2
        if _runs_within(timeline, settings, middle) is None:
            low = middle
        else:
            high = middle
    return high + overhead.high


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


@dataclass(frozen=True, kw_only=True)
class _Replay:
    """What replaying a timeline through the allocator showed."""

    phases: dict[str, tuple[int, int]]
    allocated: int
    reserved: int
    peak_event: int
    fragmentation: float
    retries: int


def _replay(timeline: Timeline, settings: AllocatorSettings, cap: int | None = None) -> _Replay:
    allocator = Allocator(settings, cap=cap)
    handles: dict[int, int] = {}
    peaks: dict[str, tuple[int, int]] = {}
    highest, peak_event = 0, 0
    reserved, fragmentation = 0, 0.0
    spans = sorted(timeline.spans, key=lambda span: span.start)

    def close_span() -> None:
        nonlocal reserved, fragmentation
        stats = allocator.stats
        peaks[spans.pop(0).name] = (stats.peak_allocated, stats.peak_reserved)
        if stats.peak_reserved > reserved:
            reserved, fragmentation = stats.peak_reserved, stats.fragmentation
        allocator.reset_peaks()

    for event, block, is_birth in timeline.stream_of_events():
        while spans and event >= spans[0].stop:
            close_span()
        if not is_birth:
            allocator.free(handles.pop(id(block)))
            continue
        handles[id(block)] = allocator.malloc(block.size, block.stream)
        if allocator.allocated > highest:
            highest, peak_event = allocator.allocated, event
    while spans:
        close_span()
    return _Replay(
        phases=peaks,
        allocated=highest,
        reserved=reserved,
        peak_event=peak_event,
        fragmentation=fragmentation,
        retries=allocator.stats.retries,
    )
