"""`torch.cuda` as a process with the rehearsed GPU would find it.

Model code, libraries and training scripts ask `torch.cuda` what they run on and how much memory is
left, and tell it to wait or to clean up. Each question is answered for the rehearsed GPU; memory
questions are answered from the recorder, so a script that logs its memory logs the prediction.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.backends.cudnn.rnn

from oomph.hardware import GPU
from oomph.process.rehearsal_threads import StandInClass, replaced_here, shown_here
from oomph.rehearsal.cuda.recurrent import MODES
from oomph.rehearsal.recorder import Recorder
from oomph.torch_compat import cuda, tracing

#: Fixed answers; nothing in a rehearsal depends on these values.
_WARP = 32
_CUDNN_VERSION = 91002


def _properties(gpu: GPU) -> SimpleNamespace:
    major, minor = gpu.compute_capability or (9, 0)
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory,
        multi_processor_count=gpu.sm_count,
        warp_size=_WARP,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        L2_cache_size=0,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        uuid="rehearsed",
    )


class _StandInStream(StandInClass, abc.ABCMeta):
    """A metaclass for streams: they are context managers, hence abstract classes."""


class _NoStream(contextlib.AbstractContextManager["_NoStream"]):
    """Stands in for streams and events: a rehearsal has one order of events and no clock."""

    device = torch.device("cuda", 0)
    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = wait = record = wait_stream = wait_event = _nothing

    def record_event(self, *_: Any) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


class _Stream(_NoStream, metaclass=_StandInStream):
    real = torch.cuda.Stream


class _Event(_NoStream, metaclass=_StandInStream):
    real = torch.cuda.Event


class _StandInGenerator(StandInClass, type(torch.Generator)):  # type: ignore[misc]
    """A metaclass: `torch.Generator` has one of its own, which this has to extend."""


class _Generator(torch.Generator, metaclass=_StandInGenerator):
    """A generator that reports the requested device, but draws on the fake CPU."""

    real = torch.Generator
    _asked: torch.device

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made._asked = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._asked


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _answers(gpu: GPU, recorder: Recorder) -> dict[str, Any]:
    """The stand-ins by their name in `torch.cuda`."""
    return {**_about_the_card(gpu), **_about_memory(gpu, recorder), **_CONSTANT}


def _about_the_card(gpu: GPU) -> dict[str, Any]:
    capability = gpu.compute_capability or (9, 0)
    return {
        "get_device_name": _always(gpu.name),
        "get_device_capability": _always(capability),
        "get_device_properties": _always(_properties(gpu)),
        "is_bf16_supported": _always(gpu.has_bf16),
        "is_tf32_supported": _always(capability >= (8, 0)),
        "get_arch_list": _always([f"sm_{capability[0]}{capability[1]}"]),
    }


def _about_memory(gpu: GPU, recorder: Recorder) -> dict[str, Any]:
    def allocated(*_: Any, **__: Any) -> int:
        return recorder.allocated

    def peak(*_: Any, **__: Any) -> int:
        return recorder.peak_allocated

    def reset_peak(*_: Any, **__: Any) -> None:
        recorder.reset_peak()

    def stats(*_: Any, **__: Any) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": recorder.allocated,
            "allocated_bytes.all.peak": recorder.peak_allocated,
            "reserved_bytes.all.current": recorder.allocated,
            "reserved_bytes.all.peak": recorder.peak_allocated,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
        return max(gpu.memory - recorder.allocated, 0), gpu.memory

    return {
        "mem_get_info": free_and_total,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": stats,
        "memory_snapshot": lambda *_, **__: [],
        "memory_summary": lambda *_, **__: f"(rehearsed: {recorder.allocated} bytes allocated)",
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
    }


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


_NOTHING = _always(None)
_STREAM = _NoStream()
#: What every rehearsed card answers.
_CONSTANT: dict[str, Any] = {
    "is_available": _always(True),
    "is_initialized": _always(True),
    cuda.IS_COMPILED: _always(True),
    "device_count": _always(1),
    "current_device": _always(0),
    **dict.fromkeys(cuda.EXCHANGE_DEVICE, _always(0)),
    "reset_accumulated_memory_stats": _NOTHING,
    "set_per_process_memory_fraction": _NOTHING,
    cuda.RECORD_HISTORY: _NOTHING,
    "empty_cache": _NOTHING,
    "ipc_collect": _NOTHING,
    "synchronize": _NOTHING,
    "set_device": _NOTHING,
    cuda.LAZY_INIT: _NOTHING,
    "init": _NOTHING,
    "manual_seed": _NOTHING,
    "manual_seed_all": _NOTHING,
    "seed": _NOTHING,
    "seed_all": _NOTHING,
    "initial_seed": _always(0),
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda *_, **__: [_random_state()],
    "set_rng_state": _NOTHING,
    "set_rng_state_all": _NOTHING,
    "current_stream": _always(_STREAM),
    "default_stream": _always(_STREAM),
    "stream": _always(_STREAM),
    "set_stream": _NOTHING,
    "Stream": _Stream,
    "Event": _Event,
    "is_current_stream_capturing": _always(False),
    "utilization": _always(0),
    "temperature": _always(0),
    "power_draw": _always(0),
    "clock_rate": _always(0),
    "range_push": _always(0),
    "range_pop": _always(0),
    "mark": _NOTHING,
    "start": _NOTHING,
    "stop": _NOTHING,
}


#: The names in `torch.accelerator` of functions in `torch.cuda`.
_ACCELERATOR_NAMES = {
    "is_available": "is_available",
    "device_count": "device_count",
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "get_memory_info": "mem_get_info",
} | {
    name: name
    for name in (
        "current_stream",
        "empty_cache",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
        "set_stream",
        "synchronize",
    )
}

#: The modules of `torch.cuda` that contain these functions.
_CUDA_MODULES = (
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.cuda.streams,
    torch.cuda.nvtx,
    torch.cuda.profiler,
)


@contextlib.contextmanager
def cuda_answers(gpu: GPU, recorder: Recorder) -> Iterator[None]:
    """While active, `torch.cuda` answers as if `gpu` were there and nothing else ran on it."""
    # Dynamo, which optimizers load, registers torch's functions by identity, once: it must see the
    # real ones.
    tracing.file_functions()
    answers = _answers(gpu, recorder)
    with contextlib.ExitStack() as stack:

        def put(module: Any, name: str, answer: Any) -> None:
            if hasattr(module, name):
                put_in = shown_here if isinstance(answer, type) else replaced_here
                stack.enter_context(put_in(module, name, answer))

        for module in _CUDA_MODULES:
            for name, answer in answers.items():
                put(module, name, answer)
        for name, same in _ACCELERATOR_NAMES.items():
            put(torch.accelerator, name, answers[same])
        put(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        for name in cuda.EXCHANGE_ACCELERATOR:
            put(cuda.bindings, name, lambda *_: 0)  # what `torch.accelerator.device_index` calls
        put(torch.backends.cuda, "is_built", lambda: True)
        put(torch.backends.cudnn, "is_available", lambda: True)
        put(torch.backends.cudnn, "version", lambda: _CUDNN_VERSION)
        # Recurrent layers then put their weights into one buffer, as they do on a GPU.
        put(torch.backends.cudnn, "is_acceptable", lambda tensor: tensor.is_cuda)
        put(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: MODES[mode.lower()])
        put(torch, cuda.FLATTENS_WEIGHTS, lambda: True)
        put(torch, "Generator", _Generator)
        stack.enter_context(shown_here(torch.cuda, "default_generators", (_Generator("cuda:0"),)))
        stack.enter_context(shown_here(torch.version, "cuda", torch.version.cuda or "13.0"))
        yield
