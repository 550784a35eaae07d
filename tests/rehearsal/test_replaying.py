"""What a replay says of the allocator: how often it cleans up, and what later steps reserve."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.replaying import LATER_STEPS, replay, replay_within
from oomph.rehearsal.timeline import END_OF_STEP, Block, Mark, Span, Timeline

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


#: Blocks of a step: MiB, and the moments in which each is made and freed.
STEP = [(500, 0, 4), (700, 1, 8), (1000, 5, 6)]
#: What the first step leaves for good, as an optimizer its state.
STATE = [100, 500]


def training(count: int) -> Timeline:
    """So many steps alike; the first one makes the state."""
    timeline = Timeline()
    for at in range(count):
        start = timeline.events
        timeline.blocks += [
            Block(size=size * MIB, birth=start + birth, death=start + death)
            for size, birth, death in STEP
        ]
        timeline.events += 1 + max(death for *_, death in STEP)
        for size in STATE if at == 0 else ():
            timeline.blocks.append(Block(size=size * MIB, birth=timeline.events))
            timeline.events += 1
        timeline.marks.append(Mark(END_OF_STEP, timeline.events, 0.0, 0))
    timeline.spans.append(Span("step", 0, timeline.events))
    return timeline


def with_later_steps(timeline: Timeline) -> Timeline:
    timeline.spans.append(Span(LATER_STEPS, timeline.events, timeline.events))
    return timeline


def test_a_later_step_may_reserve_what_two_did_not() -> None:
    phases = replay(with_later_steps(training(2)), AllocatorSettings()).phases
    assert phases[LATER_STEPS].allocated == phases["step"].allocated
    assert phases[LATER_STEPS].reserved > phases["step"].reserved
    three = replay(training(3), AllocatorSettings()).phases["step"]
    assert phases[LATER_STEPS].reserved == three.reserved


#: A block that a step leaves to the next one, which lets it go: MiB.
LEFT = 2000


def leaving(*finds: bool) -> Timeline:
    """Two steps that leave a block behind; whether each finds one, and lets it go at its start."""
    timeline, found = training(1), None
    for at, letting_go in enumerate(finds):
        if letting_go and found is not None:
            found.death = timeline.events
        start = timeline.events + 1
        timeline.blocks.append(Block(size=500 * MIB, birth=start, death=start + 1))
        found = Block(size=LEFT * MIB, birth=start + 2)
        timeline.blocks.append(found)
        timeline.events = start + 3
        timeline.marks.append(Mark(END_OF_STEP, timeline.events, 0.0, 0))
        assert at < 2
    assert found is not None
    with_later_steps(timeline)
    found.death = timeline.events  # in a phase that follows
    timeline.events += 1
    return timeline


def test_what_a_step_leaves_goes_as_it_let_go_what_it_found() -> None:
    phases = replay(leaving(False, True), AllocatorSettings()).phases
    assert phases[LATER_STEPS].allocated == (sum(STATE) + LEFT) * MIB


def test_a_step_that_leaves_more_than_it_found_is_not_repeated() -> None:
    phases = replay(leaving(False, False), AllocatorSettings()).phases
    assert phases[LATER_STEPS].allocated == (sum(STATE) + 2 * LEFT) * MIB  # as they were left


def test_cleaning_up_in_later_steps_is_what_counts() -> None:
    timeline = with_later_steps(steps([30, 40], [30, 40], [30, 45]))
    within = replay_within(timeline, AllocatorSettings(), 60 * MIB)
    assert within is not None
    assert (within.retries, within.step_retries) == (2, 0)
