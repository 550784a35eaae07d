"""A run does one thing at a time; who comes beside it is refused at once, and nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from small_plans import plan_with
from torch import Tensor, nn

from oomph.errors import OomphError, RunBusy
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply

BATCH = (torch.randn(4, 3), torch.randn(4, 3))


class Waiting:
    """A loss that stops in the middle of each step until it is told to go on."""

    def __init__(self) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        self.began.set()
        assert self.may_go_on.wait(30)
        return loss


def make_run(loss: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plan = plan_with(Choices(), model, optimizer, BATCH)
    return apply(plan, Job(model, loss, optimizer, BATCH, name="net"))


def _set_budget(run: Run, _: Path) -> None:
    run.budget = "1MiB"


#: What a thread may ask of a run.
ASKED: dict[str, Callable[[Run, Path], Any]] = {
    "run.step": lambda run, _: run.step(BATCH),
    "run.evaluate": lambda run, _: run.evaluate([BATCH]),
    "run.save": lambda run, path: run.save(path),
    "run.load": lambda run, path: run.load(path),
    "run.undo": lambda run, _: run.undo(),
    "setting run.budget": _set_budget,
    "run.adapt_precision": lambda run, _: run.adapt_precision(),
    "run.model": lambda run, _: run.model,
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_comes_beside_a_step_is_refused(asked: str, tmp_path: Path) -> None:
    loss = Waiting()
    run = make_run(loss)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(run.step, BATCH)
        try:
            assert loss.began.wait(30)
            with pytest.raises(RunBusy, match=f"{asked} was called while another thread"):
                ASKED[asked](run, tmp_path)
        finally:
            loss.may_go_on.set()
        beside = step.result()
    assert run.steps == 1
    alone = make_run(nn.MSELoss())
    assert torch.equal(alone.step(BATCH), beside)
    for one, other in zip(run.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("asked", [name for name in ASKED if name != "run.model"])
def test_what_a_step_asks_of_its_own_run_is_refused(asked: str, tmp_path: Path) -> None:
    runs: list[Run] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ASKED[asked](runs[0], tmp_path)
        raise AssertionError("nobody refused")

    runs.append(make_run(loss))
    before = [p.detach().clone() for p in runs[0].model.parameters()]
    with pytest.raises(RunBusy, match=r"was called inside of run\.step"):
        runs[0].step(BATCH)
    assert runs[0].steps == 0
    for parameter, was in zip(runs[0].model.parameters(), before, strict=True):
        assert torch.equal(parameter, was)


def test_steps_of_many_threads_are_those_that_were_let_through() -> None:
    run, counted = make_run(nn.MSELoss()), []

    def insist(_: int) -> None:
        for _ in range(25):
            try:
                counted.append(run.step(BATCH))
            except OomphError as error:
                assert isinstance(error, RunBusy)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(insist, range(4)))
    assert run.steps == len(counted)
    alone = make_run(nn.MSELoss())
    for _ in counted:
        alone.step(BATCH)
    for one, other in zip(run.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_goes_on_after_it_refused(tmp_path: Path) -> None:
    run = make_run(nn.MSELoss())
    with pytest.raises(OomphError):
        run.load(tmp_path / "nothing")
    run.step(BATCH)
    run.undo()
    run.undo()
