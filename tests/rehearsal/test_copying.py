"""A model that is on a card already is copied as one of the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.rehearsal.phases import rehearse


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale[None, :]).sum()


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tensors look as if they were on a GPU, to whoever makes fake ones of them."""
    convert = FakeTensorMode.from_tensor

    def from_tensor(mode: FakeTensorMode, tensor: Any, **options: Any) -> Any:
        fake = convert(mode, tensor, **options)
        if not isinstance(tensor, FakeTensor):
            fake.fake_device = torch.device("cuda:0")
        return fake

    monkeypatch.setattr(FakeTensorMode, "from_tensor", from_tensor)


def job_of(model: nn.Module) -> Job:
    optimizer = torch.optim.AdamW(model.parameters())
    return Job(model, None, optimizer, torch.ones(8, 16))


@pytest.mark.usefixtures("on_a_card")
def test_weights_and_buffers_on_a_card_are_rehearsed() -> None:
    here = rehearse(job_of(Scaled()), find_gpu("h200"), ("build", "step"))
    assert {block.size for block in here.blocks} >= {16 * 16 * 4, 16 * 4}


class Noisy(Scaled):
    """Holds a generator, and one in a list."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.others = generator, [generator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


@pytest.mark.parametrize("gpu", [None, "h200"])
def test_a_generator_of_the_models_own_is_copied_and_stays_where_it_is(gpu: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    job = job_of(Noisy(generator))
    assert rehearse(job, find_gpu(gpu) if gpu else None, ("build", "step")).blocks
    assert torch.equal(generator.get_state(), before)


@functools.cache
def table(width: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, width)


class Tabled(Scaled):
    """Reads what a function remembers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * table(x.shape[1]))


def test_no_function_remembers_a_fake_tensor() -> None:
    table.cache_clear()
    rehearse(job_of(Tabled()), None, ("build", "step"))
    assert not isinstance(table(16), FakeTensor)


def test_what_a_function_remembered_before_is_left_alone() -> None:
    table.cache_clear()
    remembered = table(16)
    rehearse(job_of(Scaled()), None, ("build", "step"))
    assert table(16) is remembered


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gpu", [None, "h100-sxm"])
def test_a_trunk_that_a_builder_only_returns_is_left_as_it_was(
    gpu: str | None, precision: Any
) -> None:
    trunk = nn.Sequential(nn.Linear(16, 16), nn.Dropout()).eval()
    held = [(one, one.data_ptr(), one.dtype, one.device) for one in trunk.parameters()]

    def build() -> nn.Module:
        return nn.Sequential(trunk, nn.Linear(16, 1))

    batch = torch.ones(4, 16), torch.ones(4, 1)
    job = Job(build, nn.MSELoss(), "adamw", batch, precision=precision)
    rehearse(job, find_gpu(gpu) if gpu else None)
    assert held == [(one, one.data_ptr(), one.dtype, one.device) for one in trunk.parameters()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trunk.modules())
    assert not any(one.requires_grad and one._post_accumulate_grad_hooks for one, *_ in held)
    assert not trunk.training and all(one.grad is None for one, *_ in held)
