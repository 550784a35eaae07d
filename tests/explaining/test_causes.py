"""How causes are weighed: by bytes, and only if they are enough."""

from __future__ import annotations

import dataclasses

import pytest

from oomph.explaining.alive import Alive
from oomph.explaining.causes import CauseKind, Evidence, after_warm_up, find_causes, growth
from oomph.explaining.failure import Failure, Phase
from oomph.explaining.logbook import Inputs, Note
from oomph.explaining.meters import Reading
from oomph.explaining.remedies import find_remedies
from oomph.units import GIB

NOTHING = Alive(
    categories={},
    modules={},
    held=(),
    logits=0,
    vocabularies=(),
    weight_copies=0,
    asks_for_weight=False,
    expected_state=0,
)
FULL = Reading(
    allocated=9 * GIB, reserved=10 * GIB, limit=10 * GIB, total=10 * GIB, free=0, hidden=0
)
EVIDENCE = Evidence(
    asked=2 * GIB,
    reading=FULL,
    failure=Failure(phase=Phase.FORWARD, place="", module="", first_optimizer_step=False),
    steps=0,
    notes=(),
    eval_notes=(),
    call_notes=(),
    most_calls=1,
    inputs=Inputs(),
    largest_before=Inputs(),
    alive=NOTHING,
)


def evidence(**changes) -> Evidence:
    return dataclasses.replace(EVIDENCE, **changes)


def reading(**changes) -> Reading:
    return dataclasses.replace(FULL, **changes)


def notes(*sizes: float) -> tuple[Note, ...]:
    return tuple(
        Note(step=step, allocated=int(size * GIB), peak=int(size * GIB))
        for step, size in enumerate(sizes, start=2)
    )


def kinds(seen: Evidence) -> list[CauseKind]:
    return [cause.kind for cause in find_causes(seen)]


def test_that_it_does_not_fit_is_always_the_last_answer() -> None:
    assert kinds(EVIDENCE) == [CauseKind.DOES_NOT_FIT]


def test_others_are_a_cause_only_where_the_request_would_fit_without_them() -> None:
    crowded = reading(total=16 * GIB, limit=16 * GIB, allocated=10 * GIB)
    assert kinds(evidence(reading=crowded))[0] is CauseKind.HELD_BY_OTHERS
    assert kinds(evidence(reading=crowded, asked=7 * GIB)) == [CauseKind.DOES_NOT_FIT]


def test_what_a_process_always_holds_is_not_others() -> None:
    own = reading(total=11 * GIB, limit=11 * GIB, hidden=GIB, allocated=10 * GIB)
    assert own.others == 0
    assert kinds(evidence(reading=own, asked=GIB)) == [CauseKind.DOES_NOT_FIT]


@pytest.mark.parametrize(("asked", "fragmented"), [(GIB, True), (3 * GIB // 2, False)])
def test_holes_are_a_cause_only_where_they_add_up_to_the_request(asked, fragmented) -> None:
    found = kinds(evidence(asked=asked))
    assert (CauseKind.FRAGMENTATION in found) is fragmented


def test_growth_outweighs_holes_of_about_its_size() -> None:
    seen = evidence(asked=GIB, notes=notes(8.0, 8.3, 8.6, 8.9), steps=5)
    assert kinds(seen) == [
        CauseKind.LEAK,
        CauseKind.FRAGMENTATION,
        CauseKind.DOES_NOT_FIT,
    ]


@pytest.mark.parametrize(
    ("sizes", "grown"),
    [
        ((1, 2, 3, 4), 3.0),
        ((1, 4), 0.0),  # two notes are no trend
        ((1, 2, 1, 2, 1, 2), 0.0),  # up and down
        ((4, 3, 2, 1), 0.0),
        ((1, 2, 3, 2, 4, 5, 6), 5.0),  # mostly up
        ((2, 2, 2, 2), 0.0),
    ],
)
def test_memory_grows_if_it_does_so_most_of_the_time(sizes, grown) -> None:
    assert growth(notes(*sizes)) == grown * GIB


def test_a_little_growth_is_no_leak() -> None:
    assert kinds(evidence(notes=notes(8.0, 8.01, 8.02, 8.03), steps=5)) == [CauseKind.DOES_NOT_FIT]


def test_a_batch_hardly_longer_than_before_is_not_blamed() -> None:
    seen = evidence(
        notes=notes(4.0, 4.0),
        steps=3,
        inputs=Inputs(shape=(1, 102), elements=102),
        largest_before=Inputs(shape=(1, 100), elements=100),
    )
    assert CauseKind.LONGER_BATCH not in kinds(seen)


def test_every_cause_has_a_remedy_and_a_command_to_go_on_with() -> None:
    for kind in CauseKind:
        cause = dataclasses.replace(find_causes(EVIDENCE)[0], kind=kind)
        seen = evidence(inputs=Inputs(shape=(8, 10), elements=80))
        *remedies, last = find_remedies(cause, seen, "oomph plan")
        assert remedies
        assert last.do == "oomph plan"
        assert all(remedy.saves is not None for remedy in remedies)


def test_a_first_step_that_makes_optimizer_state_is_no_growth() -> None:
    def noted(*sizes: float) -> tuple[Note, ...]:
        return tuple(
            Note(step=step, allocated=int(size * GIB), peak=int(size * GIB))
            for step, size in enumerate(sizes, start=1)
        )

    # From the second step on nothing is added; with the first one, memory grew by 4 GiB.
    assert [note.step for note in after_warm_up(noted(1, 5, 5))] == [2, 3]
    assert after_warm_up(noted(1)) == noted(1), "where there is no later step, the first one counts"
    steady = evidence(notes=noted(1, 5, 5, 5, 5, 5), steps=6)
    assert CauseKind.LEAK not in kinds(steady)
    growing = evidence(notes=noted(1, 5, 6, 7, 8, 9), steps=6)
    (leak,) = [one for one in find_causes(growing) if one.kind is CauseKind.LEAK]
    assert leak.size == 4 * GIB
