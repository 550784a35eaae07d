"""The largest size with a plan: there is one, the next has none, and few were made."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import oomph
from oomph.plans.plan import Plan
from oomph.search import largest_planned as module
from oomph.search.attempt import Attempt, NoPlan
from oomph.search.largest_planned import largest_planned
from oomph.search.planner import plan as make_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def rows(seq: int) -> oomph.Job:
    """One sample of so many rows, through two blocks."""
    return oomph.Job(
        lambda: nn.Sequential(Block(), Block()),
        nn.MSELoss(),
        "sgd",
        lambda: (torch.ones(1, seq, 32), torch.zeros(1, seq, 32)),
        name="rows",
    )


@pytest.fixture(scope="module")
def some_plan() -> Plan:
    return make_plan(rows(8), budget="64MiB")


class Planner:
    """In place of planning: up to `whole` in one piece, up to `split` in parts, then nothing."""

    def __init__(self, plan: Plan, *, whole: int, split: int = 0) -> None:
        self.plan, self.whole, self.split = plan, whole, max(split, whole)
        self.asked: list[int] = []

    def __call__(self, job: oomph.Job, **_: object) -> Attempt:
        size = job.batch()[0].shape[1]
        self.asked.append(size)
        if size > self.split:
            return NoPlan(
                job="rows",
                gpu=None,
                budget=1000 * self.split + 999,
                smallest_budget=1000 * size,
                reason="too large",
                seconds=0.0,
            )
        micro_batch = None if size <= self.whole else 2
        choices = dataclasses.replace(self.plan.choices, micro_batch=micro_batch)
        return dataclasses.replace(self.plan, choices=choices)


def test_a_real_model_has_a_plan_at_the_answer_and_none_after_it() -> None:
    limit = largest_planned(rows, budget="600KiB", what="seq", start=400)
    assert limit.verdict == "fits"
    assert limit.limited_by == "memory"
    assert 0 < limit.next_value - limit.value <= limit.value // 32
    assert isinstance(limit.attempt, Plan)
    assert limit.attempt.predicted.peak.allocated <= 600 * 1024
    assert limit.next_attempt.smallest_budget > 600 * 1024
    assert limit.value > oomph.largest(rows, budget="600KiB", start=limit.value).value
    assert limit.plans <= 8


@pytest.mark.parametrize("start", [1, 37, 700, 40_000])
def test_few_plans_lead_to_the_answer_wherever_the_search_begins(
    some_plan, monkeypatch, start
) -> None:
    planner = Planner(some_plan, whole=700)
    monkeypatch.setattr(module, "try_plan", planner)
    limit = largest_planned(rows, budget="1GiB", what="seq", start=start)
    assert limit.value <= 700 < limit.next_value
    assert limit.next_value - limit.value <= 700 // 32
    assert len(planner.asked) == limit.plans <= 16
    assert len(set(planner.asked)) == limit.plans


def test_a_batch_counts_in_one_piece_and_the_next_says_how_it_is_split(
    some_plan, monkeypatch
) -> None:
    monkeypatch.setattr(module, "try_plan", Planner(some_plan, whole=24, split=10**6))
    limit = largest_planned(rows, budget="1GiB", start=8)
    assert (limit.value, limit.next_value) == (24, 25)
    first, second, *_ = str(limit).splitlines()
    assert first.startswith("fits: up to a batch of 24 in one piece, rows in ")
    assert second.startswith("A batch of 25 runs best in micro-batches of 2, at ")
    beyond = limit.as_dict()["solve"]["next"]
    expected = {"value": 25, "verdict": "fits", "micro_batch": 2, "smallest_budget": None}
    assert beyond == expected


def test_a_sequence_may_be_planned_in_micro_batches(some_plan, monkeypatch) -> None:
    monkeypatch.setattr(module, "try_plan", Planner(some_plan, whole=24, split=256))
    limit = largest_planned(rows, budget="1GiB", what="seq", start=64, step=64)
    assert (limit.value, limit.next_value) == (256, 320)
    assert "A seq of 320 does not fit: it needs 312.5 KiB." in str(limit)


def test_where_there_is_no_plan_at_all_the_smallest_size_is_shown(some_plan, monkeypatch) -> None:
    monkeypatch.setattr(module, "try_plan", Planner(some_plan, whole=0))
    limit = largest_planned(rows, budget="1GiB", start=8)
    assert (limit.value, limit.verdict) == (1, "does_not_fit")
    answer = limit.as_dict()
    assert answer["solve"]["value"] is None
    assert answer["verdict"] == "does_not_fit"
    assert str(limit).startswith("does not fit: not even with a batch of 1, rows on the CPU; ")


def test_a_model_that_takes_no_more_ends_the_search(some_plan, monkeypatch) -> None:
    def up_to_100(seq: int) -> oomph.Job:
        if seq > 100:
            raise oomph.BadInput("100 is the most")
        return rows(seq)

    monkeypatch.setattr(module, "try_plan", Planner(some_plan, whole=10**6))
    limit = largest_planned(up_to_100, budget="1GiB", what="seq", start=64, step=64)
    assert (limit.value, limit.limited_by, limit.reason) == (100, "model", "100 is the most")
    assert limit.as_dict()["solve"]["next"] is None


def test_progress_says_which_size_is_planned_for() -> None:
    said: list[str] = []
    largest_planned(rows, budget="1KiB", start=1, what="seq", say=said.append)
    assert said[0].startswith("a seq of 1: ")


def test_without_a_limit_there_is_nothing_to_search() -> None:
    with pytest.raises(oomph.BadInput, match="nothing limits a job on the CPU"):
        largest_planned(rows)
    with pytest.raises(oomph.BadInput, match="the seq must be a whole number"):
        largest_planned(rows, budget="1GiB", what="seq", start=0)
