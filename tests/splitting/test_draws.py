"""Random numbers that all samples have in common keep the batch whole; those of samples do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.splitting import prove_split

Compute = Callable[[nn.Linear, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear, x)


OF_EACH_SAMPLE: dict[str, Compute] = {
    "dropout": lambda linear, x: F.dropout(linear(x)),
    "noise": lambda linear, x: linear(x) + torch.randn_like(x),
    "a number each": lambda linear, x: linear(x) + torch.rand(len(x), 1),
    "noise in place": lambda linear, x: linear(x) + torch.empty_like(x).normal_(),
    "dropped paths": lambda linear, x: linear(x) * torch.empty(len(x), 1).bernoulli_(0.5),
    "no dropout": lambda linear, x: F.linear(x, F.dropout(linear.weight, 0.0)),
    "never drops a layer": lambda linear, x: x if torch.rand([]) < 0.0 else linear(x),
    "always runs a layer": lambda linear, x: linear(x) if torch.rand(1) >= 0 else x,
    "drawn and left": lambda linear, x: (linear(x), torch.rand(3))[0],
}
OF_ALL: dict[str, Compute] = {
    "dropped weights": lambda linear, x: F.linear(x, F.dropout(linear.weight, 0.3)),
    "a number that is read": lambda linear, x: linear(x) * torch.rand(1).item(),
    "a number": lambda linear, x: linear(x) * torch.rand(1),
    "a branch": lambda linear, x: linear(x if torch.rand(1) < 0.5 else x.flip(0)),
    "a branch by a number": lambda linear, x: linear(x) if torch.rand(1).item() < 0.5 else x,
    "drops a layer": lambda linear, x: x if torch.rand([]) < 0.1 else linear(x),
    "a mask": lambda linear, x: linear(x) * (torch.rand(8) < 0.9),
    "an order of features": lambda linear, x: linear(x[:, torch.randperm(8)]),
    "a width": lambda linear, x: linear(x * (torch.arange(8) < int(torch.randint(4, 9, (1,))))),
    "noise on features": lambda linear, x: linear(x) * torch.empty(8).normal_(),
}


def why_whole(compute: Compute, gpu: str | None) -> str:
    batch = torch.randn(6, 8), torch.randn(6, 8)
    job = Job(Net(compute), nn.MSELoss(), "sgd", batch)
    return prove_split(job, find_gpu(gpu) if gpu else None).whole_because


@pytest.mark.parametrize("gpu", [None, "rtx-4090"])
@pytest.mark.parametrize("name", OF_EACH_SAMPLE)
def test_what_is_drawn_for_each_sample_may_be_drawn_in_parts(name: str, gpu: str | None) -> None:
    assert not why_whole(OF_EACH_SAMPLE[name], gpu)


@pytest.mark.parametrize("gpu", [None, "rtx-4090"])
@pytest.mark.parametrize("name", OF_ALL)
def test_what_is_drawn_for_all_samples_is_drawn_once(name: str, gpu: str | None) -> None:
    assert "random numbers that all samples have in common" in why_whole(OF_ALL[name], gpu)
