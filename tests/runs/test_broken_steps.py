"""A step that fails inside the optimizer is taken back, whatever the optimizer does.

Where it cannot be, the error says so by its type and what to do, which works.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import WIDTH, Counting, Nth, Started, square_loss, state_of
from small_plans import plan_with
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oomph.engine import transaction
from oomph.errors import StepBroken
from oomph.jobs.job import Job
from oomph.memory.limits import HostLimits
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply

EVERY = 5


class Failure(Exception):
    """What something of the user's raises."""


def fail() -> None:
    raise Failure("in the middle")


class Layered(torch.optim.Optimizer):
    """Keeps numbers in lists, in its groups and on itself, as nobody could know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "seen": 0})
        self.made = 0
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                past = self.state[parameter].setdefault("past", [])
                past.append(parameter.grad.clone())
                del past[:-2]
                self.norms.append(float(parameter.grad.norm()))
                parameter.sub_(sum(past), alpha=group["lr"] / (1 + self.norms[-1]))


class Averaging:
    """A step that somebody wrapped: it keeps a running mean of the weights."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.weights = [p for group in optimizer.param_groups for p in group["params"]]
        self.means = [weight.detach().clone() for weight in self.weights]
        self.calls = 0
        step = optimizer.step

        def wrapped(closure: Any = None) -> None:
            step(closure)
            self.calls += 1
            with torch.no_grad():
                for mean, weight in zip(self.means, self.weights, strict=True):
                    mean.lerp_(weight, 0.1)

        optimizer.step = wrapped  # type: ignore[method-assign]
        self.state = lambda: (self.calls, [mean.clone() for mean in self.means])


