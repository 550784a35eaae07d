"""What a step takes is read off the marks of a timeline."""

from __future__ import annotations

from oomph.rehearsal.recorder import FORWARD
from oomph.rehearsal.step_cost import StepCost, step_cost
from oomph.rehearsal.timeline import END_OF_STEP, Mark, Timeline


def test_a_step_goes_from_the_end_of_the_one_before_to_its_own() -> None:
    marks = [
        Mark(FORWARD, 0, 0.0, 0),
        Mark(END_OF_STEP, 1, 1.0, 10),
        Mark(FORWARD, 2, 1.5, 20),  # gradients were set to zero first
        Mark(END_OF_STEP, 3, 3.0, 50),
    ]
    assert step_cost(Timeline(marks=marks), 1) == StepCost(2.0, 40, 0, 0)


def test_the_first_step_of_all_begins_with_its_forward() -> None:
    marks = [Mark(FORWARD, 0, 0.5, 3), Mark(END_OF_STEP, 1, 1.0, 10)]
    assert step_cost(Timeline(marks=marks), 1) == StepCost(0.5, 7, 0, 0)
