"""Batches of a run in parts that are made otherwise than the one it was planned for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_plans import plan_with
from torch import Tensor, nn

from oomph.errors import BadInput, NotRepeatable
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.adapting import why_too_long
from oomph.runs.run import Run, apply

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def make_batch(samples: int, seed: int, *, own_weights: bool) -> dict[str, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    shapes = {"x": samples, "y": samples, "weight": samples if own_weights else 1}
    return {
        name: torch.rand(size, 4, generator=stream, dtype=torch.float64)
        for name, size in shapes.items()
    }


def two_runs(loss: Loss, batch: dict[str, Tensor]) -> tuple[Run, Callable[[Any], Tensor]]:
    """One in parts of two samples, and the plain loop."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    choices = Choices(micro_batch=2)
    plan = plan_with(choices, models[0], optimizers[0], batch)
    run = apply(plan, Job(models[0], loss, optimizers[0], batch, name="net"))

    def plain(batch: dict[str, Tensor]) -> Tensor:
        found = loss(models[1], batch)
        found.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        return found.detach()

    return run, plain


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ((model(batch["x"]) - batch["y"]).square() * batch["weight"]).mean()


def test_weights_that_all_samples_had_in_common_may_come_with_each_of_them() -> None:
    run, plain = two_runs(weighted, first := make_batch(6, 0, own_weights=False))
    others = [make_batch(5, 1, own_weights=True), make_batch(4, 2, own_weights=False)]
    for batch in (first, *others, make_batch(6, 3, own_weights=True)):
        torch.testing.assert_close(run.step(batch), plain(batch), rtol=1e-12, atol=0)


def test_a_divisor_that_is_bounded_keeps_a_larger_batch_whole() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum() / min(len(batch["x"]), 6)

    run, plain = two_runs(loss, first := make_batch(6, 0, own_weights=False))
    torch.testing.assert_close(run.step(first), plain(first), rtol=1e-12, atol=0)
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(BadInput, match="must not be split any more"):
        run.step(make_batch(9, 1, own_weights=False))
    assert all(map(torch.equal, before, run.model.parameters()))
    again = make_batch(5, 2, own_weights=False)
    torch.testing.assert_close(run.step(again), plain(again), rtol=1e-12, atol=0)


def test_a_larger_batch_of_a_plain_loss_is_split_like_others() -> None:
    run, plain = two_runs(weighted, make_batch(6, 0, own_weights=False))
    for samples in (9, 12, 6, 10):
        batch = make_batch(samples, samples, own_weights=False)
        torch.testing.assert_close(run.step(batch), plain(batch), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("shapes", "fits"),
    [
        ([(3, 64, 56), (3, 56, 60)], True),  # the second has room where the larger first has, too
        ([(3, 56, 64), (3, 64, 50)], True),
        ([(3, 64, 56), (3, 64, 57), (3, 57, 64)], False),
        ([(3, 64, 65)], False),
        ([(4,), (3, 64, 64)], True),
        ([(5,)], False),
    ],
)
def test_fewer_samples_each_have_room_in_the_plan(
    shapes: list[tuple[int, ...]], fits: bool
) -> None:
    planned = [torch.zeros(size) for size in ((3, 64, 56), (3, 56, 64), (3, 64, 64), (4,))]
    net = nn.Linear(4, 4)
    plan = plan_with(Choices(), net, torch.optim.SGD(net.parameters(), 0.1), planned)
    assert (why_too_long(plan, shapes) == "") == fits


class Toggle:
    """Counts where nobody looks: in memory of C."""

    def __init__(self) -> None:
        self._calls = ctypes.c_int(0)

    @property
    def calls(self) -> int:
        return self._calls.value

    @calls.setter
    def calls(self, calls: int) -> None:
        self._calls.value = calls


class DoesLessLater(nn.Module):
    """In its sixth call, when the third step runs it again, it saves less than in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.toggle = Toggle()

    def forward(self, x: Tensor) -> Tensor:
        self.toggle.calls += 1
        out: Tensor = self.linear(x[:1] if self.toggle.calls == 6 else x)
        return out


def test_a_block_that_does_something_else_when_it_runs_again_is_named_as_the_cause() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(DoesLessLater(), nn.Linear(4, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batch = torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    plan = plan_with(Choices(blocks={"0": "recompute"}), model, optimizer, batch)
    run = apply(plan, Job(model, nn.MSELoss(), optimizer, batch, name="net"))
    run.step(batch), run.step(batch)
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(NotRepeatable, match=r"does not do the same .* have the plan keep"):
        run.step(batch)
    assert all(map(torch.equal, before, model.parameters()))
    run.step(batch)


def positive(raw: Tensor) -> Tensor:
    return nn.functional.softplus(raw) + 1e-3


DISTRIBUTIONS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda out: torch.distributions.Normal(out[:, :2], positive(out[:, 2:])),
    "independent": lambda out: torch.distributions.Independent(
        torch.distributions.Laplace(out[:, :2], positive(out[:, 2:])), 1
    ),
    "gamma": lambda out: torch.distributions.Gamma(positive(out[:, :2]), positive(out[:, 2:])),
}


@pytest.fixture
def no_numbers_in_new_memory() -> Iterator[None]:
    """New memory is full of NaN, as it may be."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_numbers_in_new_memory")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_loss_of_distributions_is_looked_at_again_inside_a_step(name: str) -> None:
    warm_up = 1

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        found = -DISTRIBUTIONS[name](out).log_prob(batch["y"][:, :2] + 0.1).mean()
        return found if step < warm_up else found + 0.1 * out.square().mean()

    step, first = 0, make_batch(6, 0, own_weights=False)
    run, plain = two_runs(loss, first)
    for step in range(4):
        batch = make_batch(6 + step % 2, step, own_weights=False)
        torch.testing.assert_close(run.step(batch), plain(batch), rtol=1e-12, atol=0)
