"""The benchmark of squeezed runs counts what it says it counts."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.elastic import Outcome, Setting, Step, compare, describe, train

SETTING = Setting(
    model="small", batch=16, seq=64, budget=4 << 20, steps=20, squeezes=1, device="cpu"
)


def outcome(seconds: list[float], losses: list[float]) -> Outcome:
    steps = [
        Step(loss=loss, seconds=second, squeezed=SETTING.squeezed(at), samples=16)
        for at, (second, loss) in enumerate(zip(seconds, losses, strict=True))
    ]
    return Outcome(steps=steps, events=["one"], plans=2, planning_seconds=1.0)


def test_the_squeeze_is_in_the_middle_and_the_first_steps_are_free() -> None:
    assert [SETTING.squeezed(at) for at in range(20)] == [*[False] * 10, *[True] * 5, *[False] * 5]
    twice = dataclasses.replace(SETTING, squeezes=2, steps=55)
    assert sum(twice.squeezed(at) and not twice.squeezed(at - 1) for at in range(1, 55)) == 2


def test_only_what_is_lost_outside_the_squeeze_counts() -> None:
    losses = [1.0] * 20
    undisturbed = outcome([1.0] * 20, losses)
    # The first steps are not timed, and the squeeze may take its time.
    squeezed = outcome([9.0] * 5 + [1.25] * 5 + [7.0] * 5 + [1.25] * 5, losses)
    result = compare(SETTING, undisturbed, squeezed)
    assert result["lost_outside_squeezes"] == pytest.approx(0.2)
    assert result["median_seconds_inside_squeezes"] == 7.0
    assert (result["losses_equal"], result["samples_lost"]) == (True, 0)
    assert "lost outside them     20.0 %" in describe(result)


def test_losses_that_differ_are_told() -> None:
    undisturbed = outcome([1.0] * 20, [1.0] * 20)
    squeezed = outcome([1.0] * 20, [1.0] * 19 + [1.1])
    result = compare(SETTING, undisturbed, squeezed)
    assert result["losses_apart"] == pytest.approx(0.1)
    assert not result["losses_equal"]


def test_a_small_run_is_squeezed_on_the_cpu_and_its_losses_stay() -> None:
    undisturbed, squeezed = train(SETTING, disturb=False), train(SETTING, disturb=True)
    result = compare(SETTING, undisturbed, squeezed)
    assert result["losses_equal"]
    assert result["samples_lost"] == 0
    assert not undisturbed.events
    assert squeezed.events[0].startswith("after step 10, less memory was asked for: micro-batch")
