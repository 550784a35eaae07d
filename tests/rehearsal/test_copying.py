"""A model that is on a card already is copied as one of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomph.gpus import find_gpu
from oomph.job import Job
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
