"""Copies of tensors to host memory, made while the device goes on working.

On a GPU, copies are made on a separate stream into pinned memory that is allocated once. A kernel
writes many small ones at a time. Of the others, only as many are queued as the launch queue has
room for: beyond that the host would block and launch nothing. On the CPU, copies are kept in
numpy's memory: a budget limits only the memory of the job's own tensors.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oomph.errors import BadInput
from oomph.memory.pinned import seen_from
from oomph.torch_compat.optimizers import foreach_copy_
from oomph.torch_compat.tensors import version_of

#: Alignment of copies in pinned memory, so that any dtype can be read there.
_ALIGNED = 64
#: Bytes of pinned memory allocated at a time.
_SLAB = 256 << 20
#: Bytes that are copied with one event.
_TOGETHER = 16 << 20
#: Largest tensor in bytes that a kernel writes to the host.
_SMALL = 64 << 10
#: Most copies queued at a time. With 2,036 at once, an H200's host waited 67 ms for room.
_QUEUED = 900


@dataclass(slots=True, kw_only=True)
class _Copy:
    of: weakref.ref[Tensor]
    """A weak reference, so that the tensor's memory is freed when it is dropped elsewhere."""
    value: Tensor
    there: Tensor | None = None
    """The same memory as seen by GPU kernels; only for small tensors."""
    version: int = -1
    """The tensor's version when it was copied."""
    ready: torch.cuda.Event | None = None


#: Copies that are begun together, one after the other on a stream.
_Batch = list[_Copy]


class HostCopies:
    """Values of tensors at the last call of `keep`.

    Copies made `behind` others share their streams: the others are done first.
    """

    def __init__(self, behind: HostCopies | None = None) -> None:
        #: By the tensor's id, which may have been reused since.
        self._copies: dict[int, _Copy] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = (
            behind._streams if behind is not None else {}
        )
        #: Batches not begun yet, and those under way: number of copies, and their final event.
        self._left: deque[_Batch] = deque()
        self._queued: deque[tuple[int, torch.cuda.Event]] = deque()
        #: Events that were waited for since the copies were made, and by which stream.
        self._waited: set[tuple[torch.cuda.Stream, torch.cuda.Event]] = set()

    @property
    def nbytes(self) -> int:
        """Host memory used by the copies."""
        return sum(copy.value.nbytes for copy in self._copies.values())

    def keep(self, groups: Sequence[Sequence[Tensor]], still: Collection[int] = ()) -> None:
        """Copy all of these tensors, group after group, and forget all others.

        Tensors whose ids are in `still` are copied only if they changed since. On a GPU this only
        queues the copies: call `wait` before writing to a tensor.
        """
        self._make_room([tensor for group in groups for tensor in group])
        self._waited.clear()
        self._queued.clear()
        self._left = deque(self._batches(groups, still))
        devices = {tensor.device for group in groups for tensor in group}
        for device in devices:
            if device.type == "cuda":
                self._stream(device).wait_stream(torch.cuda.current_stream(device))
        self._begin_more()

    def wait(self, tensors: Iterable[Tensor]) -> None:
        """Allow the work queued next on the device to write to these tensors."""
        copies = [copy for t in tensors if (copy := self._copies.get(id(t))) is not None]
        while self._left and any(copy.version < 0 for copy in copies):
            self._begin(self._left.popleft())
        self._begin_more()
        for event in {copy.ready for copy in copies}:
            if event is not None:
                stream = torch.cuda.current_stream()
                if (stream, event) not in self._waited:
                    stream.wait_event(event)
                    self._waited.add((stream, event))

    @torch.no_grad()
    def put_back(self, tensor: Tensor) -> None:
        """Restore a tensor's kept value; this allocates no device memory."""
        copy = self._copies[id(tensor)]
        self.wait([tensor])
        tensor.copy_(copy.value, non_blocking=True)

    def _batches(
        self, groups: Sequence[Sequence[Tensor]], still: Collection[int]
    ) -> Iterator[_Batch]:
        """Small tensors come first: kernels between copies would hold these up.

        Each kernel waits until the running kernels let it in, and the copies behind it wait as
        long.
        """
        small: _Batch = []
        large: list[_Batch] = [[]]
        room = _TOGETHER
        for group in groups:
            for tensor in group:
                copy = self._copies[id(tensor)]
                if copy.version == version_of(tensor) and id(tensor) in still:
                    continue
                # A tensor that is not copied yet must not count as copied.
                copy.version, copy.ready = -1, None
                if copy.there is not None:
                    small.append(copy)
                else:
                    large[-1].append(copy)
                    room -= tensor.nbytes
            if room <= 0:
                large.append([])
                room = _TOGETHER
        yield from (batch for batch in (small, *large) if batch)

    def _begin_more(self) -> None:
        """Begin as many batches as the queue has room for."""
        while self._queued and self._queued[0][1].query():
            self._queued.popleft()
        while self._left and sum(count for count, _ in self._queued) < _QUEUED:
            self._begin(self._left.popleft())

    @torch.no_grad()
    def _begin(self, batch: _Batch) -> None:
        pairs = [(copy, tensor) for copy in batch if (tensor := copy.of()) is not None]
        # Some counters may be on the CPU among GPU tensors.
        for _, own in itertools.groupby(sorted(pairs, key=_where), key=_where):
            copies, tensors = zip(*own, strict=True)
            if tensors[0].device.type != "cuda":
                foreach_copy_([copy.value for copy in copies], tensors)
                continue
            side = self._stream(tensors[0].device)
            with torch.cuda.stream(side):
                calls = _copy_to_host(copies, tensors)
            ready = side.record_event()
            self._queued.append((calls, ready))
            for copy in copies:
                copy.ready = ready
        for copy, tensor in pairs:
            copy.version = version_of(tensor)

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        wanted = {id(tensor): tensor for tensor in tensors}
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise BadInput(
                "the optimizer keeps sparse state, of which this plan cannot keep a copy to take a"
                " step back by: use sparse=False, or plan without stepping inside backward"
            )
        self._copies = {
            key: copy for key, copy in self._copies.items() if copy.of() is wanted.get(key, self)
        }
        new = [tensor for key, tensor in wanted.items() if key not in self._copies]
        pinned = iter(_pinned([tensor for tensor in new if tensor.device.type == "cuda"]))
        for tensor in new:
            on_gpu = tensor.device.type == "cuda"
            value = next(pinned) if on_gpu else _unseen(tensor)
            is_small = on_gpu and 0 < tensor.nbytes <= _SMALL
            self._copies[id(tensor)] = _Copy(
                of=weakref.ref(tensor),
                value=value,
                there=seen_from(tensor.device, value) if is_small else None,
            )

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            # Its kernels are small, and copies wait behind them.
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return self._streams[device]


