"""Reads single numbers from the GPU without waiting for queued copies.

`if mask.all():` copies one number to the host, behind every copy queued before it on any stream: a
GPU copies in each direction one at a time. Transformers does such a check at the beginning of each
forward. With gigabytes being copied, the GPU is idle until they have arrived; on an H200 a step of
a 1 B model took 0.78 s instead of 0.53. Here a kernel writes the number into host memory that the
GPU can access, and only the kernels before it are waited for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oomph.memory.pinned import seen_from
from oomph.techniques.host_reads import reading_by

#: Dtypes that the kernel supports; none is larger than the buffer.
_TYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_ROOM = 8


def quick_reads(device: torch.device) -> AbstractContextManager[None]:
    """While active, reading single numbers from this device waits for no copy."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    index = torch.cuda.current_device() if device.index is None else device.index
    return reading_by(_mailbox(torch.device("cuda", index)).read)


@functools.cache
def _mailbox(device: torch.device) -> _Mailbox:
    return _Mailbox(device)


class _Mailbox:
    """Host memory for one number, which GPU kernels can write to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here = torch.empty(_ROOM, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._there = seen_from(device, self._here).untyped_storage()
        self._lock = threading.Lock()

    def read(self, method: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Apply the method to the tensor's number."""
        if not self._takes(tensor):
            return method(tensor)
        with self._lock, torch.no_grad():
            there = torch.empty(0, dtype=tensor.dtype, device=self._device)
            there.set_(self._there, 0, tensor.shape, tensor.stride())
            # An op that computes: a copy would queue behind the other copies.
            torch.maximum(tensor, tensor, out=there)
            torch.cuda.current_stream(self._device).record_event().synchronize()
            number = self._here[: tensor.element_size()].view(tensor.dtype).reshape(tensor.shape)
            return method(number)

    def _takes(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.numel() == 1
            and tensor.dtype in _TYPES
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
        )
