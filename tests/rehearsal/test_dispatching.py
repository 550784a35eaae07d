"""Replaced kernels: PyTorch's tracer sees them while they last, and only then."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.gpus import find_gpu
from oomph.job import Job
from oomph.planning.choices import Choices
from oomph.rehearsal.dispatching import replaced_kernels
from oomph.rehearsal.phases import rehearse


class Block(nn.Module):
    """What a rehearsal replaces: a product and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.product(x).tanh(), 0.5)


def rehearse_compiled() -> list[tuple[int, int, int | None]]:
    """The memory of a rehearsed step with a compiled block: sizes, births and deaths."""
    job = Job(
        lambda: nn.Sequential(Block()), nn.MSELoss(), "sgd", (torch.ones(4, 8), torch.ones(4, 8))
    )
    choices = Choices(blocks={"0": "keep"}, compiled=True)
    timeline = rehearse(job, find_gpu("h200"), choices=choices)
    return [(block.size, block.birth, block.death) for block in timeline.blocks]


def gradient(block: nn.Module) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    block(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_block_compiled_after_a_rehearsal_has_its_gradients() -> None:
    torch._dynamo.reset()
    rehearse_compiled()
    block = Block()
    compiled = torch.compile(block, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(gradient(compiled), gradient(block), rtol=0, atol=0)
    torch._dynamo.reset()


def test_a_block_compiled_before_a_rehearsal_changes_nothing_in_it() -> None:
    expected = rehearse_compiled()
    torch._dynamo.reset()
    gradient(torch.compile(Block(), backend="aot_eager", dynamic=False))
    assert rehearse_compiled() == expected
    torch._dynamo.reset()


def test_afterwards_the_kernel_is_the_old_one() -> None:
    x = torch.ones(2)
    with replaced_kernels() as replace:
        replace("tanh", lambda x: x + 41, "CPU")
        assert torch.tanh(x).tolist() == [42, 42]
    assert torch.tanh(x).tolist() == torch.ones(2).double().tanh().float().tolist()
