"""Models built without weights, which are read from files later.

A model that is larger than host memory cannot be built there. Its parameters are on the meta
device, which has shapes only; placeholders take their place while the weights come from elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from oomph.errors import BadInput
from oomph.rehearsal.copying import HostCopyMode, blank_like, copied_generators
from oomph.techniques.streamed_weights import Source
from oomph.techniques.technique import Undo
from oomph.torch_compat.fake_tensors import FakeTensorMode, current_fake_mode
from oomph.torch_compat.modules import buffers_of, parameters_of, unsaved_buffers_of


@contextlib.contextmanager
def parameters_without_numbers() -> Iterator[None]:
    """Models built inside have parameters on the meta device, and ordinary buffers.

    Buffers that modules compute themselves, such as tables of angles, are in no file.
    """
    register = nn.Module.register_parameter
    empty = WeakIdKeyDictionary()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in empty:  # else it is shared by several modules, and stays shared
                empty[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            param = empty[param]
        register(module, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register_empty):
        yield


def has_no_numbers(model: object) -> bool:
    """Whether some of a model's parameters are on the meta device."""
    return isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters())


def check_buffers(model: nn.Module) -> None:
    """Refuse a model with meta buffers that only its own code could fill."""
    for path, module in model.named_modules():
        for name in unsaved_buffers_of(module):
            buffer = buffers_of(module)[name]
            if buffer is not None and buffer.is_meta:
                raise BadInput(
                    f"the buffer {path}.{name} is on the meta device, and no checkpoint has it:"
                    " give the job a function that builds the model without torch.device('meta');"
                    " its parameters are made without numbers all the same"
                )


def read_instead(model: nn.Module, files: Mapping[Tensor, Tensor]) -> tuple[Source, Undo]:
    """Replace parameters by placeholders, and saved buffers by those of the files.

    Returns a function that gives a placeholder's weights, and an undo.
    """
    instead: dict[Tensor, Tensor] = {}
    put_back: list[tuple[nn.Module, str, Tensor]] = []
    for module in model.modules():
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            if tensor is None or tensor not in files:
                continue
            if tensor not in instead:
                instead[tensor] = _instead_of(tensor, files[tensor])
            put_back.append((module, name, tensor))
            setattr(module, name, instead[tensor])
    numbers = {instead[tensor]: found for tensor, found in files.items()}

    def undo() -> None:
        while put_back:
            module, name, tensor = put_back.pop()
            setattr(module, name, tensor)

    return numbers.__getitem__, undo


def _instead_of(tensor: Tensor, found: Tensor) -> Tensor:
    """A placeholder that takes no memory for a parameter; for a buffer, its contents."""
    if not isinstance(tensor, nn.Parameter):
        return found.clone()
    nothing = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return nn.Parameter(nothing, tensor.requires_grad)


def faked(model: nn.Module) -> nn.Module:
    """A copy to rehearse, with fake host tensors in place of meta tensors."""
    mode = current_fake_mode()
    assert isinstance(mode, FakeTensorMode)
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    fakes: dict[int, Any] = copied_generators(model)
    for tensor in tensors:
        fake = blank_like(tensor, mode)
        is_parameter = isinstance(tensor, nn.Parameter)
        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    with HostCopyMode(mode):
        return copy.deepcopy(model, fakes)
