"""Inference with weights off the GPU: planned to fit, same outputs, and everything given back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import BadInput, DoesNotFit
from oomph.job import Job
from oomph.running.inference import InferencePlan, apply_inference, plan_inference
from oomph.units import GIB

WIDTH, LAYERS = 8192, 12
BLOCK = 4 * WIDTH * WIDTH
"""Bytes of a layer of the model that is planned for: a quarter of a GiB."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).relu() + self.shift


def make_net(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
    return nn.Sequential(nn.Linear(4, width), blocks)


@functools.cache
def planned(budget: float) -> InferencePlan:
    job = Job(make_net, None, None, lambda: torch.zeros(2, 4))
    return plan_inference(job, gpu="rtx-4090", budget=int(budget * GIB))


def test_what_fits_stays_on_the_gpu() -> None:
    assert planned(6).streamed == ()


def test_as_few_blocks_are_streamed_as_the_budget_asks_for() -> None:
    as_it_is = planned(6)
    budget = 2.5
    plan = planned(budget)
    assert plan.estimate.fits
    assert plan.host_bytes == len(plan.streamed) * BLOCK
    # Those that are streamed are not there, but for two.
    saved = as_it_is.estimate.peak.allocated - plan.estimate.peak.allocated
    assert saved == pytest.approx((len(plan.streamed) - 2) * BLOCK, abs=1 << 20)
    assert plan.estimate.smallest_budget + BLOCK > budget * GIB
    assert plan.forward_seconds > as_it_is.forward_seconds


def test_streamed_blocks_are_spread_over_the_model() -> None:
    plan = planned(2.5)
    places = [int(path.split(".")[1]) for path in plan.streamed]
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert places[0] == 0
    assert max(gaps) - min(gaps) <= 1


def test_a_budget_that_is_too_small_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(DoesNotFit, match="12 of its 12 blocks") as refused:
        planned(1)
    assert len(planned(refused.value.smallest / GIB).streamed) == LAYERS


def small_plan(**changes: Any) -> InferencePlan:
    plan = dataclasses.replace(planned(2.5), **changes)
    assert plan.streamed
    return plan


def test_outputs_are_those_of_the_plain_model() -> None:
    plain = make_net(16)
    net = copy.deepcopy(plain).train()
    job = Job(net, nn.CrossEntropyLoss(), None, (torch.zeros(2, 4), torch.zeros(2)))
    batch = torch.randn(3, 4)
    expected = plain.eval()(batch)
    with apply_inference(small_plan(), job, device="cpu") as run:
        for _ in range(2):
            assert torch.equal(run((batch, None)), expected)
        with torch.no_grad():
            assert torch.equal(run.model(batch), expected)
        assert net[1][0].linear.weight.isnan().any()
    assert net.training
    assert torch.equal(net.eval()(batch), expected)


def test_batches_are_what_the_job_says() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(16)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.net(x) * factor

    plan = small_plan(streamed=("net.1.3", "net.1.4", "net.1.5"))
    batch = {"x": torch.randn(2, 4), "factor": 2.0}
    plain = Named().eval()
    with torch.no_grad():
        expected = plain(**batch)
    with apply_inference(plan, Job(Named, None, None, batch), device="cpu") as run:
        assert torch.equal(run(batch), expected)

    def total(model: nn.Module, given: Any) -> Tensor:
        return model(**given).sum()

    with apply_inference(plan, Job(Named, total, None, batch), device="cpu") as run:
        assert torch.equal(run(batch), expected.sum())


def test_a_plan_of_another_model_is_refused() -> None:
    job = Job(nn.Linear(4, 4), None, None, torch.zeros(2, 4))
    with pytest.raises(BadInput, match=r"1\.0, which Linear has not"):
        apply_inference(small_plan(), job, device="cpu")
