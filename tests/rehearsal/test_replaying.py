"""What a replay says of the allocator's cleaning up: how often in all, and how often in a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.replaying import replay_within
from oomph.rehearsal.timeline import END_OF_STEP, Block, Mark, Timeline

MIB = 1 << 20


def steps(*each: Sequence[int]) -> Timeline:
    """Steps that allocate so many MiB and free them again, one after the other."""
    timeline = Timeline()
    for sizes in each:
        for size in sizes:
            birth, timeline.events = timeline.events, timeline.events + 2
            timeline.blocks.append(Block(size=size * MIB, birth=birth, death=birth + 1))
        timeline.marks.append(Mark(END_OF_STEP, timeline.events, 0.0, 0))
    return timeline


@pytest.mark.parametrize(
    ("timeline", "retries", "in_a_step"),
    [
        (steps([30]), 0, 0),
        (steps([30, 40], [30, 40], [30, 40]), 1, 0),
        (steps([30, 40], [30, 40], [30, 45]), 2, 1),
        (steps([30, 40]), 1, 1),
    ],
)
def test_cleaning_up_is_counted_in_all_and_in_the_last_step(
    timeline: Timeline, retries: int, in_a_step: int
) -> None:
    within = replay_within(timeline, AllocatorSettings(), 60 * MIB)
    assert within is not None
    assert (within.retries, within.step_retries) == (retries, in_a_step)


def test_what_does_not_fit_is_not_replayed_to_its_end() -> None:
    assert replay_within(steps([30, 40]), AllocatorSettings(), 35 * MIB) is None
