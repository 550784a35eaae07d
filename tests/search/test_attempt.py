"""A plan, or what is known where none fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from oomph.errors import BadInput, DoesNotFit, HostTooSmall
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.search import attempt
from oomph.search.attempt import NoPlan, try_plan

CARD = find_gpu("rtx-3060")


def job() -> Job:
    sample = torch.ones(1, 1), torch.ones(1, 1)
    return Job(lambda: nn.Linear(1, 1), nn.MSELoss(), "adamw", sample)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def answer(given: Any) -> None:
        def plan(*_: Any, **__: Any) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

        monkeypatch.setattr(attempt, "plan", plan)

    return answer


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({"budget": "1GiB", "gpu": CARD}, 1 << 30),
        ({"budget": 7}, 7),
        ({"gpu": CARD}, CARD.memory),
        ({"gpu": "rtx-3060"}, CARD.memory),
        ({}, 0),
    ],
)
def test_what_was_too_little_is_the_budget_or_all_memory_of_the_card(
    answers: Callable[[Any], None], options: dict[str, Any], budget: int
) -> None:
    answers(DoesNotFit("not like this", 3 << 30))
    answer = try_plan(job(), **options)
    assert isinstance(answer, NoPlan)
    assert answer.budget == budget
    assert answer.gpu == (CARD.name if "gpu" in options else None)
    assert (answer.smallest_budget, answer.reason) == (3 << 30, "not like this")
    assert answer.host_missing == 0
    assert 0 <= answer.seconds < 60


def test_host_memory_that_is_missing_is_named(answers: Callable[[Any], None]) -> None:
    answers(HostTooSmall("not there", 3, 7))
    answer = try_plan(job(), gpu=CARD)
    assert isinstance(answer, NoPlan) and answer.host_missing == 7


def test_a_plan_is_the_answer_and_other_errors_are_raised(answers: Callable[[Any], None]) -> None:
    made = object()
    answers(made)
    assert try_plan(job(), gpu=CARD) is made
    answers(BadInput("wrong"))
    with pytest.raises(BadInput, match="wrong"):
        try_plan(job(), gpu=CARD)
