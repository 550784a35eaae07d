"""Out of memory, told from every other error.

PyTorch's own allocators say it by the type of the error, on the CPU by its words. Libraries that
take memory behind their back report a status, which PyTorch passes on as a `RuntimeError` that
names it. Where none of that is left, as when cuDNN finds no engine because each one's workspace was
refused, the allocator's own count of refusals tells.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Iterator

import torch

#: CUDA's status for memory that could not be had.
_OUT_OF_MEMORY = 2
#: CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and their like;
#: a library that cannot even begin for want of memory says that it has not begun.
_STATUS = re.compile(
    r"\bCU[A-Z]+_[A-Z_]*ALLOC(ATION)?_FAILED\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"
    r"|\bCUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"
)
_CPU = "DefaultCPUAllocator: can't allocate memory"


def ran_out_of_memory(error: BaseException, refusals: int = 0) -> bool:
    """Whether `error`, or one that led to it, is a want of memory.

    `refusals` is how often the device's allocator refused since the work began that failed.
    """
    if refusals and isinstance(error, RuntimeError):
        return True
    return any(map(_is_want_of_memory, _chain(error)))


def count_refusals(device: torch.device) -> int:
    """How often the device's allocator had to refuse so far; 0 where it does not count."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0))


def free_what_is_left(device: torch.device) -> None:
    """Drop what a failed attempt left behind; not inside an `except`, which keeps it alive."""
    # What autograd had queued when an error passed stays there until its next backward.
    with contextlib.suppress(RuntimeError, MemoryError), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()
    # Inside a backward that thread may wait for this one.
    if device.type == "cuda" and torch._C._current_graph_task_id() == -1:
        _wait_for_backward_on(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait_for_backward_on(device: torch.device) -> None:
    """Have the device's own backward thread done with a backward that failed.

    The error is told before that thread lets go of what it was at, and of what is queued there: all
    that its part of the graph saved. So a tiny backward is queued behind them. What was made last
    goes first, by a count of each thread's own: a new thread makes what comes last.
    """

    def pass_through() -> None:
        with contextlib.suppress(RuntimeError, MemoryError):
            leaf = torch.empty(0, device=device, requires_grad=True)  # takes no memory
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
    """The error and what it was raised from; the compiler keeps the first one for itself."""
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