def layered(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = Layered(model.parameters())
    return optimizer, lambda: (optimizer.made, list(optimizer.norms))


def wrapped(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, Averaging(optimizer).state


def wrapped_and_fused(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return optimizer, Averaging(optimizer).state


def hooked(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
    seen: list[float] = []

    def after(*_: Any) -> None:
        seen.append(float(sum(p.detach().sum() for p in model.parameters())))

    optimizer.register_step_post_hook(after)
    return optimizer, lambda: list(seen)


MAKE = [layered, wrapped, wrapped_and_fused, hooked]


def started(make: Callable[[nn.Module], Any]) -> tuple[Run, Callable[[], Any], list[Any]]:
    torch.manual_seed(0)
    model = Counting()
    optimizer, own = make(model)
    batches = [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(3)]
    plan = plan_with(Choices(), model, optimizer, batches[0])
    run = apply(plan, Job(model, square_loss, optimizer, batches[0], name="net"))
    torch.manual_seed(1)
    return run, own, batches


def assert_same(now: Any, then: Any) -> None:
    for one, other in zip(tree_leaves(now), tree_leaves(then), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("make", MAKE)
def test_a_step_made_as_a_whole_is_taken_back_wherever_it_fails(make: Any) -> None:
    run, own, batches = started(make)
    for batch in batches:
        with Nth(0, fail) as counted:
            run.step(batch)
    expected = copy.deepcopy((state_of(run), own()))
    run, own, batches = started(make)
    run.step(batches[0])
    before = copy.deepcopy((state_of(run), own()))
    for at in range(1, counted.count, EVERY):
        steps = run.steps
        with contextlib.suppress(Failure), Nth(at, fail):
            run.step(batches[1])
        if run.steps > steps:  # it had fewer operations than when they were counted
            assert at > 0.7 * counted.count
            break
        assert_same((state_of(run), own()), before)
    else:
        run.step(batches[1])
    run.step(batches[2])
    assert_same((state_of(run), own()), expected)


def test_a_hook_that_fails_after_the_step_takes_it_back() -> None:
    run, own, batches = started(hooked)
    run.step(batches[0])
    before = copy.deepcopy((state_of(run), own()))
    handle = run.optimizer.register_step_post_hook(lambda *_: fail())
    with pytest.raises(Failure):
        run.step(batches[1])
    handle.remove()
    assert_same((state_of(run), own()), before)


def test_without_room_for_copies_a_broken_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = HostLimits(memory=0, memory_limit="the machine", lockable=None)
    monkeypatch.setattr(transaction, "host_limits", lambda: nothing)
    run, _, batches = started(wrapped)
    handle = run.optimizer.register_step_post_hook(lambda *_: fail())
    with pytest.raises(StepBroken, match=r"load your last checkpoint.*in the middle") as raised:
        run.step(batches[0])
    assert isinstance(raised.value.__cause__, Failure)
    handle.remove()
    with pytest.raises(StepBroken):
        run.step(batches[0])


# -- the optimizer on the host ---------------------------------------------------------------------


@pytest.fixture(params=["host_optimizer", "host_cores", "leaving_gradients", "disk_state"])
def broken(
    request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Started, Any, Path]]:
    """A run that steps parameters one by one, its first weights, and a checkpoint."""
    monkeypatch.setattr("oomph.engine.applying.bucket_bytes", lambda _: 64)
    one = Started.with_choices(request.param)
    one.run.step(one.batches[0])
    saved = one.run.save(tmp_path)
    first = one.run.model.blocks[0].inner.weight
    yield one, first, saved
    one.run.undo()


def test_a_backward_that_fails_when_some_were_stepped_says_so_and_a_load_mends_it(
    broken: tuple[Started, Any, Path],
) -> None:
    one, first, saved = broken
    before = copy.deepcopy(state_of(one.run))
    handle = first.register_hook(lambda _: fail())
    with pytest.raises(StepBroken, match="load your last checkpoint") as raised:
        one.run.step(one.batches[1])
    handle.remove()
    assert isinstance(raised.value.__cause__, Failure)
    with pytest.raises(StepBroken):
        one.run.step(one.batches[1])
    one.run.load(saved)
    assert_same(state_of(one.run), before)
    for batch in one.batches[1:]:
        one.run.step(batch)
    other = Started.with_choices("host_optimizer")
    for batch in other.batches:
        other.run.step(batch)
    for mine, theirs in zip(one.run.model.parameters(), other.run.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_bad_checkpoint_leaves_a_broken_run_broken(broken: Any, tmp_path: Path) -> None:
    one, first, _ = broken
    handle = first.register_hook(lambda _: fail())
    with pytest.raises(StepBroken):
        one.run.step(one.batches[1])
    handle.remove()
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(Exception, match="checkpoint"):
        one.run.load(tmp_path / "elsewhere")
    with pytest.raises(StepBroken):
        one.run.step(one.batches[1])


def test_what_is_no_error_is_passed_on_with_a_note(broken: Any) -> None:
    def quit() -> None:
        raise SystemExit(3)

    one, first, _ = broken
    first.register_hook(lambda _: quit())
    with pytest.raises(SystemExit) as raised:
        one.run.step(one.batches[1])
    assert any("load your last checkpoint" in note for note in raised.value.__notes__)


def test_nothing_of_a_step_is_kept_where_backward_fails_before_any_is_stepped() -> None:
    one = Started.with_choices("host_optimizer")
    one.run.step(one.batches[0])
    before = copy.deepcopy(state_of(one.run))
    handle = one.run.model.head.weight.register_hook(lambda _: fail())
    with pytest.raises(Failure):
        one.run.step(one.batches[1])
    handle.remove()
    assert_same(state_of(one.run), before)


@pytest.mark.parametrize("name", ["recompute", "in_backward", "micro_batch", "offload"])
def test_elsewhere_a_failing_backward_is_taken_back(name: str) -> None:
    one = Started.with_choices(name)
    before = copy.deepcopy(state_of(one.run))
    handle = one.run.model.blocks[0].inner.weight.register_hook(lambda _: fail())
    with pytest.raises(Failure):
        one.run.step(one.batches[0])
    handle.remove()
    assert_same(state_of(one.run), before)
