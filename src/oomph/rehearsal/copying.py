"""Copies a real model, its optimizer and their state as fake tensors, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.techniques.iterators import NotCopied, copy_of
from oomph.techniques.python_state import PythonState
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.fake_tensors import FakeCopyMode, FakeTensor, FakeTensorMode
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.tensors import TensorBase


class HostCopyMode(FakeCopyMode):
    """Copies become fake CPU tensors: only the rehearsal knows which of them are on the GPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func is TensorBase.clone:
            return self._on_host(out)
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            out = memo[id(tensor)] = self._on_host(out)
        return out

    def _on_host(self, tensor: Any) -> Any:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "cpu":
            return tensor
        return blank_like(tensor, self.fake_mode).requires_grad_(tensor.requires_grad)


def blank_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake host tensor of this one's shape and strides.

    No op makes it: the recorder would take what an `empty` finds in memory for its contents.
    """
    with disable_current_modes():
        nothing = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
    return FakeTensor(mode, nothing, torch.device("cpu"))


def copied_generators(*holders: Any) -> dict[int, Any]:
    """Copies of all random generators held anywhere in `holders`, by the original's id.

    A generator copies itself through a tensor with its state, and a fake tensor has no contents. An
    iterator that cannot be copied is replaced by one that refuses to go on.
    """
    held = PythonState([("", holder) for holder in holders])
    copies: dict[int, Any] = {id(one): _generator_like(one) for _, one in held.generators}
    for place, one in held.iterators():
        if copy_of(one) is None:
            copies[id(one)] = NotCopied(place, one)
    return copies


def _generator_like(generator: torch.Generator) -> torch.Generator:
    made = torch.Generator(generator.device)
    if generator.device.type == "cpu":
        with DisableTorchFunction(), disable_current_modes():
            made.set_state(generator.get_state())
    return made
