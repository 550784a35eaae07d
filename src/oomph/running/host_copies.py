"""Copies of tensors in host memory, made while the device goes on working.

On a GPU they are made on a stream of their own into pinned memory that is taken once. On the CPU
they lie in numpy's memory: what a budget limits is the memory of the job's own tensors.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Where each copy begins in pinned memory, so that any type can be read there.
_ALIGNED = 64
#: Pinned memory that is taken at a time.
_SLAB = 256 << 20
#: Bytes that are copied as one, with one event: a model may have hundreds of small tensors, and
#: beginning a copy of each by itself seems to have taken an H200's host as long as all kernels.
_TOGETHER = 16 << 20


@dataclass(slots=True, kw_only=True)
class _Copy:
    of: weakref.ref[Tensor]
    """Not the tensor itself: whoever drops it frees its memory."""
    value: Tensor
    version: int = -1
    """The tensor's, when it was copied."""
    ready: torch.cuda.Event | None = None


class HostCopies:
    """Values of tensors as they were when `keep` was called last.

    Copies that are made `behind` others use their streams: the others are done first.
    """

    def __init__(self, behind: HostCopies | None = None) -> None:
        #: By the tensor's id, which another tensor may have got since.
        self._copies: dict[int, _Copy] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = (
            behind._streams if behind is not None else {}
        )
        #: What was waited for since the copies were made, and by which stream.
        self._waited: set[tuple[torch.cuda.Stream, torch.cuda.Event]] = set()

    @property
    def nbytes(self) -> int:
        """Host memory that the copies take."""
        return sum(copy.value.nbytes for copy in self._copies.values())

    def keep(self, groups: Sequence[Sequence[Tensor]], still: Collection[int] = ()) -> None:
        """Copy all of these tensors, group after group, and forget all others.

        Those whose ids are in `still` are copied only if they changed since. On a GPU this only
        queues the copies: call `wait` before a tensor is written to.
        """
        self._make_room([tensor for group in groups for tensor in group])
        self._waited.clear()
        streams: set[torch.cuda.Stream] = set()
        together: list[tuple[Tensor, _Copy]] = []
        room = _TOGETHER
        for group in groups:
            for tensor in group:
                copy = self._copies[id(tensor)]
                if copy.version != tensor._version or id(tensor) not in still:
                    together.append((tensor, copy))
                    room -= tensor.nbytes
            if room <= 0:
                self._copy(together, streams)
                together, room = [], _TOGETHER
        self._copy(together, streams)

    def wait(self, tensors: Iterable[Tensor]) -> None:
        """The work that is queued next on the device may write to these tensors."""
        events = {copy.ready for t in tensors if (copy := self._copies.get(id(t))) is not None}
        for event in events:
            if event is not None:
                stream = torch.cuda.current_stream()
                if (stream, event) not in self._waited:
                    stream.wait_event(event)
                    self._waited.add((stream, event))

    @torch.no_grad()
    def put_back(self, tensor: Tensor) -> None:
        """Give a tensor the value that was kept; this takes no memory of the device."""
        copy = self._copies[id(tensor)]
        self.wait([tensor])
        tensor.copy_(copy.value, non_blocking=True)

    @torch.no_grad()
    def _copy(self, pairs: Sequence[tuple[Tensor, _Copy]], streams: set[torch.cuda.Stream]) -> None:
        """Copy these; on a GPU behind what was queued when the first of its `streams` was used."""
        for _, copy in pairs:
            copy.version = -1
        # Counters may be on the CPU between tensors of a GPU.
        for _, own in itertools.groupby(sorted(pairs, key=_where), key=_where):
            tensors, copies = zip(*own, strict=True)
            values, device = [copy.value for copy in copies], tensors[0].device
            if device.type != "cuda":
                torch._foreach_copy_(values, tensors)
                continue
            side = self._stream(device)
            if side not in streams:
                side.wait_stream(torch.cuda.current_stream(device))
                streams.add(side)
            with torch.cuda.stream(side):
                torch._foreach_copy_(values, tensors, non_blocking=True)
            ready = side.record_event()
            for copy in copies:
                copy.ready = ready
        for tensor, copy in pairs:  # not before: what was not copied must not count as such
            copy.version = tensor._version

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        wanted = {id(tensor): tensor for tensor in tensors}
        self._copies = {
            key: copy for key, copy in self._copies.items() if copy.of() is wanted.get(key, self)
        }
        new = [tensor for key, tensor in wanted.items() if key not in self._copies]
        pinned = iter(_pinned([tensor for tensor in new if tensor.device.type == "cuda"]))
        for tensor in new:
            value = next(pinned) if tensor.device.type == "cuda" else _unseen(tensor)
            self._copies[id(tensor)] = _Copy(of=weakref.ref(tensor), value=value)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _where(pair: tuple[Tensor, _Copy]) -> str:
    return str(pair[0].device)


def _pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for these tensors in pinned memory, of which PyTorch takes powers of two."""
    sizes = [math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED for tensor in tensors]
    left = sum(sizes)
    slab, used = torch.empty(0, dtype=torch.uint8), 0
    rooms = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if used + size > slab.numel():
            slab = torch.empty(max(size, min(left, _SLAB)), dtype=torch.uint8, pin_memory=True)
            used = 0
        rooms.append(_shaped(slab[used : used + tensor.nbytes], tensor))
        used, left = used + size, left - size
    return rooms


def _unseen(tensor: Tensor) -> Tensor:
    """Room for a tensor in memory that PyTorch did not allocate."""
    return _shaped(torch.from_numpy(np.empty(tensor.nbytes, dtype=np.uint8)), tensor)


def _shaped(room: Tensor, tensor: Tensor) -> Tensor:
    """The room as a tensor that lies in memory as this one does: a copy then needs no other."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    stride = torch.empty_like(tensor, device="meta").stride()
    return room.view(tensor.dtype).as_strided(tensor.shape, stride)
