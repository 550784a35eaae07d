"""Who examines choices, here or in the second process, and by which settings they are judged."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from switched_on import with_on
from torch import nn

from oomph.errors import CannotRehearse
from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.timeline import Block, Span, Timeline
from oomph.search.candidates import Candidate, Verdict, merit_of
from oomph.search.checker import FORESEEN, Checker
from oomph.search.process_questions import QUICK_CHECK, question
from oomph.techniques.allocator_settings import EXPANDABLE
from oomph.units import MIB

HERE = Choices(optimizer_on="host")
COMING = [dataclasses.replace(HERE, gpu_share=share) for share in (0.1, 0.2, 0.3, 0.4)]


class Second:
    """Knows some answers, and notes what it is asked for."""

    def __init__(self, known: Any = None) -> None:
        self.known = known
        self.asked: list[Any] = []

    def answer(self, question: Any) -> Any:
        return self.known

    def ask(self, questions: list[Any], *, instead: bool = False) -> None:
        self.asked = questions


def checker(second: Any, budget: int = 1) -> Checker:
    gpu, nothing = find_gpu("h200"), lambda _: None
    job = Job(nn.Identity, nn.MSELoss(), "adamw", (torch.ones(1, 1), torch.ones(1, 1)))
    return Checker(job=job, gpu=gpu, clock=Clock.of(gpu), budget=budget, second=second, say=nothing)


def candidate(choices: Choices = HERE) -> Candidate:
    empty: Any = None
    return Candidate(seconds=1.0, number=0, profiles=empty, solution=empty, choices=choices)


def answer(second: Any) -> Any:
    return checker(second)._answer_about(candidate(), QUICK_CHECK, COMING)


def test_what_comes_next_is_examined_beside_what_is_examined_here() -> None:
    second = Second()
    assert answer(second) is None
    assert second.asked == [question(QUICK_CHECK, one) for one in COMING[:FORESEEN]]


def test_what_was_examined_beside_leaves_the_next_to_be_examined_here() -> None:
    second = Second((True, 100, 0, 7, 1.0, "", False))
    verdict, candidate = answer(second)
    assert verdict.fits and candidate.choices == HERE
    assert second.asked == [question(QUICK_CHECK, one) for one in COMING[1 : FORESEEN + 1]]


class Busy(Second):
    """Examines what it was asked first, and would come to all else afterwards."""

    def comes_to_later(self, asked: Any) -> bool:
        return bool(asked != question(QUICK_CHECK, HERE))


def test_what_would_be_waited_for_next_is_glanced_at_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Choices] = []
    verdict = Verdict(True, 100, 0, 7, 1.0, "", False)

    def examine(_: Checker, choices: Choices, phases: Any) -> Any:
        seen.append(choices)
        return None, verdict

    monkeypatch.setattr(Checker, "_examine", examine)
    one = checker(Busy(tuple(verdict)))
    assert one.quick_check(candidate(), COMING)[1].choices == HERE
    assert seen == COMING[:1], "what the second process is busy with was not looked at here"
    assert one.quick_check(candidate(COMING[0]), COMING[1:])[1].choices == COMING[0]
    assert seen == COMING[:2], "nor was anything looked at twice"


SMALL, LARGE = 10 * MIB, 30 * MIB


def fragmented() -> Timeline:
    """Blocks of which every second is freed, and one that finds no room between the others."""
    timeline = Timeline()
    sizes = [SMALL] * 16 + [LARGE] * 2
    for at, size in enumerate(sizes):
        death = 16 + at if at < 16 and at % 2 else None
        timeline.blocks.append(
            Block(size=size, birth=at if at < 16 else 40 + at, death=death, op="aten.mm.default")
        )
    timeline.events = 100
    timeline.spans.append(Span("step", 0, 100))
    return timeline


@pytest.mark.parametrize("spare", range(0, 200, 10))
def test_the_better_settings_of_the_allocator_are_found_without_judging_both(spare: int) -> None:
    timeline, phases = fragmented(), ("step",)
    one = checker(None)
    limit = one.hidden + 100 * MIB + spare * MIB
    estimates = [one._judge(timeline, settings, limit, phases) for settings in ("", EXPANDABLE)]
    plain, expandable = estimates
    wins = not (plain.fits and not plain.step_retries) and merit_of(expandable) > merit_of(plain)
    best, settings = one._judge_best(timeline, limit, phases)
    assert settings == (EXPANDABLE if wins else "")
    assert best == (expandable if wins else plain)


def test_the_allocators_settings_are_part_of_no_question() -> None:
    other = with_on(HERE, cuda_allocator={"conf": "expandable_segments:True"})
    assert question(QUICK_CHECK, HERE) == question(QUICK_CHECK, other)


def _estimate(fits: bool) -> Any:
    return SimpleNamespace(fits=fits)


def _examines_as(monkeypatch: pytest.MonkeyPatch, *fits: bool) -> list[Choices]:
    """Checks made here find these, one after the other; returns what they examined."""
    seen: list[Choices] = []

    def examine(_: Checker, choices: Choices, phases: Any) -> Any:
        seen.append(choices)
        one = fits[len(seen) - 1]
        return _estimate(one), Verdict(one, 100, 0, 7, 1.0, "", False)

    monkeypatch.setattr(Checker, "_examine", examine)
    return seen


def test_what_another_process_found_is_confirmed_by_a_check_made_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = _examines_as(monkeypatch, True)
    one = checker(Second((True, 100, 0, 7, 1.0, "", False)))
    verdict, found = one.look_into(candidate(), COMING)
    assert verdict.fits and seen == [] and not one.was_checked(found)
    assert one.confirmed(found)[0].fits
    assert seen == [HERE] and one.was_checked(found)
    one.confirmed(found)
    assert seen == [HERE], "and once is enough"


def test_a_plan_that_another_process_passed_and_this_one_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = _examines_as(monkeypatch, False)
    one = checker(Second((True, 100, 0, 7, 1.0, "", False)))
    with pytest.raises(CannotRehearse, match="two rehearsals of one plan"):
        one.confirmed(one.look_into(candidate(), COMING)[1])
    assert seen == [HERE]
