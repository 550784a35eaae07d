"""The cost of a timeline's step: on the card, on its host, over the link, and in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oomph.hardware.timing.clock import Clock
from oomph.hardware.timing.step_time import StepTime
from oomph.rehearsal.allocator.replay import GRAPH_POOL
from oomph.rehearsal.recorder import FORWARD
from oomph.rehearsal.timeline import END_OF_STEP, Block, Category, Mark, Timeline

#: The CUDA allocator hands out multiples of this many bytes.
ROUNDING = 512
#: The name of the mark at the end of a micro-batch's backward pass.
END_OF_BACKWARD = "end of backward"


@dataclass(frozen=True)
class StepCost:
    """What a part of a step costs the card and the host that drives it."""

    kernels: float
    """In seconds."""
    launches: float
    sent: int
    """Bytes copied to the host; `brought` counts those copied back."""
    brought: int

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.kernels + other.kernels,
            self.launches + other.launches,
            self.sent + other.sent,
            self.brought + other.brought,
        )

    def __mul__(self, times: int) -> StepCost:
        return StepCost(
            times * self.kernels, times * self.launches, times * self.sent, times * self.brought
        )

    def __sub__(self, other: StepCost) -> StepCost:
        return self + other * -1

    def step_time(self, launch: float) -> StepTime:
        """The step's time if one launch takes the host `launch` seconds."""
        return StepTime(self.kernels, self.launches * launch)

    def seconds(self, clock: Clock) -> float:
        """Time for the card and the host together, by this clock."""
        return self.step_time(clock.launch).seconds


def step_cost(timeline: Timeline, parts: int) -> StepCost:
    """The cost of a step of `parts` micro-batches, of which only the first few were rehearsed."""
    starts, done = last_step(timeline)
    whole = cost_between(_end_of_the_step_before(timeline, starts[0]), done)
    missing = parts - len(starts)
    if not missing:
        return whole
    one, _ = part_and_step(timeline)
    return whole + one * missing


def _end_of_the_step_before(timeline: Timeline, start: Mark) -> Mark:
    """The previous step's end: zeroing gradients between the two belongs to this step as well."""
    before = timeline.marks[: timeline.marks.index(start)]
    return next((mark for mark in reversed(before) if mark.name == END_OF_STEP), start)


def part_and_step(timeline: Timeline) -> tuple[StepCost, StepCost]:
    """The cost of one micro-batch, and of the optimizer step after the last micro-batch.

    The first micro-batch creates the gradients; all later ones, the majority, add to them.
    """
    starts, done = last_step(timeline)
    last = cost_between(starts[-1], done)
    if len(starts) == 1:  # one mark cannot separate the two, and need not
        return last, last - last
    over = end_of_backward(timeline, starts[-1])
    if over is None or timeline.host_bytes:  # the last one runs optimizer steps within its backward
        part = cost_between(starts[-2], starts[-1])
    else:
        part = cost_between(starts[-1], over)
    return part, last - part


def end_of_backward(timeline: Timeline, start: Mark) -> Mark | None:
    """The mark where the optimizer step begins, possibly in several pieces; None without one."""
    over = (mark for mark in timeline.marks if mark.name == END_OF_BACKWARD)
    return next((mark for mark in over if mark.event >= start.event), None)


def last_step(timeline: Timeline) -> tuple[list[Mark], Mark]:
    """Marks of where the last step's micro-batches begin, and of where that step ends."""
    starts: list[Mark] = []
    steps = []
    for mark in timeline.marks:
        if mark.name == FORWARD:
            starts.append(mark)
        elif mark.name == END_OF_STEP:
            steps.append((starts, mark))
            starts = []
    return steps[-1]


def cost_between(start: Mark, stop: Mark) -> StepCost:
    """The cost from one mark to another."""
    return StepCost(
        stop.seconds - start.seconds,
        stop.launches - start.launches,
        stop.sent - start.sent,
        stop.brought - start.brought,
    )


def peak_allocated(timeline: Timeline) -> int:
    """The most bytes alive at once in the last step."""
    starts, done = last_step(timeline)
    return Alive.of(timeline).peak(starts[0], done)


def peak_taken(timeline: Timeline) -> int:
    """The same, plus all that a CUDA graph keeps for its replays, whether or not alive then."""
    starts, done = last_step(timeline)
    in_graph = Alive.of(timeline, lambda block: block.stream >= GRAPH_POOL)
    others = Alive.of(timeline, lambda block: block.stream < GRAPH_POOL)
    return in_graph.most + others.peak(starts[0], done)


@dataclass(frozen=True)
class Alive:
    """The number of bytes alive after each event."""

    values: Any

    @classmethod
    def of(cls, timeline: Timeline, counts: Callable[[Block], bool] = lambda _: True) -> Alive:
        """Sum the allocator's rounded sizes, over all blocks or those `counts` accepts."""
        change = np.zeros(timeline.events + 1, dtype=np.int64)
        for block in filter(counts, timeline.blocks):
            size = rounded(block.size)
            # A workspace stays once it is allocated: after the first step it is there from the
            # beginning.
            change[block.birth if block.category is not Category.WORKSPACE else 0] += size
            if block.death is not None:
                change[block.death] -= size
        return cls(np.cumsum(change))

    @property
    def most(self) -> int:
        """The most bytes alive at any time."""
        return int(self.values.max())

    def at(self, mark: Mark) -> int:
        """The bytes alive when the mark was made."""
        return int(self.values[mark.event - 1]) if mark.event else 0

    def peak(self, start: Mark, stop: Mark) -> int:
        """The most bytes alive between two marks."""
        return self.peak_between(start.event, stop.event)

    def peak_between(self, start: int, stop: int) -> int:
        """The most bytes alive from just before event `start` to just before event `stop`."""
        return int(self.values[max(start - 1, 0) : max(stop, start, 1)].max())


def rounded(size: int) -> int:
    """The size to which the allocator rounds so many bytes."""
    return -(-size // ROUNDING) * ROUNDING
