"""Blocks of a real model, timed under each option, and what the planner makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.hardware.timing.step_time import StepTime
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, RECOMPUTE, Choices
from oomph.runs.run import fit
from oomph.search.block_timer import BlockTimer, Times
from oomph.search.planner import plan
from oomph.search.space import PROFILED_CHUNK


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


class Model(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


class Counting(Model):
    """Counts how often it ran to its end."""

    ended = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.ended += 1
        return out


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).pow(2).mean()
    return out


def timer(model: nn.Module) -> BlockTimer:
    batch = torch.randn(6, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job(model, loss, optimizer, batch)
    return BlockTimer(job=job, model=model, optimizer=optimizer, batch=batch)


def test_every_option_of_every_block_is_timed() -> None:
    menus = {"blocks.1": (KEEP, RECOMPUTE), "blocks.2": (KEEP,)}
    times = timer(Model()).time(Choices(micro_batch=2), menus)
    assert set(times) == {("blocks.1", KEEP), ("blocks.1", RECOMPUTE), ("blocks.2", KEEP)}
    assert all(step_time.seconds > 0 for step_time in times.values())


def test_the_model_is_left_as_it_was_and_runs_no_further_than_needed() -> None:
    model = Counting()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    timer(model).time(Choices(), {"blocks.1": (KEEP, RECOMPUTE)})
    assert model.ended == 0
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


class MadeUpTimer:
    """Says that keeping takes a hundred times as long as recomputing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def time(self, choices: Choices, menus: Mapping[str, Sequence[str]]) -> Times:
        self.asked += menus
        return {
            (path, how): StepTime(1.0 if how == KEEP else 0.01)
            for path, menu in menus.items()
            for how in menu
        }


@pytest.mark.parametrize("timed", [False, True])
def test_the_planner_believes_the_timer_and_asks_for_one_block_of_a_class(timed: bool) -> None:
    made_up: Any = MadeUpTimer()
    job = Job(Model, loss, "adamw", lambda: torch.randn(64, 8))
    made = plan(job, budget="1GiB", timer=made_up if timed else None)
    assert set(made.choices.blocks.values()) == ({RECOMPUTE} if timed else {KEEP})
    assert made_up.asked == (["blocks.1"] if timed else [])
    if timed:
        assert made.predicted.seconds >= 4 * 0.01


class Speaker(nn.Module):
    """Blocks, and a head over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.head = nn.Linear(16, 8192)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = nn.functional.cross_entropy(self.head(x), x.new_zeros(len(x)).long())
        return out


def test_blocks_are_timed_whatever_chunk_the_loss_has() -> None:
    made_up: Any = MadeUpTimer()
    job = Job(Speaker, lambda model, x: model(x), "adamw", lambda: torch.randn(4096, 16))
    made = plan(job, budget="2GiB", timer=made_up)
    assert made.choices.loss_chunk not in (None, PROFILED_CHUNK), "else this shows nothing"
    assert made_up.asked == ["blocks.1"]


class SlowInParts(MadeUpTimer):
    """Says that recomputing takes long, and that parts of a batch take longer still."""

    def time(self, choices: Choices, menus: Mapping[str, Sequence[str]]) -> Times:
        self.asked.append(str(choices.micro_batch))
        slower = 1.0 if choices.micro_batch is None else 100.0
        return {
            (path, how): StepTime(slower * (0.01 if how == KEEP else 1.0))
            for path, menu in menus.items()
            for how in menu
        }


def test_a_plan_that_wins_by_real_seconds_was_timed_itself() -> None:
    made_up: Any = SlowInParts()
    job = Job(Model, loss, "adamw", lambda: torch.randn(4096, 8))
    needed = plan(job, budget="1GiB").predicted.peak.allocated
    made = plan(job, budget=needed * 3 // 4, timer=made_up)
    # Told of the whole batch, parts seem to be faster; timed, they are not.
    assert made_up.asked[0] == "None" and len(made_up.asked) > 1
    assert len(set(made_up.asked)) == len(made_up.asked), "each size is timed once"
    assert made.choices.micro_batch is None


def test_fit_times_the_blocks_of_the_users_own_model_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Choices] = []

    def times(self: BlockTimer, choices: Choices, menus: Mapping[str, Sequence[str]]) -> Times:
        asked.append(choices)
        assert self.model is model
        return {(path, how): StepTime(0.5) for path, menu in menus.items() for how in menu}

    monkeypatch.setattr(BlockTimer, "time", times)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(6, 8)
    for time_blocks in (False, True):
        with fit(model, optimizer, loss, batch, budget="1GiB", time_blocks=time_blocks) as run:
            assert len(asked) == time_blocks
    assert run.plan.predicted.seconds >= 4 * 0.5
