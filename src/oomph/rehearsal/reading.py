"""What Python sees when it takes a fake tensor out of torch: arrays, lists, text, copies.

Contents that are known are shown; the rest is shown as zeros or `…`, and the note says so. While a
rehearsal runs, these are methods of every fake tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from oomph.rehearsal.recorder import Recorder, Side


@contextlib.contextmanager
def readable(recorder: Recorder) -> Iterator[None]:
    """While active, fake tensors can be printed, listed, copied and turned into arrays."""
    with contextlib.ExitStack() as stack:
        for name, method in _methods(recorder).items():
            stack.enter_context(mock.patch.object(FakeTensor, name, method, create=True))
        # Storages of fake tensors have no address; code that looks for shared weights needs one.
        address = torch.UntypedStorage.data_ptr
        stack.enter_context(
            mock.patch.object(
                torch.UntypedStorage,
                "data_ptr",
                lambda storage: (
                    storage._cdata if storage.device.type == "meta" else address(storage)
                ),
            )
        )
        yield


def _methods(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    def contents(tensor: FakeTensor) -> Tensor:
        """A real tensor: the contents where they are known, else zeros."""
        real = recorder.values.of(tensor)
        if real is not None:
            return real
        recorder.values.assume(0, f"the contents of a tensor of shape {list(tensor.shape)}")
        with _disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
        if not force and recorder.side_of(tensor) is Side.GPU:
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
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return real.numpy(force=True)

    def to_list(tensor: FakeTensor) -> Any:
        if tensor.dim() == 0:
            return tensor.item()
        real = contents(tensor)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return real.tolist()

    def text(tensor: FakeTensor, *, tensor_contents: Any = None) -> str:
        real = recorder.values.of(tensor)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            inside = "…" if real is None else str(real.tolist())
        details = [inside, f"size={tuple(tensor.shape)}", f"dtype={tensor.dtype}"]
        if recorder.side_of(tensor) is Side.GPU:
            details.append("device='cuda:0'")
        if tensor.requires_grad:
            details.append("requires_grad=True")
        return f"tensor({', '.join(details)})"

    def formatted(tensor: FakeTensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else format(repr(tensor), spec)

    def deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
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
            copied.grad = deep_copy(tensor.grad, memo)  # type: ignore[arg-type]
        memo[id(tensor)] = copied
        return copied

    def pickled(tensor: FakeTensor, _protocol: Any) -> Any:
        return (_zeros, (tuple(tensor.shape), tensor.dtype))

    return {
        "numpy": numpy,
        "tolist": to_list,
        "__repr__": text,
        "__format__": formatted,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": pickled,
        "data_ptr": lambda tensor: _address(tensor),
        "share_memory_": lambda tensor: tensor,
        "record_stream": lambda tensor, _stream: None,
    }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a pickled fake tensor becomes when it is read back."""
    return torch.zeros(shape, dtype=dtype)


def _address(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        offset = tensor.storage_offset() * tensor.element_size()
        return int(tensor.untyped_storage()._cdata + offset)
