"""Every way to write a training, with every exact technique: equal, or refused with a reason.

Nothing else passes. What is known to fail is in `known_failures.txt`, and must come off it once it
does not fail any more.
"""

from __future__ import annotations

import pytest
from cells import check
from known_failures import known_failure
from small_plans import plan_with
from technique_table import choose, combinations
from ways.training import WAYS, Training, Way

from oomph.jobs.job import Job, make_batch
from oomph.runs.run import Run, apply


def _cells() -> list[pytest.ParameterSet]:
    cells = []
    for number, way in enumerate(WAYS.values()):
        example = way.make()
        for names in combinations(number):
            if choose(names, example) is not None:
                name = f"{way.name}-{'+'.join(names)}"
                cells.append(pytest.param(way, names, id=name, marks=known_failure(name)))
    return cells


@pytest.mark.parametrize(("way", "names"), _cells())
def test_a_technique_changes_no_number(way: Way, names: tuple[str, ...]) -> None:
    def start(training: Training) -> Run:
        choices = choose(names, training)
        assert choices is not None
        job = Job(
            training.model,
            training.loss,
            training.optimizer,
            training.batches[0],
            name="net",
            **training.options,
        )
        plan = plan_with(choices, training.model, training.optimizer, make_batch(job))
        return apply(plan, job)

    check(way, names, start)
