"""A small GPU that is not there: tensors of the CPU, counted by the caching allocator's rules.

It raises `torch.OutOfMemoryError` where a real card of that size would, and is a meter like one.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.explaining.meters import Reading, Refusal, Sample
from oomph.rehearsal.allocator import Allocator, OutOfMemory
from oomph.rehearsal.storages import tensors_in
from oomph.units import MIB, format_bytes


class SimulatedGpu(TorchDispatchMode):
    """While active, every tensor that is made is on this device."""

    def __init__(
        self,
        total: int,
        *,
        others: int = 0,
        limit: int | None = None,
        begun: bool = True,
    ) -> None:
        super().__init__()
        #: Whether the program uses it yet; a real one notes refusals once it was asked after that.
        self.begun, self._notes_refusals = begun, False
        self.device = "simulated:0"
        self.gpu = None
        self.refusal: Refusal | None = None
        self._total, self._others, self._hidden = total, others, 4 * MIB
        self._limit = limit or total
        cap = min(self._limit, total - others - self._hidden)
        self._allocator = Allocator(cap=cap)
        self._handles: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.begun = True
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._handles or not storage.nbytes():
            return
        try:
            handle = self._allocator.malloc(storage.nbytes())
        except OutOfMemory as error:
            asked = error.requested
            if self._notes_refusals:
                self.refusal = Refusal(asked=asked, reading=self.read())
            message = f"Tried to allocate {format_bytes(asked)}."
            raise torch.OutOfMemoryError(message) from None
        died = functools.partial(self._free, key)
        self._handles[key] = handle, weakref.ref(storage, died)

    def _free(self, key: int, _: Any) -> None:
        handle, _ = self._handles.pop(key)
        self._allocator.free(handle)

    def is_ready(self) -> bool:
        self._notes_refusals = self.begun
        return self.begun

    def sample(self) -> Sample:
        stats = self._allocator.stats
        return Sample(allocated=stats.allocated, reserved=stats.reserved, peak=stats.peak_allocated)

    def read(self) -> Reading:
        stats = self._allocator.stats
        return Reading(
            allocated=stats.allocated,
            reserved=stats.reserved,
            limit=self._limit,
            total=self._total,
            free=self._total - self._others - self._hidden - stats.reserved,
            hidden=self._hidden,
        )

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._handles
