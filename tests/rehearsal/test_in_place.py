"""What PyTorch writes in place is not counted as a new tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_truth import measure, predict
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.step_cost import step_cost

INDICES = torch.tensor([0, 2, 2, 5])

FORWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a residual connection": lambda h, w: (h + h.tanh()) * w,
    "a residual connection, added the other way round": lambda h, w: (h.tanh() + h) * w,
    "several uses of one tensor": lambda h, w: h.tanh() * h.exp() * h.sin() * w,
    "a gradient that two branches share": lambda h, w: _shared(h, w) * w,
    "the same factor twice": lambda h, w: torch.mul(h, h) * w,
    "the same matrix twice": lambda h, w: torch.mm(h, h) * w,
    "slices of one tensor": lambda h, w: h[:4].exp() * h[4:].sin() * w[:4],
    "a view beside its tensor": lambda h, w: (h.view(64).tanh() + h.reshape(64)).view(8, 8) * w,
    "rows picked by index": lambda h, w: h[INDICES] * w[:4],
    "rows picked by index_select": lambda h, w: torch.index_select(h, 0, INDICES) * w[:4],
    "columns gathered": lambda h, w: h.gather(1, INDICES.expand(8, 4)) * w[:, :4],
}


def _shared(h: Tensor, w: Tensor) -> Tensor:
    early = h.sin()
    return (h + w) + early


class Toy(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.other = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x * self.weight, self.other).sum()


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_take_as_much_memory_as_in_a_real_backward(name: str) -> None:
    job = Job(
        lambda: Toy(FORWARDS[name]),
        lambda model, batch: model(batch),
        "sgd",
        lambda: torch.rand(8, 8),
    )
    predicted, measured = predict(job), measure(job).tensors
    assert predicted.alive == measured.alive
    assert predicted.peaks == measured.peaks


def test_what_is_written_in_place_takes_its_time() -> None:
    def launches(compute: Callable[[Tensor, Tensor], Tensor]) -> float:
        h200 = find_gpu("h200")
        job = Job(
            lambda: Toy(compute),
            lambda model, batch: model(batch),
            "sgd",
            lambda: torch.rand(8, 8),
        )
        timeline = rehearse(job, h200, ("build", "step"), clock=Clock.of(h200))
        return step_cost(timeline, 1).launches

    # Used once more, a tensor takes an op in forward, and a sum of two gradients in backward.
    once = launches(lambda h, w: h.tanh() * w)
    assert launches(lambda h, w: (h.tanh() + h) * w) == once + 2
    assert launches(lambda h, w: (h.tanh() + h.detach()) * w) == once + 1


def test_gradients_somebody_else_holds_are_not_written_to() -> None:
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        h = batch * model.weight
        total = h + h.tanh()
        total.register_hook(kept.append)
        return (total * model.other).sum()

    job = Job(lambda: Toy(torch.add), loss, "sgd", lambda: torch.rand(8, 8))
    predicted, measured = predict(job), measure(job).tensors
    kept.clear()
    assert predicted.peaks == measured.peaks
