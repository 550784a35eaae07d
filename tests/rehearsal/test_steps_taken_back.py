"""What a run copies so that its step can be taken back takes time in a rehearsal, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oomph.gpus import find_gpu
from oomph.job import Job
from oomph.planning.audition import step_effort
from oomph.planning.choices import Choices
from oomph.rehearsal.link import LinkRates
from oomph.rehearsal.phases import rehearse
from oomph.timing.clock import Clock

H200 = find_gpu("h200")
WIDTH = 2048


def seconds(optimizer: str, *, in_backward: bool) -> float:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    job = Job(model, lambda net, batch: net(batch).sum(), optimizer, torch.ones(8, WIDTH))
    clock = Clock.of(H200)
    choices = Choices(optimizer_in_backward=in_backward, fused_optimizer=True)
    timeline = rehearse(job, H200, ("build", "step"), choices=choices, clock=clock)
    return step_effort(timeline, 1).kernels


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 3), ("sgd-momentum", 2), ("sgd", 1)])
def test_a_step_inside_backward_waits_for_the_copies_of_what_it_changes(
    optimizer: str, numbers: int
) -> None:
    copied = numbers * 4 * 4 * WIDTH**2
    longer = seconds(optimizer, in_backward=True) - seconds(optimizer, in_backward=False)
    assert longer == pytest.approx(copied / LinkRates.of(H200).out, rel=0.1)
