"""`torch.cuda` as a process with the rehearsed GPU would find it.

Model code, libraries and training scripts ask `torch.cuda` what they run on, how much memory is
left, and to wait or to clean up. Each question is answered for the GPU of the rehearsal; memory
questions are answered from the recorder, so a script that logs its memory logs the prediction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.trace_rules

from oomph.gpus import GPU
from oomph.rehearsal.recorder import Recorder

#: Computed once per GPU by the driver; nothing in a rehearsal depends on its value.
_WARP = 32


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

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


def _answers(gpu: GPU, recorder: Recorder) -> dict[str, Any]:
    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def allocated(*_: Any) -> int:
        return recorder.allocated

    def peak(*_: Any) -> int:
        return recorder.peak_allocated

    capability = gpu.compute_capability or (9, 0)
    nothing = always(None)
    stream = _NoStream()
    return {
        "is_available": always(True),
        "is_initialized": always(True),
        "device_count": always(1),
        "current_device": always(0),
        "get_device_name": always(gpu.name),
        "get_device_capability": always(capability),
        "get_device_properties": always(_properties(gpu)),
        "is_bf16_supported": always(capability >= (8, 0)),
        "is_tf32_supported": always(capability >= (8, 0)),
        "mem_get_info": lambda *_: (max(gpu.memory - recorder.allocated, 0), gpu.memory),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": lambda *_: {
            "allocated_bytes.all.current": recorder.allocated,
            "allocated_bytes.all.peak": recorder.peak_allocated,
            "reserved_bytes.all.current": recorder.allocated,
            "reserved_bytes.all.peak": recorder.peak_allocated,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        },
        "memory_summary": always("(a rehearsal: no memory is in use)"),
        "reset_peak_memory_stats": lambda *_: recorder.reset_peak(),
        "reset_max_memory_allocated": lambda *_: recorder.reset_peak(),
        "set_per_process_memory_fraction": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "synchronize": nothing,
        "set_device": nothing,
        "_lazy_init": nothing,
        "init": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "seed": nothing,
        "seed_all": nothing,
        "initial_seed": always(0),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda *_: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": nothing,
        "set_rng_state_all": nothing,
        "current_stream": always(stream),
        "default_stream": always(stream),
        "stream": always(stream),
        "set_stream": nothing,
        "Stream": _NoStream,
        "Event": _NoStream,
        "is_current_stream_capturing": always(False),
        "utilization": always(0),
        "get_arch_list": always([f"sm_{capability[0]}{capability[1]}"]),
    }


@contextlib.contextmanager
def cuda_answers(gpu: GPU, recorder: Recorder) -> Iterator[None]:
    """While active, `torch.cuda` answers as if `gpu` were there and nothing else ran on it."""
    # Dynamo, which optimizers load, files torch's functions by identity once and for all: it must
    # find the real ones.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    with contextlib.ExitStack() as stack:
        for name, answer in _answers(gpu, recorder).items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
        yield
