"""Blocks that leave something behind are recomputed with the numbers of the untouched job."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import stateful_blocks
import torch
from stateful_blocks import MODELS, SHARED, batches, loss_of, remembered
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.engine.applying import apply_choices
from oomph.engine.step import train_step
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, RECOMPUTE, Choices
from oomph.techniques import optimizer_in_backward

STEPS = 6


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    stateful_blocks.COUNT = 0
    stateful_blocks.SEEN.clear()
    np.random.seed(0)
    SHARED.manual_seed(0)
    model = MODELS[name]().double()
    torch.manual_seed(1)
    return model


def trained(name: str, how: str | None, **choices: Any) -> tuple[list[Any], list[Any], Any]:
    """Losses, gradients and all that the model keeps after some steps; untouched without `how`."""
    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = batches(STEPS)
    job = Job(model, loss_of, optimizer, data[0])
    paths = [f"blocks.{at}" for at in range(len(model.blocks))]
    blocks = dict.fromkeys(paths, how) if how is not None else {}
    losses, gradients = [], []
    torch.manual_seed(1)
    stage, undo = apply_choices(
        Choices(blocks=blocks, **choices), job, model, optimizer, device_type="cpu"
    )
    if stage.in_backward is None:
        stage.check = lambda _: gradients.append(
            [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
    for batch in data:
        losses.append(train_step(stage, batch))
    undo()
    return losses, gradients, remembered(model)


HOWS = (RECOMPUTE, "recompute saving product#0")
CASES = [
    (name, how)
    for name in MODELS
    for how in HOWS
    # A product that the block writes to later cannot be kept.
    if (name, how) != ("InPlaceRelu", HOWS[1])
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_numbers_and_all_that_is_kept_are_the_untouched_jobs(name: str, how: str) -> None:
    torch.testing.assert_close(trained(name, how), trained(name, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["reads another's weight", "steps early", "Plain"])
def test_weights_that_are_stepped_inside_backward_are_read_as_they_were(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is stepped as soon as it may be; without recompute, that is too early for some."""
    monkeypatch.setattr(optimizer_in_backward, "TOGETHER", 0)
    plain, stepped = trained(name, None), trained(name, how, optimizer_in_backward=True)
    torch.testing.assert_close(stepped[0], plain[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stepped[2], plain[2], rtol=1e-12, atol=1e-12)


class Products(TorchDispatchMode):
    """How many products of matrices ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


#: Its backward asks for nothing of what it saved.
NOTHING_TO_RECOMPUTE = {"ViewOfInput"}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - NOTHING_TO_RECOMPUTE))
def test_the_blocks_really_run_again(name: str) -> None:
    ran = []
    for how in (KEEP, RECOMPUTE):
        with Products() as products:
            trained(name, how)
        ran.append(products.ran)
    assert ran[1] > ran[0]
