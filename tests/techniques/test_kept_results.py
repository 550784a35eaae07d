"""A block that keeps some results is recomputed in every backward of its graph: same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import NotRepeatable
from oomph.techniques.kept_results import KeptResults
from oomph.techniques.recompute import recompute

KEPT = ("product#0", "product#1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return x + torch.tanh(out)


def a_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def third_order(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x).sum()
    for _ in range(2):
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        out = slope.square().sum()
    return out


def gradient_of_weights(net: nn.Module, x: Tensor) -> Tensor:
    slopes = torch.autograd.grad(net(x).square().mean(), list(net.parameters()), create_graph=True)
    return sum((slope.square().sum() for slope in slopes), torch.zeros(()))


def retained(net: nn.Module, x: Tensor) -> Tensor:
    loss = net(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("loss", [penalty, third_order, gradient_of_weights, retained])
def test_gradients_of_gradients_are_those_of_the_untouched_block(
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    gradients = []
    for keeps in (False, True):
        net = a_net()
        if keeps:
            for block in net:
                recompute(block, KEPT)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss(net, x.requires_grad_()).backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    for plain, kept in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, plain, rtol=1e-12, atol=1e-12)


def test_results_are_given_up_in_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KeptResults] = []

    def make(*args: Any) -> KeptResults:
        made.append(KeptResults(*args))
        return made[-1]

    monkeypatch.setattr("oomph.techniques.recompute.KeptResults", make)
    net = a_net()
    for block in net:
        recompute(block, KEPT)
    loss = net(torch.randn(3, 4, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    assert [set(one._kept) for one in made] == [set(KEPT), set(KEPT)]
    loss.backward()
    assert [set(one._kept) for one in made] == [set(), set()]


def test_a_kept_result_that_was_written_to_is_refused_in_words() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.up(x)
            return x + self.down(out.relu_())

    torch.manual_seed(0)
    block = Writes().double()
    recompute(block, KEPT, name="blocks.0")
    loss = block(torch.randn(3, 4, dtype=torch.float64)).sum()
    with pytest.raises(NotRepeatable, match=r"blocks\.0 cannot .* was written to"):
        loss.backward()
