"""Numbers read on the host: constants are told again, data is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oomph.techniques.host_reads import HostReads, ReadsData


def positions(x: Tensor) -> Tensor:
    """As transformers: asks something of positions it counted by itself."""
    counted = torch.arange(x.shape[1])
    if bool((counted.diff() == 1).all()) and int(counted.max()) == x.shape[1] - 1:
        return x * 2
    return x


def test_constants_are_read_once_and_told_again() -> None:
    x = torch.randn(2, 5)
    reads = HostReads.of(lambda: positions(x), [x])
    with reads.told():
        out = positions(x)
    assert torch.equal(out, x * 2)


def test_told_numbers_are_the_old_ones() -> None:
    value = torch.tensor(3)
    reads = HostReads.of(lambda: value.item(), [])
    value.fill_(4)
    with reads.told():
        assert value.item() == 3
    assert value.item() == 4


@pytest.mark.parametrize(
    "read",
    [
        lambda x: bool((x > 0).all()),
        lambda x: x.sum().item(),
        lambda x: x.view(-1)[:2].tolist(),
        lambda x: float(x.clone().add_(1).max()),
    ],
    ids=["truth", "item", "list", "through a write"],
)
def test_what_depends_on_the_batch_is_refused(read: Any) -> None:
    x = torch.randn(2, 5)
    with pytest.raises(ReadsData, match="depends on the batch"):
        HostReads.of(lambda: read(x), [x])


def test_another_number_of_reads_is_noticed() -> None:
    reads = HostReads.of(lambda: torch.ones(1).item(), [])
    with pytest.raises(ReadsData, match="fewer"), reads.told():
        pass
    with pytest.raises(ReadsData, match="more"), reads.told():
        torch.ones(1).item(), torch.ones(1).item()


def test_tensors_read_as_ever_afterwards() -> None:
    with pytest.raises(RuntimeError, match="mistake"):
        HostReads.of(_raise, [])
    assert torch.tensor(7).item() == 7


def _raise() -> None:
    raise RuntimeError("a mistake in the model")
