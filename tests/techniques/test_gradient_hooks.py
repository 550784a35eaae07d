"""Hooks on gradients are called as the untouched job calls them; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_plans import plan_with
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.hardware import find_gpu
from oomph.jobs.job import Job, split_batch
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply
from oomph.search.planner import plan
from oomph.techniques.gradient_hooks import GradientHooks

WIDTH = 6
_numbers = torch.Generator().manual_seed(1)
BATCH = tuple(torch.randn(8, WIDTH, generator=_numbers).double() for _ in range(2))


def make_model(hook: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
    for parameter in model.parameters() if hook is not None else ():
        parameter.register_hook(hook)
    return model


def make_run(model: nn.Module, own: int | None = None, **choices: Any) -> Run:
    """A run of a job that has micro-batches of its own, or none."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    made = plan_with(Choices(**choices), model, optimizer, BATCH)
    return apply(made, Job(model, nn.MSELoss(), optimizer, BATCH, micro_batch=own, name="net"))


def step_plainly(model: nn.Module, parts: int = 1) -> None:
    for x, y in split_batch(BATCH, len(BATCH[0]) // parts):
        (nn.functional.mse_loss(model(x), y) / parts).backward()
    torch.optim.SGD(model.parameters(), 0.5).step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def clip_in_module(module: nn.Module, given: Any, came: Any) -> Any:
    return tuple(None if one is None else one / (1 + one.norm()) for one in given)


# -- in parts --------------------------------------------------------------------------------------


def test_a_hook_is_called_once_with_the_sum_of_all_parts() -> None:
    seen: list[Tensor] = []
    model, plain = make_model(seen.append), make_model()
    make_run(model, micro_batch=2).step(BATCH)
    step_plainly(plain)
    assert len(seen) == len(list(model.parameters()))
    for gradient, parameter in zip(reversed(seen), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad, atol=1e-12)
    assert_same(model, plain)


def test_parts_of_the_jobs_own_call_hooks_one_by_one() -> None:
    """A loop that accumulates by itself has each part's gradient clamped."""
    model, plain = make_model(clamped), make_model(clamped)
    make_run(model, own=2, micro_batch=2).step(BATCH)
    step_plainly(plain, parts=4)
    assert_same(model, plain)


def test_other_parts_than_the_jobs_own_are_refused() -> None:
    model = make_model(clamped)
    with pytest.raises(BadInput, match=r"the gradient of 0\.weight has a hook"):
        make_run(model, own=2, micro_batch=4)


def test_a_parameter_that_no_part_used_calls_no_hook() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = make_model(), nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    model, seen = Idle(), []
    model.idle.weight.register_hook(seen.append)
    model.used[0].weight.register_hook(seen.append)
    make_run(model, micro_batch=2).step(BATCH)
    assert len(seen) == 1


def test_a_hook_that_fails_leaves_all_as_it_was_and_is_there_again() -> None:
    fails = [True]

    def hook(gradient: Tensor) -> Tensor:
        if fails[0]:
            raise ZeroDivisionError
        return clamped(gradient)

    model, plain = make_model(hook), make_model(clamped)
    run = make_run(model, micro_batch=2, optimizer_in_backward=True)
    with pytest.raises(ZeroDivisionError):
        run.step(BATCH)
    assert_same(model, plain)
    fails[0] = False
    run.step(BATCH)
    step_plainly(plain)
    assert_same(model, plain)


def test_hooks_are_withheld_but_those_that_were_taken_away_stay_away() -> None:
    seen: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    model = nn.ParameterList([weight])
    goes = weight.register_hook(lambda _: seen.append("goes"))
    weight.register_hook(lambda _: seen.append("stays"))
    with GradientHooks(model, once=True).withheld():
        weight.sum().backward()
        goes.remove()
    assert seen == []
    weight.sum().backward()
    assert seen == ["stays"]


# -- refused ---------------------------------------------------------------------------------------


def test_a_modules_hook_added_after_apply_stops_the_step_before_anything_changes() -> None:
    model, plain = make_model(), make_model()
    run = make_run(model, micro_batch=2, optimizer_in_backward=True)
    handle = model[1].register_full_backward_hook(clip_in_module)
    with pytest.raises(BadInput, match="1 has a backward hook"):
        run.step(BATCH)
    assert_same(model, plain)
    handle.remove()
    run.step(BATCH)
    step_plainly(plain)
    assert_same(model, plain)


def test_a_modules_hook_is_no_hindrance_where_the_batch_is_whole() -> None:
    model, plain = make_model(), make_model()
    for one in (model, plain):
        one[1].register_full_backward_hook(clip_in_module)
    make_run(model).step(BATCH)
    step_plainly(plain)
    assert_same(model, plain)


def test_plans_keep_the_batch_whole_for_a_modules_hook_and_say_so() -> None:
    model = make_model()
    model[1].register_full_backward_hook(clip_in_module)
    job = Job(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.5), BATCH)
    made = plan(job, gpu=find_gpu("rtx-4090"))
    assert made.choices.micro_batch is None
    assert any("1 has a backward hook" in note for note in made.notes)


# -- hooks that come later than a plan's -----------------------------------------------------------


def test_a_hook_added_after_apply_comes_before_the_step_inside_backward() -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model, plain = make_model(), make_model()
    run = make_run(model, optimizer_in_backward=True)
    for one in (model, plain):
        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
    run.step(BATCH)
    step_plainly(plain)
    assert_same(model, plain)
