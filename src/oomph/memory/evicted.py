"""GPU memory that is evicted: copied to a place outside the GPU, and fetched back later.

A place is allocated at first use, as large as needed, and reused in every step. It belongs to the
evicted memory in it for as long as that is wanted.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from oomph.memory.link import Copy, Link


class Place(ABC):
    """Room outside the GPU that holds one evicted tensor at a time."""

    user: weakref.ref[Evicted] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the last occupant is no longer wanted."""
        return self.user is None or self.user() is None

    @abstractmethod
    def put(self, source: Tensor) -> Copy:
        """Start copying a flat tensor here, enlarging the place if it is too small."""

    @abstractmethod
    def get(self, target: Tensor) -> Copy:
        """Start copying what was put last into memory of the same size and dtype."""

    def give_up(self, get: Copy) -> None:
        """Cancel a `get`, or wait until it is done.

        A garbage collector may call it: it waits for the GPU at most, never for a thread.
        """
        get.finish()


class EvictionStore(ABC):
    """Places by position: evictions at the same position reuse the same places."""

    def __init__(self) -> None:
        self._places: defaultdict[Hashable, list[Place]] = defaultdict(list)

    def evict(self, tensor: Tensor, position: Hashable) -> Evicted:
        """Start evicting the whole memory that `tensor` is a view of."""
        places = self._places[position]
        place = next((place for place in places if place.is_free), None)
        if place is None:
            place = self._make_place()
            places.append(place)
        return Evicted(tensor, place)

    @abstractmethod
    def expect(self, coming: Iterable[Evicted]) -> None:
        """Announce what is fetched next, in this order; replaces earlier announcements."""

    def clear(self) -> None:
        """Forget all places; evicted memory keeps its own until it is fetched for the last time."""
        self._places.clear()

    @abstractmethod
    def _make_place(self) -> Place: ...


class HostEvictionStore(EvictionStore):
    """Evicts to the link's host memory."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def expect(self, coming: Iterable[Evicted]) -> None:
        """Nothing to prefetch: host memory is always at hand."""

    def _make_place(self) -> Place:
        return _HostPlace(self._link)


class _HostPlace(Place):
    """Host memory, which grows and never shrinks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._memory: Tensor | None = None
        #: The part of it that was put last.
        self._there: Tensor | None = None
        #: The last copy that reads the memory; the next write waits for it.
        self._reads: tuple[Copy, ...] = ()

    def put(self, source: Tensor) -> Copy:
        """Copy to the host."""
        if self._memory is None or self._memory.nbytes < source.nbytes:
            self._memory = self._link.host_memory(source.nbytes)
        self._there = self._memory[: source.nbytes].view(source.dtype)
        return self._link.to_host(source, self._there, after=self._reads)

    def get(self, target: Tensor) -> Copy:
        """Copy to the GPU."""
        assert self._there is not None, "nothing was put here"
        copy = self._link.to_gpu(self._there, target)
        self._reads = (copy,)
        return copy


class Evicted:
    """The memory of one tensor and its views, on its way out and back.

    It is on the GPU until `leave`, and again from `fetch` until everyone who wants it has taken it.
    """

    def __init__(self, tensor: Tensor, place: Place) -> None:
        self._in: Copy | None = None
        self._out: Copy | None = None
        flat = whole_memory(tensor)
        self.nbytes = flat.numel() * flat.element_size()
        #: How many callers have yet to `take` it.
        self.wanted = 0
        self.place = place
        self._version = flat._version
        self._changed = False
        self._numel, self._dtype, self._device = flat.numel(), flat.dtype, flat.device
        self._here: Tensor | None = flat
        self._out = place.put(flat)
        place.user = weakref.ref(self)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the evicted bytes equal what `tensor`, a view of the same memory, holds now."""
        return (
            not self._changed
            and tensor._version == self._version
            and self.nbytes % tensor.element_size() == 0
        )

    def leave(self) -> None:
        """Wait for the copy out and free the GPU memory."""
        if self._out is None or self._here is None:
            return
        # It was overwritten while being copied. Autograd refuses such a tensor, and so do we.
        self._changed = self._here._version != self._version
        self._out.wait()
        self._out = self._here = None

    def fetch(self) -> None:
        """Start copying it back, unless it is here, on its way, or not wanted."""
        if self.wanted:
            self._start_fetch()

    def want(self) -> None:
        """Register a caller that will `take` it."""
        self.wanted += 1

    def unwant(self) -> None:
        """Unregister a caller that will not `take` it after all."""
        self.wanted -= 1
        if not self.wanted and self._out is None:
            self._drop()

    def take(self, *, first: bool) -> Tensor:
        """Return it as a flat tensor to a caller that wanted it; the last one frees it.

        A caller that asks again (`first` is false) has it fetched again.
        """
        self.wanted -= first
        self._start_fetch()
        self._wait()
        flat = self._here
        assert flat is not None
        if self._changed or (self._out is not None and flat._version != self._version):
            raise RuntimeError(
                "a tensor that is needed to compute gradients was changed in place after it was"
                " saved for them"
            )
        if not self.wanted:
            self.leave()
            self._here = None
        return flat

    def _wait(self) -> None:
        """Wait for the copy back; if it fails, its partial result is dropped."""
        coming, self._in = self._in, None
        if coming is None:
            return
        try:
            coming.wait()
        except BaseException:
            self._here = None
            raise

    def _drop(self) -> None:
        if self._in is not None:
            # No one waited for the copy, as after a failed backward. Its memory must not be reused
            # before it is done; whether it succeeded no longer matters.
            with contextlib.suppress(Exception):
                self.place.give_up(self._in)
        self._in = self._here = None

    def _start_fetch(self) -> None:
        if self._here is not None:
            return
        here = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._in = self.place.get(here)  # before it counts as here, since this may fail
        self._here = here


def whole_memory(tensor: Tensor) -> Tensor:
    """All of the memory that `tensor` is a view of, as a flat tensor of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)
