"""Sources of numbers about a device's memory while a program runs.

A meter only reads: it changes nothing about the program it watches.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oomph.errors import UnknownName
from oomph.hardware import GPU, find_gpu
from oomph.rehearsal.hidden import device_overhead
from oomph.torch_compat import cuda
from oomph.units import GIB

#: Context and kernels of a process on a GPU that is not in the catalogue.
_HIDDEN_ELSEWHERE = GIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The counters of PyTorch's allocator; cheap to read."""

    allocated: int
    reserved: int
    peak: int
    """Peak of allocated bytes so far."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything known about the device's memory at one moment."""

    allocated: int
    reserved: int
    limit: int
    """What this process may reserve: all of the device, or a fraction that was set."""
    total: int
    free: int
    """What the driver could still give to any process."""
    hidden: int
    """What a process is expected to hold besides what it reserves: context and kernels."""

    @property
    def room(self) -> int:
        """What this process could still take from the driver."""
        return max(min(self.limit - self.reserved, self.free), 0)

    @property
    def unused(self) -> int:
        """Reserved but not in use."""
        return max(self.reserved - self.allocated, 0)

    @property
    def others(self) -> int:
        """Held by other processes and libraries: neither free nor accounted for by this process."""
        return max(self.total - self.free - self.reserved - self.hidden, 0)

    def as_dict(self) -> dict[str, int]:
        """Plain numbers by name."""
        return {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "limit": self.limit,
            "total": self.total,
            "free": self.free,
            "hidden": self.hidden,
            "others": self.others,
        }


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A request that the allocator could not serve."""

    asked: int
    reading: Reading


class Meter(Protocol):
    """A device whose memory can be read."""

    @property
    def device(self) -> str:
        """The device's name, as `cuda:0`."""

    @property
    def gpu(self) -> str | None:
        """The GPU's name in the catalogue, if it is there."""

    @property
    def refusal(self) -> Refusal | None:
        """The last request that failed."""

    def is_ready(self) -> bool:
        """Whether the program uses the device yet; checking does not initialize it."""

    def sample(self) -> Sample:
        """The allocator's counters now."""

    def read(self) -> Reading:
        """All numbers, now; queries the driver."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is on this device."""


class CudaMeter:
    """The CUDA device that the program uses."""

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self._index: int | None = None
        self._name = ""

    @property
    def index(self) -> int | None:
        """The device's index; None before CUDA is initialized."""
        return self._index

    @property
    def device(self) -> str:
        """The device's name."""
        return f"cuda:{self._index or 0}"

    @property
    def gpu(self) -> str | None:
        """The GPU's name in the catalogue."""
        card = self._card()
        return card.name if card is not None else None

    def is_ready(self) -> bool:
        """Whether CUDA is initialized in this process; from then on, refusals are recorded."""
        if not torch.cuda.is_initialized():
            return False
        if self._index is None:
            self._index = torch.cuda.current_device()
            self._name = torch.cuda.get_device_name(self._index)
            _note_refusals_for(self)
        return True

    def sample(self) -> Sample:
        """The allocator's own counters, without the driver."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = (stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved"))
        return Sample(
            allocated=allocated["current"], reserved=reserved["current"], peak=allocated["peak"]
        )

    def read(self) -> Reading:
        """All numbers, now."""
        free, total = torch.cuda.mem_get_info(self._index)
        part = torch.cuda.get_per_process_memory_fraction(self._index)
        return self._reading(free=free, total=total, limit=int(total * part))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device.type == "cuda" and tensor.device.index == self._index

    def note_refusal(self, asked: int, limit: int, free: int) -> None:
        """Called by the allocator right before it raises."""
        _, total = torch.cuda.mem_get_info(self._index)
        reading = self._reading(free=free, total=total, limit=limit)
        self.refusal = Refusal(asked=asked, reading=reading)

    def _reading(self, *, free: int, total: int, limit: int) -> Reading:
        now = self.sample()
        card = self._card()
        return Reading(
            allocated=now.allocated,
            reserved=now.reserved,
            limit=limit,
            total=total,
            free=free,
            hidden=device_overhead(card).expected if card is not None else _HIDDEN_ELSEWHERE,
        )

    def _card(self) -> GPU | None:
        try:
            return find_gpu(self._name)
        except UnknownName:
            return None


#: The meters in use in this process: a nested watch has its own.
_meters: weakref.WeakSet[CudaMeter] = weakref.WeakSet()


def _note_refusals_for(meter: CudaMeter) -> None:
    _observe()
    _meters.add(meter)


@functools.cache
def _observe() -> None:
    """Register once: the allocator's observers cannot be removed."""
    cuda.on_out_of_memory(_on_refusal)


def _on_refusal(device: int, asked: int, limit: int, free: int, *_: Any) -> None:
    for meter in list(_meters):
        if meter.index == device:
            meter.note_refusal(asked, limit, free)


def find_meter() -> Meter | None:
    """The meter of this PyTorch's device; None if it supports only the CPU."""
    return CudaMeter() if torch.backends.cuda.is_built() else None
