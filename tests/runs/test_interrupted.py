"""Ctrl-C at any operation of a step: the step was made, or nothing of it; the run goes on.

A dispatch mode sends the process a SIGINT before the n-th operation, for a sample of all n.
"""

from __future__ import annotations

import copy
import functools
import random
import signal
import sys
import time
from typing import Any

import pytest
import torch
from interrupted_runs import CHOICES, Nth, Started, state_of
from torch.utils._pytree import tree_leaves

from oomph.runs.run import Run

#: Of all operations, every so many-th is interrupted.
EVERY = 7


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@functools.cache
def untouched(name: str, steps: int) -> dict[str, Any]:
    """What there is after so many steps that nobody interrupted."""
    started = Started.with_choices(name)
    for batch in started.batches[:steps]:
        started.run.step(batch)
    return copy.deepcopy(state_of(started.run))


def assert_same(run: Run, expected: dict[str, Any]) -> None:
    now, then = tree_leaves(state_of(run)), tree_leaves(expected)
    assert len(now) == len(then)
    for one, other in zip(now, then, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", CHOICES)
def test_a_step_is_made_or_not_at_all(name: str) -> None:
    started = Started.with_choices(name)
    started.run.step(started.batches[0])
    with Nth(0, interrupt) as counted:
        started.run.step(started.batches[1])
    outcomes = set()
    for at in range(1, counted.count, EVERY):
        started = Started.with_choices(name)
        started.run.step(started.batches[0])
        with pytest.raises(KeyboardInterrupt) as raised, Nth(at, interrupt):
            started.run.step(started.batches[1])
        made = started.run.steps - 1
        assert bool(getattr(raised.value, "__notes__", [])) == bool(made)
        assert_same(started.run, untouched(name, 1 + made))
        outcomes.add(made)
        for batch in started.batches[1 + made : 3]:
            started.run.step(batch)
        assert_same(started.run, untouched(name, 3))
    assert 0 in outcomes


@pytest.mark.parametrize("name", ["recompute", "micro_batch", "offload"])
def test_ctrl_c_inside_of_the_optimizer_takes_the_step_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all weights are stepped at once, there is a copy of them until they are."""
    started = Started.with_choices(name)
    before = copy.deepcopy(state_of(started.run))
    module = sys.modules["torch.optim.adam"]
    adam = module.adam

    def interrupted(*args: Any, **kwargs: Any) -> None:
        adam(*args, **kwargs)
        interrupt()

    monkeypatch.setattr(module, "adam", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started.run.step(started.batches[0])
    assert_same(started.run, before)


class Late(Exception):
    """What a handler of the user's raises."""


@pytest.mark.parametrize("name", ["recompute_in_part", "in_backward", "host_cores", "offload"])
def test_an_alarm_at_any_moment_makes_a_step_or_none(name: str) -> None:
    """Between any two instructions of Python, not only where an operation begins."""

    def ring(*_: Any) -> None:
        raise Late

    started = Started.with_choices(name)
    run, batches = started.run, started.batches
    made = []
    moments = random.Random(0)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for at in range(25):
            steps, rang = run.steps, time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 0.03))
                run.step(batches[at % 3])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Late:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert time.perf_counter() - rang < 60
            made += [at % 3] * (run.steps - steps)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    expected = Started.with_choices(name)
    for batch in made:
        expected.run.step(expected.batches[batch])
    assert_same(run, state_of(expected.run))
