"""A process that believes it has the GPU, while every tensor in it is fake.

`pretend(gpu)` puts together what a rehearsal needs: fake tensors, the recorder, CUDA's autocast and
composite ops, and answers to questions about devices. Python code sees GPU tensors on `cuda:0`;
PyTorch's own machinery below sees fake CPU tensors, so it works on any build, GPU or not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from oomph.gpus import GPU
from oomph.rehearsal.cpu import CpuKernels
from oomph.rehearsal.cuda.answers import cuda_answers
from oomph.rehearsal.cuda.autocast import cuda_autocast
from oomph.rehearsal.cuda.composites import cuda_composites
from oomph.rehearsal.cuda.kernels import CudaKernels
from oomph.rehearsal.reading import readable
from oomph.rehearsal.recorder import Recorder, Side, is_gpu
from oomph.rehearsal.timeline import Category
from oomph.rehearsal.values import MOST_ELEMENTS

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
        if func in _SAME_ON_BOTH_SIDES:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            # Called without the mode, recomputation inside would run without it, too.
            with self:
                return _backward(*args, **kwargs)
        if func in _DEVICE_QUESTIONS and self._recorder.side_of(args[0]) is Side.GPU:
            return _DEVICE_QUESTIONS[func]
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return self._move(func, args, kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]  # host memory is not counted, pinned or not
        kwargs.pop("pin_memory", None)
        if func in _DRAWS_WHOLE_NUMBERS:
            return self._draw(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is None and func in torch.utils._device._device_constructors():
            # Python that names no device means the host, in a hook of backward as anywhere.
            device = torch.utils._device.CURRENT_DEVICE or CPU
        elif device is None and func is torch.Tensor.new_tensor:
            device = args[0].device
        if device is None or _is_meta(device):
            before, self._recorder.arguments = self._recorder.arguments, args
            try:
                return func(*args, **kwargs)
            finally:
                self._recorder.arguments = before
        with self._recorder.placing(Side.GPU if is_gpu(device) else Side.HOST):
            return func(*args, **{**kwargs, "device": CPU})

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Positions of samples, shuffled or drawn on the host, are drawn for real."""
        fake = self._call(func, args, kwargs)
        if (
            self._recorder.side_of(fake) is Side.HOST
            and not fake.is_floating_point()
            and not fake._is_view()
            and fake.numel() <= MOST_ELEMENTS
            and "out" not in kwargs
        ):
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                if func is torch.Tensor.random_:
                    args = (torch.empty(fake.shape, dtype=fake.dtype), *args[1:])
                self._recorder.values.know(fake, func(*args, **kwargs))
        return fake

    def _move(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        options = {k: v for k, v in kwargs.items() if k == "memory_format"}
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        copies = kwargs.get("copy", False)
        if func is not torch.Tensor.to:
            device = CUDA if func is torch.Tensor.cuda else CPU
            rest = []
        for other in [*rest, kwargs.get("other")]:
            if isinstance(other, Tensor):
                device, dtype = self._recorder.side_of(other), other.dtype
            elif isinstance(other, torch.dtype):
                dtype = other
            elif other is not None and not isinstance(other, bool):
                device = other
        if sum(isinstance(flag, bool) for flag in rest) == 2:
            copies = rest[-1]
        here = self._recorder.side_of(tensor)
        if device is None or isinstance(device, Side):
            side = device or here
        else:
            side = Side.GPU if is_gpu(device) else Side.HOST
        with self._recorder.placing(side):
            moved: Tensor = tensor.to(
                dtype or tensor.dtype, copy=copies or side is not here, **options
            )
        if side is Side.GPU and here is Side.HOST and not self._recorder.current_module:
            # Until more is known of it.
            kind = Category.PARAMETER if isinstance(tensor, nn.Parameter) else Category.INPUT
            self._recorder.categorise([moved], kind)
        return moved


#: What is called most, takes no memory, and is answered alike for either side.
_SAME_ON_BOTH_SIDES = {
    torch._C._set_grad_enabled,
    torch.is_complex,
    torch.is_floating_point,
    torch.Tensor.as_strided,
    torch.Tensor.detach,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.expand,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.requires_grad_,
    torch.Tensor.storage_offset,
    torch.Tensor.stride,
    torch.Tensor.untyped_storage,
    torch.Tensor.view,
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            "_version",
            "dtype",
            "grad",
            "grad_fn",
            "is_leaf",
            "is_sparse",
            "nbytes",
            "requires_grad",
            "shape",
        )
    ),
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__,  # type: ignore[union-attr]
}
_DRAWS_WHOLE_NUMBERS = {torch.randint, torch.randperm, torch.Tensor.random_}

_DEVICE_QUESTIONS: dict[Any, Any] = {
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: 0,
}


def _is_meta(device: Any) -> bool:
    """Whether nothing is asked for but shapes; making a fake tensor begins with that."""
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


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
    does; the watcher keeps watching the same Python object, which is what converting it wants.
    """
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _inference_mode(mode: Any = True) -> Any:
    """`no_grad`: takes the same memory, and does not hide ops inside composite ones."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


class _NotFake:
    """Libraries take other paths when they see a fake tensor; shown this class, they see none."""


@contextlib.contextmanager
def pretend(gpu: GPU | None) -> Iterator[Recorder]:
    """Everything inside runs on fake tensors and believes in `gpu`; yields the recorder.

    With None the CPU itself is rehearsed: its tensors are counted, and no CUDA rule applies.
    """
    with (
        mock.patch.object(torch._subclasses, "FakeTensor", _NotFake),
        # A kernel that fails raises; its log beside that is of no use.
        mock.patch.object(torch._subclasses.fake_tensor.log, "disabled", True),
        # Copying a fake tensor copies its mode too, and then the two cannot meet in one op.
        mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True),
        # There is nothing to profile, and an optimizer asks for it in every step.
        mock.patch.object(record_function, "__enter__", lambda profiled: profiled),
        mock.patch.object(record_function, "__exit__", lambda *_: None),
    ):
        if gpu is not None:
            with _pretend_gpu(gpu) as recorder:
                yield recorder
        else:
            recorder = Recorder(CpuKernels(), default_side=Side.GPU)
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
        return recorder.tracing or recorder.side_of(tensor) is Side.GPU

    fake_device = FakeTensor.device

    def device_of(tensor: FakeTensor) -> torch.device:
        if recorder.busy or recorder.tracing or tensor.fake_device.type != "cpu":
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
        enter(cuda_composites(gpu, on_gpu, lambda: recorder.tracing))
        for module in (torch, torch.autograd):
            enter(mock.patch.object(module, "inference_mode", _inference_mode))
        enter(readable(recorder))
        # Else newer versions run backward, hooks included, without the function mode below.
        enter(mock.patch.object(torch.autograd, "has_torch_function", lambda _: False))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(recorder)
        enter(_DeviceAnswers(recorder))
        yield recorder
