"""A timeline, replayed through the allocator: what each phase would allocate and reserve."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from oomph.rehearsal.allocator import Allocator, AllocatorSettings, OutOfMemory
from oomph.rehearsal.timeline import END_OF_STEP, Timeline


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The most one phase held, and when."""

    allocated: int = 0
    reserved: int = 0
    fragmentation: float = 0.0
    event: int = 0


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What replaying a timeline showed."""

    phases: dict[str, PhasePeak]
    retries: int = 0
    """How often the allocator cleaned up its cache."""
    step_retries: int = 0
    """How often in the last step of them."""

    def peak(self, phases: Collection[str]) -> PhasePeak:
        """The most that any of these phases held; `event` is that of the peak of allocated."""
        among = [peak for name, peak in self.phases.items() if name in phases]
        top = max(among, key=lambda peak: peak.allocated, default=PhasePeak())
        widest = max(among, key=lambda peak: peak.reserved, default=PhasePeak())
        return PhasePeak(
            allocated=top.allocated,
            reserved=widest.reserved,
            fragmentation=widest.fragmentation,
            event=top.event,
        )


def replay(
    timeline: Timeline,
    settings: AllocatorSettings,
    *,
    cap: int | None = None,
    doubtful: float = 1.0,
) -> Replay:
    """Every birth and death of the timeline, in order, given to a caching allocator.

    `doubtful` scales scratch whose size a library chooses by itself: 0 leaves it out, 2 doubles it.
    """
    allocator = Allocator(settings, cap=cap)
    handles: dict[int, int] = {}
    phases: dict[str, PhasePeak] = {}
    highest, at = 0, 0
    spans = sorted(timeline.spans, key=lambda span: span.start)
    emptied = list(timeline.emptied)
    steps = [mark.event for mark in timeline.marks if mark.name == END_OF_STEP]
    ends = []

    def close_span() -> None:
        nonlocal highest
        stats = allocator.stats
        name = spans.pop(0).name
        before = phases.get(name, PhasePeak())  # a script may come back to a phase
        risen = stats.peak_allocated > before.allocated
        widened = stats.peak_reserved > before.reserved
        phases[name] = PhasePeak(
            allocated=max(stats.peak_allocated, before.allocated),
            reserved=max(stats.peak_reserved, before.reserved),
            fragmentation=stats.fragmentation if widened else before.fragmentation,
            event=at if risen else before.event,
        )
        allocator.reset_peaks()
        highest = 0

    for event, block, is_birth in timeline.stream_of_events():
        while spans and event >= spans[0].stop:
            close_span()
        while emptied and event >= emptied[0]:
            emptied.pop(0)
            allocator.empty_cache()
        while steps and event >= steps[0]:
            steps.pop(0)
            ends.append(allocator.stats.retries)
        if is_birth:
            size = int(block.size * doubtful) if block.doubtful else block.size
            handles[id(block)] = allocator.malloc(size, block.stream)
        else:
            allocator.free(handles.pop(id(block)))
        if allocator.allocated > highest:
            highest, at = allocator.allocated, event
    while spans:
        close_span()
    ends += [allocator.stats.retries] * len(steps)
    before, after = [0, 0, *ends][-2:]
    return Replay(phases=phases, retries=allocator.stats.retries, step_retries=after - before)


def replay_within(
    timeline: Timeline, settings: AllocatorSettings, cap: int, *, doubtful: float = 1.0
) -> Replay | None:
    """What happens when the allocator may reserve `cap`, or None if that is not enough."""
    if cap <= 0:
        return None
    try:
        return replay(timeline, settings, cap=cap, doubtful=doubtful)
    except OutOfMemory:
        return None


def add_up(timeline: Timeline) -> Replay:
    """The replay of a rehearsal for the CPU, whose allocator rounds and caches nothing."""
    phases: dict[str, PhasePeak] = {}
    spans = sorted(timeline.spans, key=lambda span: span.start)
    now = at = 0
    highest = 0

    def close_span() -> None:
        nonlocal highest
        name = spans.pop(0).name
        before = phases.get(name, PhasePeak())
        if highest >= before.allocated:
            phases[name] = PhasePeak(allocated=highest, reserved=highest, event=at)
        highest = now  # what a phase finds counts as its own, too

    for event, block, is_birth in timeline.stream_of_events():
        while spans and event >= spans[0].stop:
            close_span()
        now += block.size if is_birth else -block.size
        if now > highest:
            highest, at = now, event
    while spans:
        close_span()
    return Replay(phases=phases)
