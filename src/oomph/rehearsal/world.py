"""Makes a process believe that it has the GPU, while every tensor in it is fake.

`pretend(gpu)` assembles what a rehearsal needs: fake tensors, the recorder, CUDA's autocast and
composite ops, and answers to questions about devices. Python code sees GPU tensors on `cuda:0`;
PyTorch's own machinery below sees fake CPU tensors, so it works on any build, with or without a
GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode

from oomph.hardware import GPU
from oomph.process.rehearsal_threads import (
    StandInClass,
    rehearses_here,
    rehearsing,
    replaced_here,
    shown_here,
)
from oomph.rehearsal.cpu import CpuKernels
from oomph.rehearsal.cuda.answers import cuda_answers
from oomph.rehearsal.cuda.autocast import cuda_autocast
from oomph.rehearsal.cuda.composites import cuda_composites
from oomph.rehearsal.cuda.kernels import CudaKernels
from oomph.rehearsal.cuda.old_types import old_types
from oomph.rehearsal.destinations import (
    Destination,
    destination_of_to,
    destination_of_type,
    name_of_type,
    side_of_device,
)
from oomph.rehearsal.packed_sequences import packed_sequences
from oomph.rehearsal.python_reads import readable
from oomph.rehearsal.random_stream import own_random_stream
from oomph.rehearsal.recorder import Recorder, Side
from oomph.rehearsal.timeline import Category
from oomph.rehearsal.values import MOST_ELEMENTS
from oomph.torch_compat import fake_tensors
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.fake_tensors import FakeTensor, FakeTensorMode
from oomph.torch_compat.function_modes import (
    DisableTorchFunction,
    default_device,
    device_constructors,
    parse_to,
    set_grad_enabled,
)
from oomph.torch_compat.functorch import interpreter_stack
from oomph.torch_compat.optimizers import foreach_types
from oomph.torch_compat.tensors import VERSION, is_view, swap_contents

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class _DeviceAnswers(TorchFunctionMode):
    """Moves tensors between GPU and host, and answers `.is_cuda` and the like accordingly."""

    def __init__(self, recorder: Recorder, stream: torch.Generator) -> None:
        super().__init__()
        self._recorder = recorder
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SAME_ON_BOTH_SIDES:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            # If it ran without the mode, recomputation inside backward would run without it, too.
            with self:
                return _backward(*args, **kwargs)
        if func in _DEVICE_QUESTIONS and self._recorder.side_of(args[0]) is Side.GPU:
            return _DEVICE_QUESTIONS[func]
        if func in _MOVES:
            return self._move(args[0], _MOVES[func](self._recorder, args[1:], kwargs))
        if func is parse_to:
            return self._parse_to(args, kwargs)
        if func is torch.Tensor.type:
            return self._cast(args, kwargs)
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cuda", *args)  # a bare number means that GPU
        if func is torch.Tensor.pin_memory:
            return args[0]  # host memory is not counted, pinned or not
        kwargs.pop("pin_memory", None)
        if func in _DRAWS_WHOLE_NUMBERS:
            return self._draw(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = named = kwargs.get("device")
        if device is None and func in device_constructors():
            # Python code that names no device means the host, in a backward hook as anywhere else.
            device = default_device() or CPU
            if func in _MADE_OF_DATA and args and isinstance(args[0], Tensor):
                device = args[0].device
        elif device is None and func is torch.Tensor.new_tensor:
            device = args[0].device
        if device is None or _is_meta(device):
            before = self._recorder.arguments, self._recorder.one_device_only
            self._recorder.arguments = args
            if func in _MOVES_INSIDE:
                self._recorder.one_device_only = False
            try:
                return func(*args, **kwargs)
            finally:
                self._recorder.arguments, self._recorder.one_device_only = before
        side = side_of_device(device)
        with self._recorder.placing(side):
            made = func(*args, **{**kwargs, "device": CPU})
        if named is not None and isinstance(made, Tensor):
            # Some functions return their argument if it is on the CPU already, as all fake tensors
            # are.
            return self._move(made, Destination(side=side))
        return made

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Integers drawn on the host, such as shuffled sample positions, are drawn for real."""
        fake = self._call(func, args, kwargs)
        if (
            self._recorder.side_of(fake) is Side.HOST
            and not fake.is_floating_point()
            and not is_view(fake)
            and fake.numel() <= MOST_ELEMENTS
            and "out" not in kwargs
        ):
            with DisableTorchFunction(), disable_current_modes():
                if func is torch.Tensor.random_:
                    args = (torch.empty(fake.shape, dtype=fake.dtype, device="cpu"), *args[1:])
                if kwargs.get("generator") in (None, torch.default_generator):
                    kwargs = {**kwargs, "generator": self._stream}
                self._recorder.values.know(fake, func(*args, **kwargs))
        return fake

    def _move(self, tensor: Tensor, to: Destination) -> Tensor:
        here = self._recorder.side_of(tensor)
        side = to.side or here
        is_there = side is here and to.dtype in (None, tensor.dtype) and not to.copies
        if is_there and to.memory_format in (None, torch.preserve_format):
            return tensor
        options: dict[str, Any] = (
            {} if to.memory_format is None else {"memory_format": to.memory_format}
        )
        if side is not here and tensor.requires_grad and self._in_plain_graph():
            moved: Tensor = _Crossing.apply(tensor, self._recorder, side, to.dtype, options)
        else:
            with self._recorder.placing(side):
                moved = tensor.to(
                    to.dtype or tensor.dtype, copy=to.copies or side is not here, **options
                )
        if side is Side.GPU and here is Side.HOST and not self._recorder.current_module:
            # A first guess, until more is known about the tensor.
            kind = Category.PARAMETER if isinstance(tensor, nn.Parameter) else Category.INPUT
            self._recorder.categorise([moved], kind)
        return moved

    def _in_plain_graph(self) -> bool:
        if not torch.is_grad_enabled() or self._recorder.tracing:
            return False
        return interpreter_stack() is None

    def _parse_to(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Parse the arguments of a module's `to`."""
        to = destination_of_to(self._recorder, args, kwargs)
        device = None if to.side is None else CUDA if to.side is Side.GPU else CPU
        return device, to.dtype, to.non_blocking, to.memory_format

    def _cast(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`type`: the target is a name, or a tensor type, which may imply another device."""
        tensor, *rest = args
        wanted = rest[0] if rest else kwargs.get("dtype")
        if wanted is None:
            name = name_of_type(self._recorder.side_of(tensor), tensor.dtype)
            return name or torch.Tensor.type(tensor)
        to = destination_of_type(wanted)
        return self._call(torch.Tensor.type, args, kwargs) if to is None else self._move(tensor, to)


class _Crossing(torch.autograd.Function):
    """A copy to the other side within the graph; its gradient returns to the tensor's own side.

    PyTorch's own copy would not move the gradient back: to PyTorch both sides are the same fake
    CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        recorder: Recorder,
        side: Side,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.came_from = recorder, recorder.side_of(tensor), tensor.dtype
        with recorder.placing(side):
            return tensor.to(dtype or tensor.dtype, copy=True, **options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        recorder, side, dtype = ctx.came_from
        with DisableTorchFunction(), recorder.placing(side):
            back = gradient.to(dtype, copy=recorder.side_of(gradient) is not side)
        return back, None, None, None, None


def _to_gpu(_: Recorder, args: Sequence[Any], kwargs: dict[str, Any]) -> Destination:
    return Destination(side=Side.GPU, memory_format=kwargs.get("memory_format"))


def _to_host(_: Recorder, args: Sequence[Any], kwargs: dict[str, Any]) -> Destination:
    return Destination(side=Side.HOST, memory_format=kwargs.get("memory_format"))


def _like_another(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any]) -> Destination:
    """`type_as`: takes the other tensor's device along with its type."""
    other = args[0] if args else kwargs["other"]
    return Destination(side=recorder.side_of(other), dtype=other.dtype)


_MOVES: dict[Any, Callable[[Recorder, Sequence[Any], dict[str, Any]], Destination]] = {
    torch.Tensor.to: destination_of_to,
    torch.Tensor.cuda: _to_gpu,
    torch.Tensor.cpu: _to_host,
    torch.Tensor.type_as: _like_another,
}

#: Functions that, without a device argument, leave a given tensor on its device.
_MADE_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}

#: Functions that move some arguments to other arguments' device internally, unseen from here.
_MOVES_INSIDE = {torch.ctc_loss, nn.functional.ctc_loss}

#: The most frequent calls that take no memory and give the same answer on either side.
_SAME_ON_BOTH_SIDES = {
    set_grad_enabled,
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
            VERSION,
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
    """Whether only shapes are requested; creating a fake tensor starts with that."""
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
    """`torch.utils.swap_tensors` for fake tensors, with or without weak references to them.

    PyTorch refuses to swap tensors that are weakly referenced, and under fake tensors they always
    are. The weak references keep pointing to the same Python objects, which is what converting
    needs.
    """
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    swap_contents(one, other)


class _InferenceMode(metaclass=StandInClass):
    """`no_grad`: takes the same memory, and does not hide the ops inside composite ones."""

    real = torch.inference_mode

    def __new__(cls, mode: Any = True) -> Any:
        if callable(mode):
            return torch.no_grad()(mode)
        return torch.no_grad() if mode else torch.enable_grad()


class _NotFake:
    """Shown to libraries as `FakeTensor`, so that they do not take other paths for fakes."""


@contextlib.contextmanager
def pretend(gpu: GPU | None) -> Iterator[Recorder]:
    """Run everything inside on fake tensors, as if on `gpu`; yields the recorder.

    With None the CPU itself is rehearsed: its tensors are counted, and no CUDA rule applies. Other
    threads keep using the real devices; threads that rehearse as well wait.
    """
    with (
        rehearsing(),
        shown_here(fake_tensors.HOME, "FakeTensor", _NotFake),
        _no_log_of_failed_kernels(),
        # There is nothing to profile, and an optimizer enters this in every step.
        replaced_here(record_function, "__enter__", lambda profiled: profiled),
        replaced_here(record_function, "__exit__", lambda *_: None),
        replaced_here(torch.utils, "swap_tensors", _swap_tensors),
        own_random_stream() as stream,
        packed_sequences(),
        _plain_modes(),
    ):
        if gpu is not None:
            with _pretend_gpu(gpu, stream) as recorder, _gradients_put_back(recorder):
                yield recorder
        else:
            recorder = Recorder(CpuKernels(), default_side=Side.GPU)
            with (
                readable(recorder, on_card=False),
                _FakeMode(allow_non_fake_inputs=True),
                recorder,
                _gradients_put_back(recorder),
            ):
                yield recorder


@contextlib.contextmanager
def _gradients_put_back(recorder: Recorder) -> Iterator[None]:
    try:
        yield
    finally:
        with disable_current_modes():
            recorder.put_gradients_back()


@contextlib.contextmanager
def _plain_modes() -> Iterator[None]:
    """Rehearse with gradients on, whatever mode the caller is in, and never check for NaN.

    Modes are per thread, except anomaly detection: that stays on to record where ops come from, and
    only its check for non-finite numbers is suspended.
    """
    looks = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    autocasts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as undos:
        for kind in autocasts:
            torch.set_autocast_enabled(kind, False)
            undos.callback(torch.set_autocast_enabled, kind, True)
        if looks:
            torch.autograd.set_detect_anomaly(True, check_nan=False)
            undos.callback(torch.autograd.set_detect_anomaly, True, check_nan=True)
        yield


class _FakeMode(FakeTensorMode):
    """A fake mode that deepcopy shares: tensors of two fake modes could not meet in one op."""

    def __deepcopy__(self, _: Any) -> _FakeMode:
        return self


@contextlib.contextmanager
def _no_log_of_failed_kernels() -> Iterator[None]:
    """Suppress the log of a failing fake kernel: the error is raised anyway."""

    def is_of_use(_: logging.LogRecord) -> bool:
        return not rehearses_here()

    log = fake_tensors.log
    log.addFilter(is_of_use)
    try:
        yield
    finally:
        log.removeFilter(is_of_use)


@contextlib.contextmanager
def _pretend_gpu(gpu: GPU, stream: torch.Generator) -> Iterator[Recorder]:
    recorder = Recorder(CudaKernels(gpu=gpu), default_side=Side.HOST)

    def on_gpu(tensor: Tensor) -> bool:
        return recorder.tracing or recorder.side_of(tensor) is Side.GPU

    fake_device = FakeTensor.device

    def device_of(tensor: FakeTensor) -> torch.device:
        there = recorder.busy or recorder.tracing or tensor.fake_device.type != "cpu"
        if there or not rehearses_here():
            return fake_device.fget(tensor)  # type: ignore[attr-defined, no-any-return]
        return CUDA if on_gpu(tensor) else CPU

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(FakeTensor, "device", property(device_of)))
        for types in foreach_types:
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        enter(cuda_answers(gpu, recorder))
        enter(old_types(recorder))
        enter(cuda_autocast(on_gpu))
        enter(cuda_composites(gpu, on_gpu, lambda: recorder.tracing))
        for module in (torch, torch.autograd):
            # A class: PyTorch's compiler would not recognise a function, even in other threads.
            enter(shown_here(module, "inference_mode", _InferenceMode))
        enter(readable(recorder, on_card=True))
        # Without this, newer versions run backward, hooks included, without the function mode
        # below.
        enter(replaced_here(torch.autograd, "has_torch_function", lambda _: False))
        enter(_FakeMode(allow_non_fake_inputs=True))
        enter(recorder)
        enter(_DeviceAnswers(recorder, stream))
        yield recorder
