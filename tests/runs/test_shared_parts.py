"""Two models share a part, and each is trained by a run of its own: as without, or refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_plans import plan_with
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply

WIDTH = 8
BLOCKS = ("trunk.0", "trunk.1")
KEPT = dict.fromkeys(BLOCKS, "keep")
BATCH = (
    torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).double(),
    torch.linspace(1, -1, 12).view(4, 3).double(),
)
WAYS = {
    "plain": Choices(blocks=KEPT),
    "recompute": Choices(blocks=dict.fromkeys(BLOCKS, "recompute")),
    "host": Choices(blocks=KEPT, optimizer_on="host"),
    "host's cores": Choices(blocks=KEPT, optimizer_on="host", host_share=1.0),
    "away": Choices(blocks=KEPT, optimizer_on="host", weights_away=BLOCKS),
}
EXCLUDED = {frozenset(("away", other)) for other in ("away", "host", "host's cores")}


class Model(nn.Module):
    """A head on a trunk that is another's, too."""

    def __init__(self, trunk: nn.Sequential) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x))
        return out


def make() -> tuple[Model, Model]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in BLOCKS)
    trunk = nn.Sequential(*blocks).double()
    return Model(trunk), Model(trunk)


def start(model: Model, choices: Choices) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = Job(model, nn.MSELoss(), optimizer, BATCH, name="net", clip_norm=1.0)
    return apply(plan_with(choices, model, optimizer, BATCH), job)


def weights(models: tuple[Model, Model]) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def trained_plainly() -> list[Tensor]:
    models = make()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.functional.mse_loss(model(BATCH[0]), BATCH[1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(models)


@pytest.mark.parametrize(("one", "other"), list(itertools.product(WAYS, WAYS)))
def test_each_run_goes_on_from_what_the_other_made_of_the_trunk(one: str, other: str) -> None:
    models = make()
    first = start(models[0], WAYS[one])
    if frozenset((one, other)) in EXCLUDED:
        with pytest.raises(BadInput, match="another run has this model's weights"):
            start(models[1], WAYS[other])
        first.step(BATCH)
        first.undo()
        assert all(type(p) is nn.Parameter and not vars(p) for p in models[1].parameters())
        return
    runs = [first, start(models[1], WAYS[other])]
    for _ in range(4):
        for run in runs:
            run.step(BATCH)
    for run in reversed(runs):
        run.undo()
    for ours, theirs in zip(weights(models), trained_plainly(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(type(p) is nn.Parameter and not vars(p) for m in models for p in m.parameters())
