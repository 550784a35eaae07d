"""The peak memory of real CPU tensors, measured by PyTorch's own profiler and not by oomph.

The profiler sees what PyTorch's CPU allocator hands out: tensors, and scratch memory that kernels
take as tensors. What oneDNN or MKL allocate for themselves it does not see.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def measure_cpu_peak(fn: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once while `fn` ran, above what existed before it.

    Freeing memory that is older than the call does not lower the count: the profiler never learnt
    its size. What `fn` returns is kept alive until the measuring is over.
    """
    return max(accumulate(cpu_memory_changes(fn), initial=0))


def cpu_memory_changes(fn: Callable[[], Any]) -> list[int]:
    """Bytes of every allocation (positive) and free (negative) of CPU memory, in order of time."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the first profile writes to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        result = fn()
    del result
    assert prof.profiler is not None
    events = prof.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    memory.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in memory]