def _copy_to_host(copies: Sequence[_Copy], tensors: Sequence[Tensor]) -> int:
    """Queue copies on the current stream; returns how many queue places they take."""
    large: list[tuple[Tensor, Tensor]] = []
    small: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    #: By storage of the copies. PyTorch knows what copies write to, but not what kernels do, and
    #: could free that memory too early; so something in it is copied after them.
    last: dict[int, tuple[Tensor, Tensor]] = {}
    for copy, tensor in zip(copies, tensors, strict=True):
        if copy.there is None:
            large.append((copy.value, tensor))
        else:  # a kernel takes only one dtype
            small.setdefault(tensor.dtype, []).append((copy.there, tensor))
            last[copy.value.untyped_storage().data_ptr()] = copy.value, tensor
    calls = [*small.values(), large + list(last.values())]
    for pairs in calls:
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            foreach_copy_(targets, sources, non_blocking=True)
    return len(small) + len(calls[-1])


def _where(pair: tuple[_Copy, Tensor]) -> str:
    return str(pair[1].device)


def _pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for these tensors in pinned memory, which PyTorch allocates in powers of two."""
    sizes = [math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED for tensor in tensors]
    left = sum(sizes)
    slab, used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
    rooms = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if used + size > slab.numel():
            slab = torch.empty(
                max(size, min(left, _SLAB)), dtype=torch.uint8, pin_memory=True, device="cpu"
            )
            used = 0
        rooms.append(_shaped(slab[used : used + tensor.nbytes], tensor))
        used, left = used + size, left - size
    return rooms


def _unseen(tensor: Tensor) -> Tensor:
    """Room for a tensor in memory that PyTorch did not allocate."""
    return _shaped(torch.from_numpy(np.empty(tensor.nbytes, dtype=np.uint8)), tensor)


def _shaped(room: Tensor, tensor: Tensor) -> Tensor:
    """View the room with the tensor's memory layout: copying then needs no other buffer."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    stride = torch.empty_like(tensor, device="meta").stride()
    return room.view(tensor.dtype).as_strided(tensor.shape, stride)
