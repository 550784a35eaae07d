"""What a run copies so that its step can be taken back takes time in a rehearsal, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from switched_on import on
from torch import nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.link import LinkRates
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.step_cost import step_cost
from oomph.rehearsal.timeline import Timeline

H200 = find_gpu("h200")
WIDTH = 2048


def seconds(optimizer: str, **how: Any) -> float:
    return step_cost(rehearsed(optimizer, **how), 1).kernels


def rehearsed(optimizer: str, *, in_backward: bool, rows: int = 8, waits: bool = True) -> Timeline:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    job = Job(model, lambda net, batch: net(batch).sum(), optimizer, torch.ones(rows, WIDTH))
    clock = Clock.of(H200)
    choices = Choices(optimizer_in_backward=in_backward, techniques=on("fused_optimizer"))
    return rehearse(
        job, H200, ("build", "step"), choices=choices, clock=clock, wait_for_copies=waits
    )


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 3), ("sgd-momentum", 2), ("sgd", 1)])
def test_a_step_inside_backward_waits_for_the_copies_of_what_it_changes(
    optimizer: str, numbers: int
) -> None:
    copies = numbers * 4 * 4 * WIDTH**2 / LinkRates.of(H200).out
    assert seconds(optimizer, in_backward=False) < copies / 2
    assert seconds(optimizer, in_backward=True) == pytest.approx(copies, rel=0.1)


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 3), ("sgd", 1)])
def test_the_copies_take_host_memory(optimizer: str, numbers: int) -> None:
    taken = rehearsed(optimizer, in_backward=True).host_bytes
    assert taken == pytest.approx(numbers * 4 * 4 * WIDTH**2, rel=1e-4)
    assert rehearsed(optimizer, in_backward=False).host_bytes == 0


def test_nothing_waits_for_copies_that_are_shorter_than_what_runs_beside_them() -> None:
    copies = 3 * 4 * 4 * WIDTH**2 / LinkRates.of(H200).out
    took = seconds("adamw", in_backward=True, rows=1 << 20)
    assert took > copies
    assert took == seconds("adamw", in_backward=True, rows=1 << 20, waits=False)


def test_with_an_endless_link_nothing_waits() -> None:
    inside = seconds("adamw", in_backward=True, waits=False)
    assert inside == pytest.approx(seconds("adamw", in_backward=False), rel=0.2)
