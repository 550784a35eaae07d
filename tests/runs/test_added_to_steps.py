"""What a user adds to an optimizer's step runs once for each step and sees all of it; where it
could not, the plan does without, or is refused."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_plans import plan_with
from switched_on import on
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oomph.errors import BadInput
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply, fit
from oomph.search.planner import plan

WIDTH, STEPS = 12, 3
BATCHES = [
    torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed)).unbind()
    for seed in range(STEPS)
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x).tanh()
        return out


class Noted:
    """What of a user's is called in steps: it clips, decays, averages, and counts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls = 0
        self.average = [p.detach().clone() for p in model.parameters()]

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.calls += 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(norm.clamp_min(0.01))

    def after(self, *_: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            for average, parameter in zip(self.average, self.model.parameters(), strict=True):
                average.lerp_(parameter, 0.5)
                parameter.mul_(0.9)


Add = Callable[[torch.optim.Optimizer, Noted], Any]


def hooked(optimizer: torch.optim.Optimizer, noted: Noted) -> None:
    optimizer.register_step_pre_hook(noted.before)
    optimizer.register_step_post_hook(noted.after)


def replaced(optimizer: torch.optim.Optimizer, noted: Noted) -> None:
    plain = optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        noted.before(self)
        result = plain(*args, **kwargs)
        noted.after()
        return result

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def replaced_and_scheduled(optimizer: torch.optim.Optimizer, noted: Noted) -> Any:
    replaced(optimizer, noted)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def given_a_class(optimizer: torch.optim.Optimizer, noted: Noted) -> None:
    class Averaging(type(optimizer)):  # type: ignore[misc]
        noted: Noted

        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.noted.before(self)
            result = super().step(*args, **kwargs)
            self.noted.after()
            return result

    optimizer.__class__ = Averaging
    optimizer.noted = noted  # type: ignore[attr-defined]


ADDITIONS = [hooked, replaced, replaced_and_scheduled, given_a_class]


def make(cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    """Biases have a group of their own, which comes first."""
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    ]
    return model, cls(groups, lr=0.05)


def untouched(add: Add, first: int = 0) -> tuple[nn.Module, Noted]:
    """What the job does by itself, with something added before step `first`."""
    model, optimizer = make()
    noted = Noted(model)
    for at, (inputs, targets) in enumerate(BATCHES):
        if at == first:
            add(optimizer, noted)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, noted


def run_of(choices: Choices, model: nn.Module, optimizer: torch.optim.Optimizer, **kw: Any) -> Run:
    job = Job(model, nn.MSELoss(), optimizer, BATCHES[0], **kw)
    return apply(plan_with(choices, model, optimizer, BATCHES[0]), job)


BLOCKS = {f"blocks.{at}": "recompute" for at in range(3)}
WHOLE = {
    "plain": Choices(),
    "recompute": Choices(blocks=BLOCKS),
    "fused": Choices(techniques=on("fused_optimizer")),
    "parts": Choices(micro_batch=2),
}
ONE_BY_ONE = {
    "in backward": Choices(optimizer_in_backward=True),
    "on the host": Choices(optimizer_on="host"),
    "by the host": Choices(optimizer_on="host", host_share=1.0),
    "weights away": Choices(optimizer_on="host", blocks=BLOCKS, weights_away=tuple(BLOCKS)),
    "masters": Choices(precision="bf16-mixed", weights="bf16 with fp32 masters"),
}


@pytest.mark.parametrize("add", ADDITIONS)
@pytest.mark.parametrize("first", [0, 1], ids=["before", "after a step"])
@pytest.mark.parametrize("name", WHOLE)
def test_it_runs_once_for_each_step(name: str, first: int, add: Add) -> None:
    if name == "fused" and add is given_a_class and not first:
        pytest.skip("nobody can tell that such a class has a fused kernel")
    model, optimizer = make()
    noted = Noted(model)
    if not first:
        held = add(optimizer, noted)
    with run_of(WHOLE[name], model, optimizer) as run:
        for at, batch in enumerate(BATCHES):
            if at == first == 1:
                held = add(optimizer, noted)
            run.step(batch)
    del held
    expected, seen = untouched(add, first)
    assert noted.calls == seen.calls == 2 * (STEPS - first)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(noted.average, seen.average, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("add", ADDITIONS)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_steps_of_a_few_parameters_are_refused_and_change_nothing(name: str, add: Add) -> None:
    model, optimizer = make()
    noted = Noted(model)
    held = add(optimizer, noted)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadInput, match=r"would not run once|nobody can tell"):
        run_of(ONE_BY_ONE[name], model, optimizer)
    del held
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert noted.calls == 0


@pytest.mark.parametrize("add", ADDITIONS)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_is_added_later_is_refused_at_the_next_step_and_changes_nothing(
    name: str, add: Add
) -> None:
    model, optimizer = make()
    noted = Noted(model)
    with run_of(ONE_BY_ONE[name], model, optimizer) as run:
        run.step(BATCHES[0])
        held = add(optimizer, noted)
        before = copy.deepcopy((run.model.state_dict(), optimizer.state_dict()))
        with pytest.raises(BadInput, match=r"would not run once|nobody can tell"):
            run.step(BATCHES[1])
        torch.testing.assert_close(
            (run.model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0
        )
        assert noted.calls == 0
    del held


def test_what_is_taken_away_again_is_no_obstacle() -> None:
    model, optimizer = make()
    with run_of(ONE_BY_ONE["on the host"], model, optimizer) as run:
        handle = optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(BadInput, match="would not run once"):
            run.step(BATCHES[0])
        handle.remove()
        for batch in BATCHES:
            run.step(batch)
    expected, _ = untouched(lambda *_: None)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.fixture
def everybodys() -> Iterator[list[int]]:
    """Lengths of what steps of all optimizers were shown."""
    shown: list[int] = []

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        shown.append(sum(len(group["params"]) for group in optimizer.param_groups))

    handle = register_optimizer_step_pre_hook(count)
    yield shown
    handle.remove()


@pytest.mark.parametrize("name", WHOLE)
def test_a_hook_on_all_optimizers_sees_whole_steps(name: str, everybodys: list[int]) -> None:
    model, optimizer = make()
    with run_of(WHOLE[name], model, optimizer) as run:
        for batch in BATCHES:
            run.step(batch)
    assert everybodys == [6] * STEPS


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused by the plan"])
def test_hooks_see_unscaled_gradients(fused: bool) -> None:
    """A fused step would unscale them after its hooks, and skip by itself what is not finite."""
    model, optimizer = make()
    noted = Noted(model)
    hooked(optimizer, noted)
    run = run_of(Choices(techniques=on(fused_optimizer={"enabled": fused})), model, optimizer)
    scaler = run._stage.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for inputs, targets in BATCHES:
        run.step((inputs, targets))
    run.step((BATCHES[0][0] * torch.inf, BATCHES[0][1]))  # skipped, hooks and all
    run.undo()
    expected, seen = untouched(hooked)
    assert noted.calls == seen.calls
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", ADDITIONS)
def test_plans_do_without_and_say_why(add: Add) -> None:
    model, optimizer = make()
    noted = Noted(model)
    held = add(optimizer, noted)
    job = Job(model, nn.MSELoss(), optimizer, BATCHES[0], precision="bf16-mixed")
    made = plan(job, gpu=find_gpu("rtx-4090"), budget="20GiB")
    choices = made.choices
    assert not choices.optimizer_in_backward
    assert choices.optimizer_on == "gpu"
    assert choices.weights == "own"
    assert any("the optimizer steps as a whole" in note for note in made.notes)
    del held


@pytest.mark.parametrize("add", ADDITIONS)
def test_fitted_steps_are_the_untouched_ones(add: Add) -> None:
    model, optimizer = make()
    noted = Noted(model)
    held = add(optimizer, noted)
    with fit(model, optimizer, nn.MSELoss(), BATCHES[0], budget="1GiB") as run:
        for batch in BATCHES:
            run.step(batch)
        assert any("the optimizer steps as a whole" in note for note in run.plan.notes)
    del held
    expected, seen = untouched(add)
    assert noted.calls == seen.calls
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_schedule_alone_keeps_no_plan_from_anything() -> None:
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    job = Job(model, nn.MSELoss(), optimizer, BATCHES[0])
    notes = plan(job, gpu=find_gpu("rtx-4090"), budget="20GiB").notes
    assert not any("steps as a whole" in note for note in notes)
    assert scheduler.optimizer is optimizer


def test_an_elastic_run_looks_at_the_step_as_it_is() -> None:
    """The plans it makes later, when its own is taken back for it, know what was replaced."""
    model, optimizer = make()
    noted = Noted(model)
    replaced(optimizer, noted)
    with run_of(Choices(), model, optimizer) as run:
        applied = run._adapting._applied
        with applied.taken_back():
            assert "step" in vars(optimizer)
            model_now = dataclasses.replace(applied.job, model=model, optimizer=optimizer)
            assert not plan(model_now, budget="1GiB").choices.optimizer_in_backward
    assert noted.calls == 0
