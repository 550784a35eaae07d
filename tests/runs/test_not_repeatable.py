"""A block that does something else when it runs again ends its step before a weight is stepped."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
from small_plans import plan_with
from torch import Tensor, nn

from oomph.errors import NotRepeatable
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply

WIDTH = 256
"""Two blocks fill a bucket, so that those of the last two blocks could be stepped early."""
BLOCKS = {f"{at}": "recompute" for at in range(4)}


class Hidden:
    """Holds what cannot be seen from outside: memory of C."""

    def __init__(self) -> None:
        self._calls = ctypes.c_int(0)

    @property
    def calls(self) -> int:
        return self._calls.value

    @calls.setter
    def calls(self, calls: int) -> None:
        self._calls.value = calls

    def __deepcopy__(self, memo: object) -> Hidden:
        return Hidden()


class Block(nn.Module):
    """It scales by its calls while it `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.counts = False
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.calls += self.counts
        return x + torch.tanh(self.linear(x) * float(1 + self.hidden.calls))


def make(choices: Choices) -> tuple[Run, nn.Sequential, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in BLOCKS))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    batch = torch.rand(6, WIDTH, dtype=torch.float64), torch.rand(6, WIDTH, dtype=torch.float64)
    plan = plan_with(choices, model, optimizer, batch)
    return apply(plan, Job(model, nn.MSELoss(), optimizer, batch, name="net")), model, batch


HOWS = {
    "on the card": Choices(blocks=BLOCKS),
    "in backward": Choices(blocks=BLOCKS, optimizer_in_backward=True),
    "on the host": Choices(blocks=BLOCKS, optimizer_on="host"),
    "by the host's cores": Choices(blocks=BLOCKS, optimizer_on="host", host_share=1.0),
    "weights away": Choices(blocks=BLOCKS, optimizer_on="host", weights_away=tuple(BLOCKS)),
    "state on the disk": Choices(blocks=BLOCKS, optimizer_on="host", disk_share=1.0),
}


@pytest.mark.parametrize("how", HOWS)
def test_its_very_first_step_is_rolled_back(how: str) -> None:
    run, model, batch = make(HOWS[how])
    # Backward comes to the first block last, when the others could have been stepped.
    first: Block = model.get_submodule("0")  # type: ignore[assignment]
    first.counts = True
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(NotRepeatable, match=r"0 cannot be recomputed: .* have the plan keep"):
            run.step(batch)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    first.counts, first.hidden.calls = False, 0
    untouched, plain, _ = make(Choices())
    for _ in range(3):
        torch.testing.assert_close(run.step(batch), untouched.step(batch))
    run.undo(), untouched.undo()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
