"""Nothing of a model stays alive when its run is over, whatever its modules keep."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import oomph
from oomph.errors import NotRepeatable
from oomph.plans.choices import KEEP
from oomph.techniques.recompute import calls_end_with, recompute
from oomph.torch_compat import fake_tensors

WIDTH = 16


class KeepsAGraph(nn.Module):
    """A block that keeps a loss of its own, which nobody adds up: its graph is never freed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.up(x).exp().mean()
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def alive_fakes() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is fake_tensors.FakeTensor]


@pytest.mark.parametrize("undoes", [False, True])
def test_neither_the_model_nor_its_fakes_outlive_a_run_that_recomputes(undoes: bool) -> None:
    made: list[weakref.ref[Tensor]] = []

    def fit() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(KeepsAGraph() for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.rand(64, WIDTH), torch.rand(64, WIDTH)
        run = oomph.fit(model, optimizer, nn.MSELoss(), batch, budget="300KB")
        assert any(way != KEEP for way in run.plan.choices.blocks.values())
        for _ in range(2):
            run.step(batch)
        if undoes:
            run.undo()
        made.extend(map(weakref.ref, model.parameters()))

    before = {id(one): one for one in alive_fakes()}  # other tests may keep some
    fit()
    assert not [one for one in alive_fakes() if id(one) not in before]
    assert not [ref for ref in made if ref() is not None]


def test_a_graph_of_a_step_that_is_over_says_so() -> None:
    block = KeepsAGraph()
    recompute(block, name="blocks.0")
    with calls_end_with(nn.Sequential(block)):
        block(torch.rand(3, WIDTH)).sum().backward()
    with pytest.raises(NotRepeatable, match=r"blocks\.0 cannot .* the step that it ran in is over"):
        block.loss.backward()
