"""What a step of a timeline takes: of the card, of its host, of the link and of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oomph.planning.pace import Pace
from oomph.rehearsal.allocator.replay import GRAPH_POOL
from oomph.rehearsal.recorder import FORWARD
from oomph.rehearsal.timeline import END_OF_STEP, Block, Category, Mark, Timeline
from oomph.timing.clock import Clock

#: The CUDA allocator hands out multiples of this.
ROUNDING = 512
#: Where the backward of a micro-batch is over.
END_OF_BACKWARD = "end of backward"


@dataclass(frozen=True)
class Effort:
    """What a part of a step costs the card and the host that drives it."""

    kernels: float
    """Seconds."""
    launches: float
    sent: int
    """Bytes that leave for the host."""
    brought: int

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            self.kernels + other.kernels,
            self.launches + other.launches,
            self.sent + other.sent,
            self.brought + other.brought,
        )

    def __mul__(self, times: int) -> Effort:
        return Effort(
            times * self.kernels, times * self.launches, times * self.sent, times * self.brought
        )

    def __sub__(self, other: Effort) -> Effort:
        return self + other * -1

    def pace(self, launch: float) -> Pace:
        """Where the host takes so many seconds for a launch."""
        return Pace(self.kernels, self.launches * launch)

    def seconds(self, clock: Clock) -> float:
        """Of both together, by a clock."""
        return self.pace(clock.launch).seconds


def step_effort(timeline: Timeline, parts: int) -> Effort:
    """A step of so many micro-batches, of which only the first few were rehearsed."""
    starts, done = last_step(timeline)
    whole = effort_between(_end_of_the_step_before(timeline, starts[0]), done)
    missing = parts - len(starts)
    if not missing:
        return whole
    one, _ = part_and_step(timeline)
    return whole + one * missing


def _end_of_the_step_before(timeline: Timeline, start: Mark) -> Mark:
    """Gradients may be set to zero between the two, which belongs to the step as well."""
    before = timeline.marks[: timeline.marks.index(start)]
    return next((mark for mark in reversed(before) if mark.name == END_OF_STEP), start)


def part_and_step(timeline: Timeline) -> tuple[Effort, Effort]:
    """One micro-batch, and the optimizer step after the last of them.

    The first one makes the gradients, and those after it, which are more, add to them.
    """
    starts, done = last_step(timeline)
    last = effort_between(starts[-1], done)
    if len(starts) == 1:  # nothing to tell the two apart by, and no need to
        return last, last - last
    over = end_of_backward(timeline, starts[-1])
    if over is None or timeline.host_bytes:  # the last one steps inside of its backward
        part = effort_between(starts[-2], starts[-1])
    else:
        part = effort_between(starts[-1], over)
    return part, last - part


def end_of_backward(timeline: Timeline, start: Mark) -> Mark | None:
    """Where the optimizer's step begins, which may go in several pieces; None without one."""
    over = (mark for mark in timeline.marks if mark.name == END_OF_BACKWARD)
    return next((mark for mark in over if mark.event >= start.event), None)


def last_step(timeline: Timeline) -> tuple[list[Mark], Mark]:
    """Where the micro-batches of the last step begin, and where it ends."""
    starts: list[Mark] = []
    steps = []
    for mark in timeline.marks:
        if mark.name == FORWARD:
            starts.append(mark)
        elif mark.name == END_OF_STEP:
            steps.append((starts, mark))
            starts = []
    return steps[-1]


def effort_between(start: Mark, stop: Mark) -> Effort:
    """From one mark to another."""
    return Effort(
        stop.seconds - start.seconds,
        stop.launches - start.launches,
        stop.sent - start.sent,
        stop.brought - start.brought,
    )


def peak_allocated(timeline: Timeline) -> int:
    """The most bytes alive in the last step."""
    starts, done = last_step(timeline)
    return Alive.of(timeline).peak(starts[0], done)


def peak_taken(timeline: Timeline) -> int:
    """The same with what a graph keeps for its replays, whether or not it is alive there."""
    starts, done = last_step(timeline)
    in_graph = Alive.of(timeline, lambda block: block.stream >= GRAPH_POOL)
    others = Alive.of(timeline, lambda block: block.stream < GRAPH_POOL)
    return in_graph.most + others.peak(starts[0], done)


@dataclass(frozen=True)
class Alive:
    """Bytes alive after each event."""

    values: Any

    @classmethod
    def of(cls, timeline: Timeline, counts: Callable[[Block], bool] = lambda _: True) -> Alive:
        """As the allocator rounds them; of all blocks, or of those that count."""
        change = np.zeros(timeline.events + 1, dtype=np.int64)
        for block in filter(counts, timeline.blocks):
            size = rounded(block.size)
            # A workspace stays once it is there: but for the first step, from the beginning.
            change[block.birth if block.category is not Category.WORKSPACE else 0] += size
            if block.death is not None:
                change[block.death] -= size
        return cls(np.cumsum(change))

    @property
    def most(self) -> int:
        """At any time."""
        return int(self.values.max())

    def at(self, mark: Mark) -> int:
        """When it was made."""
        return int(self.values[mark.event - 1]) if mark.event else 0

    def peak(self, start: Mark, stop: Mark) -> int:
        """The most between two marks."""
        return self.peak_between(start.event, stop.event)

    def peak_between(self, start: int, stop: int) -> int:
        """The most from when event `start` is about to happen until `stop` is."""
        return int(self.values[max(start - 1, 0) : max(stop, start, 1)].max())


def rounded(size: int) -> int:
    """What the allocator makes of so many bytes."""
    return -(-size // ROUNDING) * ROUNDING
