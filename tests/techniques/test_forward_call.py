"""A block whose forward runs twice: what is known of it before and after its calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import NotRepeatable
from oomph.techniques import tensor_writes
from oomph.techniques.forward_call import ForwardCall, Repeated, is_awaited

X = torch.ones(4, 8)


def normed(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **options))


def called(block: nn.Module, repeated: Repeated) -> ForwardCall:
    """The first run of a call."""
    call = ForwardCall(repeated, (X,), {}, None)
    with call.watched(), call.compared():
        call.run(*call.take_leaves())
    return call


def test_statistics_are_what_norms_write_to_in_training() -> None:
    block = normed()
    repeated = Repeated(block, block.forward, "block")
    assert [id(one) for one in repeated.statistics()] == [id(one) for one in block.buffers()]
    assert len(list(block.buffers())) == 3
    block.eval()
    assert not list(repeated.statistics())


def test_norms_without_statistics_write_to_none() -> None:
    block = normed(track_running_stats=False)
    assert not list(Repeated(block, block.forward, "block").statistics())


def test_a_block_that_writes_to_statistics_alone_is_not_traced_in_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[int] = []
    enter = tensor_writes.TensorWrites.__enter__

    def noted(writes: tensor_writes.TensorWrites) -> tensor_writes.TensorWrites:
        traced.append(repeated.calls)
        return enter(writes)

    monkeypatch.setattr(tensor_writes.TensorWrites, "__enter__", noted)
    block = normed()
    repeated = Repeated(block, block.forward, "block")
    for _ in range(8):
        called(block, repeated)
    assert traced == [1, 2, 4, 8]


def test_a_weight_is_awaited_until_the_second_run_begins() -> None:
    block, other = nn.Linear(8, 8), nn.Linear(8, 8)
    assert not is_awaited(block.weight)
    call = called(block, Repeated(block, block.forward, "block"))
    assert is_awaited(block.weight) and not is_awaited(other.weight)
    other_call = called(other, Repeated(other, other.forward, "other"))
    assert is_awaited(block.weight) and is_awaited(other.weight)
    with call.again():
        assert not is_awaited(block.weight)
    del other_call


def test_what_was_written_to_between_the_two_runs_is_refused() -> None:
    block = nn.Linear(8, 8)
    call = called(block, Repeated(block, block.forward, "the block"))
    with torch.no_grad():
        block.weight.add_(1)
    with pytest.raises(NotRepeatable, match="the block cannot be recomputed"), call.again():
        pass


def test_the_second_run_gives_what_the_first_gave() -> None:
    block = normed()
    before = [one.clone() for one in block.buffers()]
    repeated = Repeated(block, block.forward, "block")
    call = ForwardCall(repeated, (X,), {}, None)
    leaves = call.take_leaves()
    with call.watched(), call.compared():
        first: Tensor = call.run(*leaves)
    after = [one.clone() for one in block.buffers()]
    assert not all(map(torch.equal, before, after))
    with call.again(), call.compared():
        again: Tensor = call.run(*leaves)
    assert torch.equal(first, again)
    assert all(map(torch.equal, after, block.buffers())), "statistics are of one run"
