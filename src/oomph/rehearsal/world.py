"""A process that believes it has the GPU, while every tensor in it is fake.

`pretend(gpu)` puts together what a rehearsal needs: fake tensors, the recorder, CUDA's autocast and
composite ops, and answers to questions about devices. Python code sees GPU tensors on `cuda:0`;
PyTorch's own machinery below sees fake CPU tensors, so it works on any build, with or without a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from oomph.gpus import GPU
from oomph.rehearsal.cuda.autocast import cuda_autocast
from oomph.rehearsal.cuda.composites import cuda_composites
from oomph.rehearsal.cuda.answers import cuda_answers
from oomph.rehearsal.cuda.kernels import CudaKernels
from oomph.rehearsal.recorder import PlainKernels, Recorder, Side, is_gpu

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class _DeviceAnswers(TorchFunctionMode):
    """Moves tensors between the sides, and answers `.is_cuda` and the like by them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            # Called without the mode, recomputation inside would run without it, too.
            with self:
                return _backward(*args, **kwargs)
        if func in _DEVICE_QUESTIONS and self._recorder.side_of(args[0]) is Side.GPU:
            return _DEVICE_QUESTIONS[func]
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return self._move(func, args, kwargs)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        with self._recorder.placing(Side.GPU if is_gpu(device) else Side.HOST):
            return func(*args, **{**kwargs, "device": CPU})

    def _move(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        if func is torch.Tensor.cuda:
            device: Any = CUDA
            rest = []
            kwargs = {k: v for k, v in kwargs.items() if k == "memory_format"}
        elif func is torch.Tensor.cpu:
            device = CPU
        else:
            device = kwargs.pop("device", None) if "device" in kwargs else None
            if rest and isinstance(rest[0], Tensor):
                device = CUDA if self._recorder.side_of(rest[0]) is Side.GPU else CPU
                rest[0] = rest[0].dtype
            elif rest and (isinstance(rest[0], (str, torch.device)) or type(rest[0]) is int):
                device, rest = rest[0], rest[1:]
        if device is None:
            return torch.Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        side = Side.GPU if is_gpu(device) else Side.HOST
        copies = kwargs.pop("copy", False)
        kwargs.pop("non_blocking", None)
        rest = [item for item in rest if not isinstance(item, bool)]
        if self._recorder.side_of(tensor) is side and not copies:
            return torch.Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        with self._recorder.placing(side):
            return torch.Tensor.to(tensor, *(rest or [tensor.dtype]), copy=True, **kwargs)


_DEVICE_QUESTIONS: dict[Any, Any] = {
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: 0,
}


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _swap_tensors(one: Tensor, other: Tensor) -> None:
    """`torch.utils.swap_tensors` for fake tensors, weak references to them or not.

    PyTorch refuses where something watches a tensor weakly, and under fake tensors something always
    does; the watcher keeps watching the same Python object, which is what converting a module wants.
    """
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


class _NotFake:
    """Libraries take other paths when they see a fake tensor; shown this class, they see none."""


@contextlib.contextmanager
def pretend(gpu: GPU | None) -> Iterator[Recorder]:
    """Everything inside runs on fake tensors and believes in `gpu`; yields the recorder.

    With None the CPU itself is rehearsed: its tensors are counted, and no CUDA rule applies.
    """
    with mock.patch.object(torch._subclasses, "FakeTensor", _NotFake):
        if gpu is not None:
            with _pretend_gpu(gpu) as recorder:
                yield recorder
        else:
            recorder = Recorder(PlainKernels(), default_side=Side.GPU)
            with (
                mock.patch.object(torch.utils, "swap_tensors", _swap_tensors),
                FakeTensorMode(allow_non_fake_inputs=True),
                recorder,
            ):
                yield recorder


@contextlib.contextmanager
def _pretend_gpu(gpu: GPU) -> Iterator[Recorder]:
    recorder = Recorder(CudaKernels(gpu=gpu), default_side=Side.HOST)

    def on_gpu(tensor: Tensor) -> bool:
        return recorder.side_of(tensor) is Side.GPU

    fake_device = FakeTensor.device

    def device_of(tensor: FakeTensor) -> torch.device:
        if recorder.busy or tensor.fake_device.type != "cpu":
            return fake_device.fget(tensor)  # type: ignore[attr-defined, no-any-return]
        return CUDA if on_gpu(tensor) else CPU

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(FakeTensor, "device", property(device_of)))
        for types in (
            # torch.optim deletes its submodule's name; the module itself is still loaded.
            sys.modules["torch.optim.optimizer"]._foreach_supported_types,
            torch.utils._foreach_utils._foreach_supported_types,
        ):
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        enter(mock.patch.object(torch.utils, "swap_tensors", _swap_tensors))
        enter(cuda_answers(gpu, recorder))
        enter(cuda_autocast(on_gpu))
        enter(cuda_composites(gpu, on_gpu))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(recorder)
        enter(_DeviceAnswers(recorder))
        yield recorder
