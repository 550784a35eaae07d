"""What changes are worth is worked out in both processes, and is the same from either."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from switched_on import with_on

from oomph.errors import CannotRehearse
from oomph.plans.choices import MASTERS, Choices
from oomph.search import pricing as module
from oomph.search.pricing import Pricing
from oomph.search.process_questions import PRICE, question

PLAN = Choices(compiled=True, weights=MASTERS, optimizer_on="host")
EAGER = dataclasses.replace(PLAN, compiled=False)
OTHERS = [dataclasses.replace(PLAN, loss_chunk=rows, head="head") for rows in (64, 32, 16)]
WANTED = [*OTHERS, EAGER]


class Second:
    """Answers what it was asked, if it can."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    def ask(self, questions: list[Any], *, instead: bool = False) -> None:
        self.asked = questions

    def answer(self, asked: Any) -> Any:
        return list(worth(Choices.from_dict(asked[1]))) if self.answers else None


def worth(choices: Choices) -> tuple[int, float]:
    return choices.loss_chunk or 7, 0.5


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Choices]:
    """What is priced in this process."""
    priced: list[Choices] = []

    def price(job: Any, gpu: Any, clock: Any, choices: Choices) -> tuple[int, float]:
        priced.append(choices)
        return worth(choices)

    monkeypatch.setattr(module, "price", price)
    return priced


def pricing(second: Any) -> Pricing:
    nothing: Any = None
    return Pricing(job=nothing, gpu=None, clock=nothing, second=second)


def beside(second: Second) -> list[Choices]:
    return [one for one in WANTED if question(PRICE, one) in second.asked]


def test_each_is_priced_once_here_or_beside(here: list[Choices]) -> None:
    second = Second()
    assert pricing(second).price_all(WANTED) == [worth(one) for one in WANTED]
    assert here and beside(second)
    assert sorted(map(str, [*here, *beside(second)])) == sorted(map(str, WANTED))


def test_beside_a_check_less_is_priced_here(here: list[Choices]) -> None:
    second = Second()
    one = pricing(second)
    one.begin_beside_a_check(PLAN, WANTED)
    assert EAGER in beside(second) and len(beside(second)) == 3
    # The check decides by which settings of the allocator it is a plan.
    settled = [with_on(w, cuda_allocator={"conf": "expandable_segments:True"}) for w in WANTED]
    assert one.price_all(settled) == [worth(w) for w in WANTED]
    assert len(here) == 1


def test_what_cannot_be_compiled_any_more_is_priced_with_eager_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def price(job: Any, gpu: Any, clock: Any, choices: Choices) -> tuple[int, float]:
        if choices.compiled and choices.weights != MASTERS:
            raise CannotRehearse("it cannot be compiled")
        return (1 if choices.compiled else 2), 0.5

    monkeypatch.setattr(module, "price", price)
    own = dataclasses.replace(PLAN, weights="own", optimizer_on="gpu", compiled_others=("norm",))
    assert pricing(Second(answers=False)).price_all([PLAN, own]) == [(1, 0.5), (2, 0.5)]


def test_what_nobody_answers_is_priced_here(here: list[Choices]) -> None:
    assert pricing(Second(answers=False)).price_all(WANTED) == [worth(one) for one in WANTED]
    assert len(here) == len(WANTED)
