"""Distinguishes out-of-memory errors from all other errors.

PyTorch's own allocators raise an error of a special type, or on the CPU with a known message.
Libraries that allocate by themselves report a status, which PyTorch passes on in a `RuntimeError`
that names it. If none of that is left, as when cuDNN finds no engine because each one's workspace
was refused, the allocator's own count of failed allocations tells.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Iterator

import torch

from oomph.torch_compat.autograd import current_graph_task_id

#: CUDA's status for out of memory.
_OUT_OF_MEMORY = 2
#: CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and the like; a
#: library that cannot initialize for lack of memory reports that it is not initialized.
_STATUS = re.compile(
    r"\bCU[A-Z]+_[A-Z_]*ALLOC(ATION)?_FAILED\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"
    r"|\bCUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"
)
_CPU = "DefaultCPUAllocator: can't allocate memory"


def ran_out_of_memory(error: BaseException, refusals: int = 0) -> bool:
    """Whether `error`, or one that led to it, means out of memory.

    `refusals` is the number of allocations the device's allocator refused during the failed work.
    """
    if refusals and isinstance(error, RuntimeError):
        return True
    return any(map(_is_want_of_memory, _chain(error)))


def count_refusals(device: torch.device) -> int:
    """How many allocations the device's allocator has refused so far; 0 if it does not count."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0))


def free_what_is_left(device: torch.device) -> None:
    """Free what a failed attempt left behind; call it outside the `except` that keeps it alive."""
    # Autograd keeps what it had queued when an error passed until its next backward.
    with contextlib.suppress(RuntimeError, MemoryError), torch.enable_grad():
        torch.zeros((), requires_grad=True, device="cpu").backward()
    # Inside a backward, the device's thread may be waiting for this one.
    if device.type == "cuda" and current_graph_task_id() == -1:
        _wait_for_backward_on(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait_for_backward_on(device: torch.device) -> None:
    """Have the device's own backward thread finish with a backward that failed.

    The error is raised before that thread releases what it was working on and what is queued there:
    everything that its part of the graph saved. So a tiny backward is queued behind it. Nodes
    created last run first, by a counter per thread; those of a new thread come last.
    """

    def pass_through() -> None:
        with contextlib.suppress(RuntimeError, MemoryError):
            leaf = torch.empty(0, device=device, requires_grad=True)  # allocates nothing
            torch.autograd.grad(leaf.view_as(leaf), leaf, leaf.detach())

    passing = threading.Thread(target=pass_through, name="oomph-backward-done")
    passing.start()
    passing.join()


def _is_want_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _OUT_OF_MEMORY
    if not isinstance(error, RuntimeError):
        return False
    words = str(error)
    return _CPU in words or _STATUS.search(words) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes; the compiler keeps the original error in an attribute."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = getattr(one, "inner_exception", None)
        rest += [one.__cause__, inner if isinstance(inner, BaseException) else None]
