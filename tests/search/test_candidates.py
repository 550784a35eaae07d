"""What candidates tell of each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from oomph.plans.choices import Choices
from oomph.search.candidates import leaves_no_more, variant_of


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_room": 0},
        {"gradient_room": 100},
        {"weights_away": ("a", "b")},
        {"state_ahead": 3},
        {"gradient_room": 0, "weights_away": ("a",), "state_ahead": 2},
    ],
)
def test_choices_that_have_more_leave_are_known_as_such(more: dict[str, Any]) -> None:
    less = Choices(optimizer_on="host", state_ahead=4)
    assert leaves_no_more(less, less)
    assert leaves_no_more(less, dataclasses.replace(less, **more))
    assert not leaves_no_more(dataclasses.replace(less, **more), less)


def test_choices_that_differ_otherwise_tell_nothing_of_each_other() -> None:
    one = Choices(optimizer_on="host")
    assert not leaves_no_more(one, dataclasses.replace(one, micro_batch=2, gradient_room=0))
    there = dataclasses.replace(one, gradient_room=0, gradients_on="disk")
    assert not leaves_no_more(one, there)
    assert variant_of(there) != variant_of(dataclasses.replace(there, gradients_on="host"))
