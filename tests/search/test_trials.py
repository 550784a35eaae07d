"""Choices that are tried: each once, with room made for them, and who has them is remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from oomph.plans.choices import Choices
from oomph.search.candidates import Candidate, Verdict
from oomph.search.trials import Trials

LIMIT, STATE = 100, 200
KEPT, LEAN = {"blocks.0": "keep"}, {"blocks.0": "recompute"}
START = Choices(optimizer_on="host", blocks=KEPT)


class Machine:
    """Blocks that are kept take 50 and recomputed ones 10; what else there is takes 40."""

    def __init__(self) -> None:
        self.checked: list[Choices] = []
        self.asked_beside: list[Sequence[Choices]] = []
        self.trials = Trials(
            look_into=self.look_into,
            leaner=self.leaner,
            seconds=lambda verdict, candidate: float(verdict.smallest_budget),
            limit=LIMIT,
            staying=lambda choices: int(STATE * choices.gpu_share),
        )
        self.start = self.trials.begin(*self.look_into(candidate(START), ()))

    def look_into(
        self, candidate: Candidate, likely: Sequence[Choices]
    ) -> tuple[Verdict, Candidate]:
        self.checked.append(candidate.choices)
        self.asked_beside.append(likely)
        choices = candidate.choices
        need = 40 + (50 if choices.blocks == KEPT else 10) + int(STATE * choices.gpu_share)
        need += 20 if choices.state_ahead > 4 else 0
        verdict = Verdict(need <= LIMIT, need, 0, 7, 1.0, "", False)
        return verdict, verdict.passed_on(candidate)

    def leaner(self, candidate: Candidate, missing: int) -> Candidate | None:
        if missing > 40:
            return None
        choices = dataclasses.replace(candidate.choices, blocks=LEAN)
        return dataclasses.replace(candidate, choices=choices)


def candidate(choices: Choices) -> Candidate:
    nothing: Any = None
    return Candidate(seconds=1.0, number=0, profiles=nothing, solution=nothing, choices=choices)


def test_what_is_tried_twice_is_checked_once() -> None:
    machine = Machine()
    other = dataclasses.replace(START, loss_chunk=64, head="head")
    assert machine.trials.attempt(other) is machine.trials.attempt(other)
    assert machine.checked == [START, other]


def test_what_does_not_fit_is_tried_with_leaner_blocks() -> None:
    machine = Machine()
    more = dataclasses.replace(START, state_ahead=8)
    found = machine.trials.attempt(more)
    assert found is not None
    assert found.choices == dataclasses.replace(more, blocks=LEAN)
    assert machine.checked == [START, more, found.choices]
    verdict, who = machine.trials.who_has(found.choices)
    assert verdict.fits and who.choices == found.choices and found.host == verdict.host


def test_state_that_stays_gets_its_room_before_the_first_check() -> None:
    machine = Machine()
    found = machine.trials.attempt(dataclasses.replace(START, gpu_share=0.2))
    assert found is not None
    assert found.choices == dataclasses.replace(START, gpu_share=0.2, blocks=LEAN)
    assert machine.checked == [START, found.choices]


def test_where_no_blocks_leave_enough_room_nothing_comes_of_it() -> None:
    machine = Machine()
    assert machine.trials.attempt(dataclasses.replace(START, gpu_share=0.5)) is None


def test_what_comes_next_is_asked_for_beside_as_it_will_be_tried() -> None:
    machine = Machine()
    shares = [dataclasses.replace(START, gpu_share=share) for share in (0.15, 0.2, 0.05, 0.1)]
    machine.trials.foresee(shares)
    machine.trials.attempt(shares[0])
    leaned = [dataclasses.replace(one, blocks=LEAN) for one in shares]
    others = [leaned[1], shares[2], leaned[3]]
    assert machine.asked_beside[-1] == others, "not what is tried here itself"


def test_what_builds_on_what_is_tried_is_asked_for_with_its_blocks() -> None:
    machine = Machine()
    stays = dataclasses.replace(START, gpu_share=0.2)
    on_top = dataclasses.replace(stays, host_share=0.2)
    beside = dataclasses.replace(START, host_share=0.2)
    machine.trials.foresee([stays, on_top, beside])
    found = machine.trials.attempt(stays)
    assert found is not None and found.choices.blocks == LEAN
    assert machine.asked_beside[-1] == [dataclasses.replace(on_top, blocks=LEAN), beside]


def test_what_fits_is_named_from_the_best_on() -> None:
    machine = Machine()
    tried = [
        machine.trials.attempt(dataclasses.replace(START, **change))
        for change in ({"state_ahead": 8}, {"gpu_share": 0.05}, {"gpu_share": 0.9})
    ]
    leaner, kept, none = tried
    assert leaner is not None and kept is not None and none is None
    assert leaner.seconds < kept.seconds
    assert machine.trials.fastest_first(leaner, None) == [leaner, kept]
    # What is better than the best was given up for a reason.
    assert machine.trials.fastest_first(kept, None) == [kept]
    lighter = dataclasses.replace(leaner, host=leaner.host - 1)
    assert machine.trials.fastest_first(lighter, None) == [lighter, leaner, kept], "there is room"
    assert machine.trials.fastest_first(lighter, kept.host) == [lighter, leaner, kept]
    assert machine.trials.fastest_first(lighter, lighter.host) == [lighter]
