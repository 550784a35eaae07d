"""Plans fit, are as fast as their budget allows, and say so where there is none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import BadInput, DoesNotFit
from oomph.estimation import estimate, judge
from oomph.gpus import find_gpu
from oomph.job import Job
from oomph.planning.choices import KEEP
from oomph.planning.plan import Plan
from oomph.planning.planner import plan
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.techniques.technique import Fidelity

WIDTH, DEPTH, ROWS = 256, 4, 4096


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.down(torch.relu(self.up(x))))
        return x + hidden


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).float().pow(2).mean()
    return out


def job(model: Any = Model, **options: Any) -> Job:
    return Job(model, loss, "adamw", lambda: torch.randn(ROWS, WIDTH), **options)


@functools.cache
def natural() -> int:
    return estimate(job()).peak.allocated


@functools.cache
def planned(part: float) -> Plan:
    return plan(job(), budget=int(natural() * part))


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9, 1.2])
def test_a_plan_passes_the_check_by_anyone(part: float) -> None:
    made = planned(part)
    again = judge(
        rehearse(job(), None, PHASES, choices=made.choices),
        job="again",
        gpu=None,
        budget=made.budget,
        settings=AllocatorSettings.parse(""),
        phases=PHASES,
        seconds=0.0,
    )
    assert again.fits
    assert again.peak == made.predicted.peak


def test_a_larger_budget_is_never_slower() -> None:
    seconds = [planned(part).predicted.seconds for part in (0.5, 0.7, 0.9, 1.2)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_with_enough_memory_nothing_is_recomputed_or_split() -> None:
    choices = planned(1.2).choices
    assert set(choices.blocks.values()) == {KEEP} and choices.micro_batch is None


def test_the_smallest_budget_that_an_error_names_is_feasible() -> None:
    with pytest.raises(DoesNotFit, match="no plan fits") as refused:
        plan(job(), budget=natural() // 20)
    assert plan(job(), budget=refused.value.smallest).predicted.peak.allocated <= (
        refused.value.smallest
    )


def test_on_a_card_a_compiled_plan_fits_and_allow_bounds_its_fidelity() -> None:
    rounding = plan(job(), gpu="h200", budget="2GiB")
    assert rounding.choices.precision == "bf16-mixed" and rounding.choices.compiled
    assert rounding.fidelity is Fidelity.ROUNDING
    assert rounding.predicted.high <= rounding.budget
    exact = plan(job(), gpu="h200", budget="2GiB", allow="exact")
    assert exact.choices.precision == "fp32"
    assert exact.choices.weights == "own" and exact.fidelity is Fidelity.EXACT


def test_a_card_without_bf16_gets_fp16_and_no_step_in_backward() -> None:
    choices = plan(job(), gpu="t4", budget="4GiB").choices
    assert choices.precision == "fp16-mixed" and not choices.optimizer_in_backward


def test_clipping_excludes_steps_in_backward() -> None:
    tight = int(natural() * 0.6)
    assert not plan(job(clip_norm=1.0), budget=tight).choices.optimizer_in_backward


def test_batch_norm_keeps_the_batch_whole_and_says_so() -> None:
    made = plan(job(functools.partial(Model, norm=True)), budget=int(natural() * 0.8))
    assert made.choices.micro_batch is None
    assert any("BatchNorm1d" in note for note in made.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "1GiB", "allow": "anything"}, "allow is exact, rounding, lossy"),
        ({}, "give one, as 16GiB"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        plan(job(), **options)


def test_a_job_that_is_only_evaluated_has_no_plan() -> None:
    evaluated = Job(Model, loss, None, lambda: torch.randn(4, WIDTH))
    with pytest.raises(BadInput, match="for training"):
        plan(evaluated, budget="1GiB")


def test_every_change_is_priced_by_leaving_it_out() -> None:
    made = plan(job(), gpu=find_gpu("h200"), budget="2GiB", allow="exact")
    names = [change.technique for change in made.changes]
    assert len(names) == len(set(names))
    assert {change.fidelity for change in made.changes} <= {Fidelity.EXACT}
