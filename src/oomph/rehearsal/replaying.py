"""Replays a timeline through the allocator: what each phase would allocate and reserve."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from oomph.rehearsal.allocator import Allocator, AllocatorSettings, OutOfMemory
from oomph.rehearsal.allocator.replay import GRAPH_POOL
from oomph.rehearsal.timeline import END_OF_STEP, Block, Timeline

#: Bytes that a step may leave in excess of what it found and still count as repeatable.
SETTLED = 1 << 20
#: Steps that follow the rehearsed ones. Replaying one of them shows what all of them need: one or
#: two more changed nothing in 16 plans without a graph.
LATER_STEPS = "later steps"


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The most memory one phase held, and when."""

    allocated: int = 0
    reserved: int = 0
    fragmentation: float = 0.0
    event: int = 0


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of replaying a timeline."""

    phases: dict[str, PhasePeak]
    retries: int = 0
    """How often the allocator had to return its cache to the driver."""
    step_retries: int = 0
    """How often in the last of the steps."""

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
    """Replay every birth and death of the timeline, in order, in a caching allocator.

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
        before = phases.get(name, PhasePeak())  # a script may return to a phase
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

    events = list(timeline.stream_of_events())

    def come_to(event: float) -> None:
        while steps and event >= steps[0]:
            steps.pop(0)
            ends.append(allocator.stats.retries)
        while spans and event >= spans[0].stop:
            if spans[0].name == LATER_STEPS:
                ends.append(allocator.stats.retries)
                _Step(timeline, events).repeat(allocator, handles, doubtful)
                ends.append(allocator.stats.retries)
            close_span()

    def next_stop() -> float:
        stops = [*steps[:1], *emptied[:1], *(span.stop for span in spans[:1])]
        return min(stops, default=math.inf)

    stop = next_stop()
    for event, block, is_birth in events:
        if event >= stop:  # compared for every event, so it is one precomputed number
            come_to(event)
            while emptied and event >= emptied[0]:
                emptied.pop(0)
                allocator.empty_cache()
            stop = next_stop()
        if is_birth:
            handles[id(block)] = allocator.malloc(_size(block, doubtful), block.stream)
        else:
            allocator.free(handles.pop(id(block)))
        if allocator.allocated > highest:
            highest, at = allocator.allocated, event
    come_to(math.inf)
    before, after = [0, 0, *ends][-2:]
    return Replay(phases=phases, retries=allocator.stats.retries, step_retries=after - before)


def _size(block: Block, doubtful: float) -> int:
    return int(block.size * doubtful) if block.doubtful else block.size


class _Step:
    """A timeline's last step, to be repeated: each time it finds a different cache.

    The next step splits the free blocks that one step leaves in the cache, so memory is reserved
    that two steps did not need. From then on a step usually finds what it needs.
    """

    def __init__(self, timeline: Timeline, events: Sequence[tuple[int, Block, bool]]) -> None:
        ends = [mark.event for mark in timeline.marks if mark.name == END_OF_STEP]
        start, stop = [0, 0, *ends][-2:]
        self._events = [
            (block, is_birth)
            for event, block, is_birth in events
            # A graph is captured only once.
            if start <= event < stop and block.stream < GRAPH_POOL
        ]
        born = {id(block): block for block, is_birth in self._events if is_birth}
        died = {id(block): block for block, is_birth in self._events if not is_birth}
        #: Blocks that the step leaves; the next step frees them by size, as this one freed its
        #: predecessor's.
        self._left = [key for key in born if key not in died]
        left = defaultdict(list)
        for key in reversed(self._left):
            left[_like(born[key])].append(key)
        #: By found and freed block: the block of equal size that the step leaves in its place.
        self._goes = {
            key: left[_like(block)].pop()
            for key, block in died.items()
            if key not in born and left[_like(block)]
        }
        if sum(size * len(keys) for (size, _), keys in left.items()) > SETTLED:
            # The next step would find more than this one did, and behave differently.
            self._events, self._left = [], []

    def repeat(self, allocator: Allocator, handles: dict[int, int], doubtful: float) -> None:
        """Repeat the step; blocks left before are freed where the step freed its predecessor's."""
        mine: dict[int, int] = {}
        left = {key: handles[key] for key in self._left}
        for block, is_birth in self._events:
            key = id(block)
            if is_birth:
                mine[key] = allocator.malloc(_size(block, doubtful), block.stream)
            elif key in mine:
                allocator.free(mine.pop(key))
            elif (other := self._goes.get(key)) in left:
                allocator.free(left.pop(other))
        for handle in left.values():
            allocator.free(handle)
        handles.update(mine)


def _like(block: Block) -> tuple[int, int]:
    return block.size, block.stream


def replay_within(
    timeline: Timeline, settings: AllocatorSettings, cap: int, *, doubtful: float = 1.0
) -> Replay | None:
    """The replay if the allocator may reserve `cap`, or None if that is not enough."""
    if cap <= 0:
        return None
    try:
        return replay(timeline, settings, cap=cap, doubtful=doubtful)
    except OutOfMemory:
        return None


def add_up(timeline: Timeline) -> Replay:
    """The replay of a rehearsal for the CPU, whose allocator neither rounds nor caches."""
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
        highest = now  # memory that a phase finds counts as its own, too

    for event, block, is_birth in timeline.stream_of_events():
        while spans and event >= spans[0].stop:
            close_span()
        now += block.size if is_birth else -block.size
        if now > highest:
            highest, at = now, event
    while spans:
        close_span()
    return Replay(phases=phases)
