"""Models that are built without numbers, and what has the place of these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.runs.empty_model import (
    check_buffers,
    has_no_numbers,
    parameters_without_numbers,
    read_instead,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(4, 4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.first.weight = shared
        self.second.weight = shared
        self.rnn = nn.LSTM(4, 4)
        self.rnn.weight_hh_l0.requires_grad_(False)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(self.second(self.first(x)) * self.scale + self.angles)[0]
        return out


def test_parameters_are_built_without_numbers_and_buffers_with() -> None:
    assert not has_no_numbers(Net())
    with parameters_without_numbers():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert has_no_numbers(net)
    assert torch.equal(net.angles, torch.arange(4.0))
    assert net.first.weight is net.second.weight
    plain = dict(Net().named_parameters())
    found = dict(net.named_parameters())
    assert found.keys() == plain.keys()
    for name, parameter in plain.items():
        assert (found[name].shape, found[name].dtype) == (parameter.shape, parameter.dtype)
        assert found[name].requires_grad == parameter.requires_grad
    assert not Net().first.weight.is_meta


def test_a_buffer_that_no_file_has_must_be_there() -> None:
    with parameters_without_numbers():
        check_buffers(Net())
    with torch.device("meta"):
        net = Net()
    with pytest.raises(BadInput, match="angles is on the meta device"):
        check_buffers(net)


def test_stand_ins_take_no_memory_and_are_put_back() -> None:
    plain = Net()
    with parameters_without_numbers():
        net = Net()
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    state = plain.state_dict()
    files = {tensor: state[name] for name, tensor in before.items() if name in state}
    source, undo = read_instead(net, files)
    for name, parameter in net.named_parameters():
        assert parameter.untyped_storage().nbytes() <= 8
        assert torch.equal(source(parameter), state[name])
        parameter.data = source(parameter).clone()
    assert net.first.weight is net.second.weight
    x = torch.randn(2, 4)
    assert torch.equal(net(x), plain(x))
    undo()
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
