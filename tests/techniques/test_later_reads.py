"""Weights that backward is still to read are stepped after it has."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import oomph
from oomph.errors import SteppedTooEarly
from oomph.memory.link import InstantLink
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.later_reads import LaterReads
from oomph.techniques.optimizer_in_backward import OptimizerInBackward
from oomph.techniques.recompute import recompute

WIDTH = 6


class Reads(nn.Module):
    """A block that reads a weight of another one, which it does not train."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other: list[nn.Linear] = []
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            out: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return out
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        read = F.linear(x, self.other[0].weight.detach()) if self.other else x
        return torch.tanh(self.own(read))


def make(checkpoints: bool = False) -> nn.Sequential:
    """The second block reads the last one's weight, whose gradient comes first."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Reads(checkpoints) for _ in range(4)))
    net[1].other = [net[3].own]
    return net


def stepped_plainly(net: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for x in batches:
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


BATCHES = [torch.full((2, WIDTH), 0.1 * at) for at in range(1, 7)]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("where", ["in backward", "on the host", "by the host's cores"])
def test_a_detached_weight_of_another_block_is_the_one_of_its_forward(
    where: str, recomputes: bool
) -> None:
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for block in net if recomputes else ():
        recompute(block)
    in_backward = host = None
    if where == "in backward":
        in_backward = OptimizerInBackward(optimizer)
    else:
        share = 0.0 if where == "on the host" else 1.0
        placement = HostPlacement(host_share=share, bucket=128)
        host = HostOptimizer(net, optimizer, InstantLink(), placement, blocks=list(net))
    for x in BATCHES:
        loss = net(x).square().sum()
        if in_backward is not None:
            with in_backward.armed():
                loss.backward()
        elif host is not None:
            with host.backward():
                loss.backward()
            host.step()
    expected = stepped_plainly(make(), BATCHES)
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)


def test_only_what_is_read_waits() -> None:
    net = make()
    stepped: list[Tensor] = []
    in_backward = OptimizerInBackward(torch.optim.SGD(net.parameters(), lr=0.5))
    in_backward.before_step = stepped.append
    with in_backward.armed():
        net(BATCHES[0]).square().sum().backward()
    order = [next(n for n, p in net.named_parameters() if p is one) for one in stepped]
    assert order.index("3.own.weight") > order.index("1.own.weight")
    assert order.index("3.own.bias") < order.index("1.own.weight")


def test_a_run_makes_a_step_again_where_nobody_could_tell() -> None:
    """A checkpoint of the user's own reads the weight in backward."""
    net, plain = make(checkpoints=True), make(checkpoints=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    job = oomph.Job(net, lambda model, x: model(x).square().sum(), optimizer, BATCHES[0])
    plan = oomph.plan(job, budget="1GiB")
    run = oomph.apply(_in_backward(plan), job)
    for x in BATCHES:
        run.step(x)
    assert run.plan.choices.optimizer_in_backward
    expected = stepped_plainly(plain, BATCHES)
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)


def _in_backward(plan: oomph.Plan) -> oomph.Plan:
    choices = dataclasses.replace(plan.choices, optimizer_in_backward=True, micro_batch=None)
    return dataclasses.replace(plan, choices=choices)


def test_a_read_that_comes_too_late_is_told_with_its_line() -> None:
    weight = nn.Parameter(torch.ones(2))
    later = LaterReads([weight])
    later.stepped([weight])
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient * weight.detach())
    with pytest.raises(SteppedTooEarly, match=r"test_later_reads.py:\d+"):
        x.sum().backward()
    later.end()
    assert type(weight) is nn.Parameter
    assert later.are_expected(weight)


def test_weights_are_watched_no_longer_than_backward() -> None:
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    in_backward = OptimizerInBackward(optimizer)
    with in_backward.armed():
        net(BATCHES[0]).square().sum().backward()
    assert all(type(p) is nn.Parameter and not vars(p) for p in net.parameters())
    assert copy.deepcopy(net)
