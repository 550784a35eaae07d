"""What Python sees when it reads a fake tensor: as an array, a list, text or a copy.

Known contents are shown; unknown ones read as zeros or `…`, and a note says so. While a rehearsal
runs, these are methods of every fake tensor. Function modes see calls of them as they see PyTorch's
own: a read of a tensor's numbers by Python must not be missed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oomph.errors import CannotRehearse
from oomph.process.rehearsal_threads import replaced_here
from oomph.rehearsal.recorder import Recorder, Side
from oomph.torch_compat.dispatch import (
    DispatchKey,
    ForceDispatchKeyGuard,
    disable_current_modes,
    excluded_keys,
    included_keys,
    is_key_excluded,
)
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.function_modes import (
    DisableTorchFunction,
    current_function_mode,
    pop_function_mode,
)
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import TensorBase


@contextlib.contextmanager
def readable(recorder: Recorder, *, on_card: bool) -> Iterator[None]:
    """While active, fake tensors can be printed, listed, copied and turned into arrays.

    `on_card` tells whether the recorder counts a card's memory or that of the CPU itself.
    """

    def is_on_card(tensor: Tensor) -> bool:
        return on_card and recorder.side_of(tensor) is Side.GPU

    with contextlib.ExitStack() as stack:
        for name, method in _methods(recorder, is_on_card).items():
            # For a tensor from before the rehearsal, PyTorch's `numpy` would show other memory.
            owner = Tensor if name == "numpy" else FakeTensor
            method = _watched(method) if name in _TAKES_OUT else method
            stack.enter_context(replaced_here(owner, name, method))
        for name in _NUMBERS:
            stack.enter_context(replaced_here(FakeTensor, name, _number(name)))
        real_from_dlpack = torch.utils.dlpack.from_dlpack

        def from_dlpack(given: Any, **options: Any) -> Tensor:
            if isinstance(given, FakeTensor):
                return given.view_as(given)
            return real_from_dlpack(given, **options)

        for module in (torch, torch.utils.dlpack):
            stack.enter_context(replaced_here(module, "from_dlpack", from_dlpack))
            stack.enter_context(replaced_here(module, "to_dlpack", _refuse_dlpack))
        # Storages of fake tensors have no address; code that looks for shared weights needs one.
        address = torch.UntypedStorage.data_ptr
        stack.enter_context(
            replaced_here(
                torch.UntypedStorage,
                "data_ptr",
                lambda storage: (
                    cdata_of(storage) if storage.device.type == "meta" else address(storage)
                ),
            )
        )
        yield


#: Methods that give Python the contents of a tensor.
_TAKES_OUT = ("numpy", "tolist")


#: The methods by which Python asks an object for a number.
_NUMBERS = ("__bool__", "__complex__", "__float__", "__index__", "__int__")
#: Dispatch keys that, when excluded, keep PyTorch from calling Python modes.
_PYTHON = (DispatchKey.Python, DispatchKey.PythonTLSSnapshot)


def _number(name: str) -> Callable[[Tensor], Any]:
    """Read a fake tensor's number even where PyTorch asks for it without calling modes.

    `torch.tensor([n[0], n[1]])` does so: it reads the numbers in a list as Python would.
    """
    own = getattr(Tensor, name)

    def number(tensor: Tensor) -> Any:
        if not is_key_excluded(_PYTHON[0]):
            return own(tensor)
        excluded = excluded_keys()
        for key in _PYTHON:
            excluded = excluded.remove(key)
        included = included_keys()
        with ForceDispatchKeyGuard(included, excluded):
            return own(tensor)

    return number


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, visible to function modes as PyTorch's own is."""

    @functools.wraps(method)
    def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if current_function_mode() is None:
            return method(tensor, *args, **kwargs)
        with pop_function_mode() as mode:
            return mode.__torch_function__(seen, (), (tensor, *args), kwargs)

    return seen


def _methods(
    recorder: Recorder, is_on_card: Callable[[Tensor], bool]
) -> dict[str, Callable[..., Any]]:
    def contents(tensor: Tensor) -> Tensor:
        """A real tensor: the contents if they are known, else zeros."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        real = recorder.values.of(tensor)
        if real is not None:
            return real
        recorder.values.assume(0, f"the contents of a tensor of shape {list(tensor.shape)}")
        with disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if not force and is_on_card(tensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        if not force and tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        real = contents(tensor)
        with DisableTorchFunction(), disable_current_modes():
            return TensorBase.numpy(real, force=True)

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.dim() == 0:
            return tensor.item()
        real = contents(tensor)
        with DisableTorchFunction(), disable_current_modes():
            return real.tolist()

    def text(tensor: FakeTensor, *, tensor_contents: Any = None) -> str:
        real = recorder.values.of(tensor)
        with DisableTorchFunction(), disable_current_modes():
            inside = "…" if real is None else str(real.tolist())
        details = [inside, f"size={tuple(tensor.shape)}", f"dtype={tensor.dtype}"]
        if is_on_card(tensor):
            details.append("device='cuda:0'")
        if tensor.requires_grad:
            details.append("requires_grad=True")
        return f"tensor({', '.join(details)})"

    return {
        "numpy": numpy,
        "tolist": tolist,
        "__repr__": text,
        "__format__": _formatted,
        "__deepcopy__": _deep_copy,
        "__reduce_ex__": _pickled,
        "data_ptr": lambda tensor: _address(tensor),
        "__dlpack__": _refuse_dlpack,
        "share_memory_": lambda tensor: tensor,
        "record_stream": lambda tensor, _stream: None,
    }


def _formatted(tensor: FakeTensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else format(repr(tensor), spec)


def _deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    with torch.no_grad():
        copied = tensor.detach().clone()
    copied.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _deep_copy(tensor.grad, memo)  # type: ignore[arg-type]
    memo[id(tensor)] = copied
    return copied


def _pickled(tensor: FakeTensor, _protocol: Any) -> Any:
    return (_zeros, (tuple(tensor.shape), tensor.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A pickled fake tensor, read back."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _refuse_dlpack(*_: Any, **__: Any) -> None:
    """Refuse: the receiving library would read memory that does not exist."""
    raise CannotRehearse("a tensor is handed to another library by DLPack, which reads its memory")


def _address(tensor: Tensor) -> int:
    with DisableTorchFunction():
        offset = tensor.storage_offset() * tensor.element_size()
        return int(cdata_of(tensor.untyped_storage()) + offset)
