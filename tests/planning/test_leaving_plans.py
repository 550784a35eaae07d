"""Plans that leave the GPU: only where it pays, checked as all others, with the host's bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import DoesNotFit
from oomph.estimation import judge
from oomph.gpus import find_gpu
from oomph.job import Job
from oomph.planning.plan import Plan
from oomph.planning.planner import make_planner, plan
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import PHASES, rehearse

H200 = find_gpu("h200")
WIDTH, MIB = 1024, 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def model() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)))


def job(clip: float | None = None) -> Job:
    batch = torch.ones(8, 64, WIDTH), torch.ones(8, 64, WIDTH)
    return Job(model, nn.MSELoss(), "adamw", batch, clip_norm=clip)


def weights() -> int:
    return 4 * sum(p.numel() for p in model().parameters())


@functools.cache
def planned(times_the_weights: float, clip: float | None = None) -> Plan:
    budget = device_overhead(H200).high + int(times_the_weights * weights())
    return plan(job(clip), gpu=H200, budget=budget, allow="exact", compile_blocks=False)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["no clipping", "clipping"])
def test_where_state_has_no_room_it_goes_to_the_host(clip: float | None) -> None:
    made = planned(2.6, clip)  # state alone takes twice what the weights do
    assert made.choices.optimizer_on == "host"
    assert made.predicted.host >= 2 * weights()
    (change,) = (one for one in made.changes if one.technique == "optimizer")
    assert change.saves > weights()


def test_such_a_plan_passes_the_check_by_anyone() -> None:
    made = planned(2.6)
    again = judge(
        rehearse(job(), H200, PHASES, choices=made.choices),
        job="again",
        gpu=H200,
        budget=made.budget,
        settings=AllocatorSettings.parse(made.choices.allocator),
        phases=PHASES,
        seconds=0.0,
    )
    assert again.fits


def test_with_room_for_everything_nothing_leaves() -> None:
    made = planned(20)
    assert not made.choices.leaves
    assert made.predicted.host == 0


def test_what_fits_not_even_then_names_a_budget_that_does() -> None:
    with pytest.raises(DoesNotFit) as refused:
        planned(1.2)
    feasible = plan(
        job(), gpu=H200, budget=refused.value.smallest, allow="exact", compile_blocks=False
    )
    assert feasible.choices.leaves


def test_a_run_that_leaves_the_gpu_has_smaller_plans_to_fall_back_on() -> None:
    first = planned(2.6)
    planner = make_planner(
        job(), gpu=H200, budget=first.budget, allow="exact", compile_blocks=False
    )
    smaller = planner.plan_like(first, first.budget - 8 * MIB)
    assert smaller.choices.lasting == first.choices.lasting
    assert smaller.predicted.peak.device <= first.budget - 8 * MIB
