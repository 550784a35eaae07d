"""Trainings that are put together at random, with random techniques: equal, or refused.

The same ones each time, few of them. `OOMPH_COMPOSED=2000` tries so many, others each time.
"""

from __future__ import annotations

import os

from cells import alike, started
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pieces_of_trainings import HOOKS, KINDS, OPTIMIZERS, TERMS, Composed
from small_plans import plan_with
from technique_table import TECHNIQUES, choose
from ways.training import Training

from benchmarks.courses import first_difference, train_untouched, train_with
from oomph.jobs.job import Job
from oomph.runs.run import Run, apply

#: How many are tried.
MANY = int(os.environ.get("OOMPH_COMPOSED", "0"))


@st.composite
def _composed(draw: st.DrawFn) -> Composed:
    names = st.sampled_from(sorted(TERMS))
    first = draw(st.integers(2, 7))
    return Composed(
        block=draw(st.sampled_from(sorted(KINDS))),
        shared=draw(st.booleans()),
        frozen=draw(st.booleans()),
        terms=tuple(draw(st.lists(names, min_size=1, max_size=3, unique=True))),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        groups=draw(st.booleans()),
        scheduled=draw(st.booleans()),
        hook=draw(st.sampled_from(sorted(HOOKS))),
        sizes=(first, *draw(st.lists(st.integers(1, first), min_size=4, max_size=4))),
        clip_norm=draw(st.sampled_from([None, None, 0.1])),
    )


_techniques = st.lists(st.sampled_from(sorted(TECHNIQUES)), min_size=1, max_size=4, unique=True)


@settings(
    max_examples=MANY or 60,
    derandomize=not MANY,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(composed=_composed(), names=_techniques)
def test_what_is_put_together_trains_to_the_same_numbers(
    composed: Composed, names: list[str]
) -> None:
    def start(training: Training) -> Run:
        choices = choose(tuple(names), training)
        assume(choices is not None)
        assert choices is not None
        model, optimizer, first = training.model, training.optimizer, training.batches[0]
        job = Job(model, training.loss, optimizer, first, name="net", **training.options)
        return apply(plan_with(choices, model, optimizer, first), job)

    course = train_with(started(composed.make), start)
    expected = train_untouched(started(composed.make))
    assert not (found := first_difference(course, expected, alike)), found
