"""Whoever uses a watched tensor is noticed first; what only describes it is answered."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.dlpack import to_dlpack

from oomph.techniques.watched_tensors import Call, aliases, is_watched, own_work, unwatch, watch


class Settles:
    """Gives a tensor its numbers when somebody asks for them."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.asked = 0

    def around(self, tensors: Sequence[Tensor], func: Any, call: Call) -> Call:
        self.asked += 1
        for tensor in tensors:
            unwatch(tensor)
            with torch.no_grad():
                tensor.copy_(self.numbers)
        return call


def waiting() -> tuple[nn.Parameter, Settles]:
    parameter = nn.Parameter(torch.zeros(3))
    watcher = Settles(torch.tensor([1.0, 2.0, 3.0]))
    watch(parameter, watcher)
    return parameter, watcher


def _into(average: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    with torch.no_grad():
        change(average)
    return average


def _saved(parameter: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


READS: dict[str, Callable[[Tensor], Any]] = {
    "an op": lambda p: p * 1,
    "a method": lambda p: p.clone(),
    "a list of tensors": lambda p: torch.cat([p]),
    "a function for each of several": lambda p: torch._foreach_mul([p], 1)[0],
    "an average": lambda p: _into(torch.zeros(3), lambda ema: ema.lerp_(p, 1)),
    "a copy into another": lambda p: _into(torch.zeros(3), lambda other: other.copy_(p)),
    "a vector": lambda p: nn.utils.parameters_to_vector([p]),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(to_dlpack(p.detach())),
    "a list": lambda p: torch.tensor(p.tolist()),
    "each element": lambda p: torch.stack(list(p)),
    "an element": lambda p: torch.stack([p[0], p[1], p[2]]),
    "a deep copy": copy.deepcopy,
    "a shallow copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": _saved,
    "a state dict": lambda p: _holder(p).state_dict()["weight"],
    "a loaded state dict": lambda p: _loaded_from(p).weight,
    "another module": lambda p: nn.functional.linear(torch.eye(3), p[None])[:, 0],
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(
        lambda one: one * 1, p, use_reentrant=False
    ),
    "its class": lambda p: torch.ops.aten.mul.Tensor(p, 1),
}


def _holder(parameter: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


def _loaded_from(parameter: Tensor) -> nn.Module:
    module = _holder(nn.Parameter(torch.zeros(3)))
    module.load_state_dict({"weight": parameter})
    return module


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_it_gets_its_numbers(how: str) -> None:
    parameter, watcher = waiting()
    assert torch.equal(READS[how](parameter), watcher.numbers)
    assert watcher.asked == 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda p: p.mul_(2),
    "through data": lambda p: p.data.mul_(2),
    "data": lambda p: setattr(p, "data", p.data * 2),
    "an element": lambda p: p.__setitem__(slice(None), p * 2),
    "copy_": lambda p: p.copy_(torch.tensor([2.0, 4.0, 6.0])),
    "out": lambda p: torch.mul(torch.tensor([1.0, 2.0, 3.0]), 2, out=p),
    "for each of several": lambda p: torch._foreach_mul_([p], 2),
}


@pytest.mark.parametrize("how", WRITES)
def test_whoever_writes_to_it_does_so_after_its_numbers_are_there(how: str) -> None:
    parameter, watcher = waiting()
    with torch.no_grad():
        WRITES[how](parameter)
    assert not is_watched(parameter)
    assert torch.equal(parameter, 2 * watcher.numbers)


def test_what_only_describes_it_is_answered_without_its_numbers() -> None:
    parameter, watcher = waiting()
    assert parameter.shape == (3,)
    assert (parameter.dtype, parameter.device.type) == (torch.float32, "cpu")
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad_fn is None
    assert isinstance(parameter, nn.Parameter) and type(parameter).__name__ == "Parameter"
    assert parameter in {parameter: 1} and len(parameter) == parameter.numel() == 3
    parameter.grad = torch.ones(3)
    nn.utils.clip_grad_norm_([parameter], 1.0)
    parameter.grad = None
    parameter.requires_grad_(True).register_hook(lambda gradient: gradient)
    assert watcher.asked == 0


def test_it_is_of_its_own_class_again_when_nobody_watches_it() -> None:
    parameter, _ = waiting()
    unwatch(parameter)
    assert type(parameter) is nn.Parameter
    assert not vars(parameter)


def test_own_work_takes_it_as_it_is() -> None:
    parameter, watcher = waiting()
    with own_work():
        assert torch.equal(parameter, torch.zeros(3))
    assert watcher.asked == 0


def test_tensors_of_a_rehearsal_are_watched_alike() -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(3))
        own = type(parameter)
        watch(parameter, Settles(torch.ones(3)))
        (parameter * 2).sum().backward()
    assert type(parameter) is own


def test_memory_that_others_have_too_is_told() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert aliases(parameter) == 0
    view = parameter.detach()[1:]
    array = parameter.data.numpy()
    assert aliases(parameter) > 0
    del view
    assert aliases(parameter) > 0
    del array
    assert aliases(parameter) == 0
