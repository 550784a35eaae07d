"""Every way to write a training, as `fit` runs it at five budgets: equal, or refused."""

from __future__ import annotations

import functools

import pytest
from cells import check, make
from known_failures import known_failure
from ways.training import WAYS, Training, Way

import oomph
from oomph.errors import DoesNotFit

#: Where budgets lie between the least there is a plan for and what the training takes by itself.
BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _fit(training: Training, budget: int) -> oomph.Run:
    return oomph.fit(
        training.model,
        training.optimizer,
        training.loss,
        training.batches[0],
        budget=budget,
        allow="exact",
        **training.options,
    )


@functools.cache
def _range(way: Way) -> tuple[int, int]:
    """The least device memory for which there is a plan, and what the training takes by itself.

    A run may need some bytes more than a training that nothing can be done for: it keeps the loss.
    """
    one = make(way)
    job = oomph.Job(one.model, one.loss, one.optimizer, one.batches[0], **one.options)
    natural = oomph.estimate(job).peak.device
    try:
        oomph.plan(job, budget=1, allow="exact")
    except DoesNotFit as error:
        return error.smallest, max(error.smallest, natural)
    raise AssertionError("no plan takes one byte")


def _cells() -> list[pytest.ParameterSet]:
    return [
        pytest.param(way, part, id=name, marks=known_failure(name))
        for way in WAYS.values()
        for part in BUDGETS
        for name in [f"{way.name}-fit_at_{part:.0%}"]
    ]


@pytest.mark.parametrize(("way", "part"), _cells())
def test_a_plan_that_fit_chooses_changes_no_number(way: Way, part: float) -> None:
    def start(training: Training) -> oomph.Run:
        least, most = _range(way)
        return _fit(training, int(least + part * (most - least)))

    check(way, ("fit",), start)
