"""What tests of integrations have in common: plans that are given instead of searched for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oomph
from oomph.integrations import framework_plan
from oomph.plans.choices import Choices
from oomph.plans.plan import Plan
from oomph.splitting import prove_split
from oomph.techniques.loss_split import LossSplit


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on many threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def some_plan() -> Plan:
    """A plan for something else."""
    job = oomph.Job(nn.Linear(4, 4), nn.MSELoss(), "sgd", (torch.ones(2, 4), torch.ones(2, 4)))
    return oomph.plan(job, budget="1GiB")


Give = Callable[..., None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch, some_plan: Plan) -> Give:
    """Let the planner answer with these choices, in the precision of the job."""

    def give(**choices: Any) -> None:
        def plan(job: oomph.Job, **_: Any) -> tuple[Plan, LossSplit]:
            chosen = Choices(precision=job.precision, **choices)
            return dataclasses.replace(some_plan, choices=chosen), prove_split(job, None)

        monkeypatch.setattr(framework_plan, "plan_and_split", plan)

    return give


class Said(list[str]):
    """Takes what is said."""

    def __call__(self, words: str) -> None:
        self.append(words)


@pytest.fixture
def said() -> Said:
    return Said()
