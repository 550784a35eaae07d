"""Whatever mode its caller is in, a run trains as the plain loop does outside of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupted_runs import CHOICES, WIDTH, Net, Started, square_loss, state_of
from small_plans import plan_with
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import oomph
from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


@contextlib.contextmanager
def on_meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def looking_for_anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = torch.autograd.detect_anomaly()
    with mode:
        yield


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad_disabled": without_gradients,
    "meta_by_default": on_meta_by_default,
    "warnings_are_errors": no_warnings,
    "anomalies": looking_for_anomalies,
}


@functools.cache
def outside_of_modes(name: str) -> dict[str, Any]:
    started = Started.with_choices(name)
    losses = [started.run.step(batch) for batch in started.batches]
    return {**copy.deepcopy(state_of(started.run)), "losses": losses}


def assert_same(now: Any, then: Any) -> None:
    for one, other in zip(tree_leaves(now), tree_leaves(then), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHOICES)
def test_steps_in_a_mode_are_those_outside_of_it(name: str, mode: str) -> None:
    started = Started.with_choices(name)
    with MODES[mode]():
        losses = [started.run.step(batch) for batch in started.batches]
    assert_same({**state_of(started.run), "losses": losses}, outside_of_modes(name))


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_fitted_in_a_mode_as_outside_of_it(mode: str) -> None:
    def fitted(around: Callable[[], Any]) -> Run:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        with around():
            natural = oomph.estimate(Job(model, square_loss, optimizer, batch)).peak.device
            run = oomph.fit(model, optimizer, square_loss, batch, budget=2 * natural)
            run.step(batch)
        return run

    inside, outside = fitted(MODES[mode]), fitted(contextlib.nullcontext)
    assert inside.plan.choices == outside.plan.choices
    assert_same(inside.model.state_dict(), outside.model.state_dict())


def test_a_batch_that_was_made_in_inference_mode_is_trained_on() -> None:
    started = Started.with_choices("recompute")
    with torch.inference_mode():
        batches = [tuple(one.clone() for one in batch) for batch in started.batches]
        assert batches[0][0].is_inference()
        losses = [started.run.step(batch) for batch in batches]
    assert_same({**state_of(started.run), "losses": losses}, outside_of_modes("recompute"))


def test_weights_that_were_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with pytest.raises(BadInput, match=r"blocks\.0\.inner\.weight was made in inference mode"):
        oomph.fit(model, optimizer, square_loss, batch)


def test_another_autocast_than_the_jobs_is_refused_and_nothing_is_changed() -> None:
    model = Net()
    started = Started.with_choices("host_cores")
    before = copy.deepcopy(state_of(started.run))
    words = "inside of an autocast to torch.bfloat16, and the job's precision is fp32"
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(BadInput, match=words):
            started.run.step(started.batches[0])
        with pytest.raises(BadInput, match=words):
            started.run.evaluate(started.batches)
        with pytest.raises(BadInput, match=words):
            oomph.fit(model, torch.optim.SGD(model.parameters()), square_loss, started.batches[0])
    assert_same(state_of(started.run), before)


def test_the_jobs_own_autocast_may_be_around_its_steps() -> None:
    def trained(around: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        choices = dataclasses.replace(CHOICES["micro_batch"], precision="bf16-mixed")
        plan = plan_with(choices, model, optimizer, batch)
        run = apply(plan, Job(model, square_loss, optimizer, batch, name="net"))
        # Longer than a step: its copies of weights must not outlive the weights' numbers.
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for _ in range(3):
                run.step(batch)
        return state_of(run)

    assert_same(trained(True), trained(False))


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with pytest.raises(BadInput, match="on meta, where its weights have no numbers"):
        oomph.fit(model, optimizer, square_loss, batch)


class Louder(TorchFunctionMode):
    """Has every linear layer give half as much again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func is nn.functional.linear else out


@pytest.mark.parametrize("name", ["recompute", "recompute_in_part", "offload", "in_backward"])
def test_a_mode_of_the_users_is_around_recomputation_too(name: str) -> None:
    torch.manual_seed(0)
    plain = Started.with_choices("fused_optimizer")
    started = Started.with_choices(name)
    with Louder():
        for batch in started.batches:
            plain_loss = plain.run.step(batch)
        torch.manual_seed(1)
        for batch in started.batches:
            loss = started.run.step(batch)
    torch.testing.assert_close(loss, plain_loss)


def test_lazy_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH))
    known = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    plan = plan_with(CHOICES["recompute"], known, torch.optim.AdamW(known.parameters()), batch)
    with pytest.raises(BadInput, match=r"0\.weight takes its size from the first batch"):
        apply(plan, Job(model, square_loss, optimizer, batch))


@pytest.mark.parametrize("around", [False, True])
def test_copies_of_weights_end_with_the_forward(around: bool) -> None:
    """No more of them is alive in backward than the graph holds, whatever is around the step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    choices = Choices(precision="bf16-mixed")
    plan = plan_with(choices, model, optimizer, batch)
    run = apply(plan, Job(model, square_loss, optimizer, batch, name="net"))
    nestings = []
    clear = torch.clear_autocast_cache
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "clear_autocast_cache", lambda: nestings.append(clear()))
        model.head.weight.register_hook(lambda _: nestings.append("backward"))
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            run.step(batch)
            assert torch.is_autocast_enabled("cpu") == around
    assert None in nestings[: nestings.index("backward")]
