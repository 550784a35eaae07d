"""What a forward does for its first batch alone is seen: flags in buffers are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.jobs.job import Job
from oomph.splitting import prove_split


class SetByItsFirstBatch(nn.Module):
    """Moves what it is given by the mean of the first batch, as ActNorm does."""

    done: Tensor

    def __init__(self, done: Tensor, is_done: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("done", done)
        self.is_done = is_done

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_done(self.done):
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.done.fill_(1)
        return x + self.shift


FLAGS: dict[str, tuple[torch.dtype, Callable[[Tensor], Any]]] = {
    "a number that is read": (torch.long, lambda done: done.item() == 1),
    "a truth": (torch.bool, bool),
    "a byte that is compared": (torch.uint8, lambda done: done == 1),
    "a float": (torch.float32, lambda done: float(done) > 0),
}


def split_of(done: int, flag: str) -> str:
    dtype, is_done = FLAGS[flag]
    model = SetByItsFirstBatch(torch.tensor(done, dtype=dtype), is_done)
    job = Job(model, lambda model, x: model(x).square().mean(), "sgd", torch.randn(6, 4))
    return prove_split(job, None).whole_because


@pytest.mark.parametrize("flag", FLAGS)
def test_a_forward_that_sets_itself_by_its_first_batch_keeps_it_whole(flag: str) -> None:
    assert "writes to" in split_of(0, flag)


@pytest.mark.parametrize("flag", FLAGS)
def test_once_it_is_set_the_batch_may_be_split(flag: str) -> None:
    assert not split_of(1, flag)
