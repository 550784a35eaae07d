"""Memory of the GPU that is parked outside it: it leaves, waits in a place and comes back.

Places are made at first use, as large as they have to be, and used again in every step. A place
belongs to what is parked in it until nobody wants that any more.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from oomph.host.link import Copy, Link


class Place(ABC):
    """Room outside the GPU that one thing at a time is parked in."""

    user: weakref.ref[Parked] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody wants what was parked here last."""
        return self.user is None or self.user() is None

    @abstractmethod
    def put(self, source: Tensor) -> Copy:
        """Start to copy a flat tensor here, with more room where it has too little."""

    @abstractmethod
    def get(self, target: Tensor) -> Copy:
        """Start to copy what was put last into memory of its size and type."""

    def give_up(self, get: Copy) -> None:
        """Have what was to be copied there no longer come, or wait until it has.

        A garbage collector may call it: it waits for the card at most, and for no thread.
        """
        get.finish()


class Parking(ABC):
    """Places by position: what is parked at the same position each time reuses them."""

    def __init__(self) -> None:
        self._places: defaultdict[Hashable, list[Place]] = defaultdict(list)

    def park(self, tensor: Tensor, position: Hashable) -> Parked:
        """Start to copy the whole memory that `tensor` is a view of."""
        places = self._places[position]
        place = next((place for place in places if place.is_free), None)
        if place is None:
            place = self._make_place()
            places.append(place)
        return Parked(tensor, place)

    @abstractmethod
    def expect(self, coming: Iterable[Parked]) -> None:
        """Say what is fetched next, in this order; forget what was said before."""

    def clear(self) -> None:
        """Forget all places; what is parked keeps its own until it is fetched for the last time."""
        self._places.clear()

    @abstractmethod
    def _make_place(self) -> Place: ...


class HostParking(Parking):
    """In the link's host memory."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def expect(self, coming: Iterable[Parked]) -> None:
        """All of it is at hand."""

    def _make_place(self) -> Place:
        return _HostPlace(self._link)


class _HostPlace(Place):
    """Host memory, which grows and does not shrink."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._memory: Tensor | None = None
        #: The part of it that was put last.
        self._there: Tensor | None = None
        #: The last copy that reads the memory; the next one that writes to it comes after it.
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


class Parked:
    """The memory of one tensor and its views, on its way out and back.

    It is here until `leave`, and again from `fetch` until everybody who wants it has had it.
    """

    def __init__(self, tensor: Tensor, place: Place) -> None:
        self._in: Copy | None = None
        self._out: Copy | None = None
        flat = whole_memory(tensor)
        self.nbytes = flat.numel() * flat.element_size()
        #: How many have yet to ask for it.
        self.wanted = 0
        self.place = place
        self._version = flat._version
        self._changed = False
        self._numel, self._dtype, self._device = flat.numel(), flat.dtype, flat.device
        self._here: Tensor | None = flat
        self._out = place.put(flat)
        place.user = weakref.ref(self)

    def holds(self, tensor: Tensor) -> bool:
        """Whether what is parked is what `tensor`, a view of the same memory, holds now."""
        return (
            not self._changed
            and tensor._version == self._version
            and self.nbytes % tensor.element_size() == 0
        )

    def leave(self) -> None:
        """Wait for the copy that leaves and give the GPU's memory back."""
        if self._out is None or self._here is None:
            return
        # Somebody wrote over it while it was copied. Autograd refuses such a tensor, and so do we.
        self._changed = self._here._version != self._version
        self._out.wait()
        self._out = self._here = None

    def fetch(self) -> None:
        """Start to copy it back, unless it is here or on its way, or nobody waits for it."""
        if self.wanted:
            self._start_fetch()

    def want(self) -> None:
        """Somebody will ask for it."""
        self.wanted += 1

    def unwant(self) -> None:
        """Somebody who wanted it will not ask for it after all."""
        self.wanted -= 1
        if not self.wanted and self._out is None:
            self._drop()

    def take(self, *, first: bool) -> Tensor:
        """It as a flat tensor, for somebody who wanted it; after the last one it is gone.

        Who asks again, not for the `first` time, has it fetched again.
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
        """Wait for the copy that comes; where it fails, what came of it is nobody's to see."""
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
            # Nobody waited for it, as after a backward that failed, and its memory must not be used
            # for anything else before it is done. How it ended is of no interest any more.
            with contextlib.suppress(Exception):
                self.place.give_up(self._in)
        self._in = self._here = None

    def _start_fetch(self) -> None:
        if self._here is not None:
            return
        here = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._in = self.place.get(here)  # before it counts as here: it may fail
        self._here = here


def whole_memory(tensor: Tensor) -> Tensor:
    """All of the memory that `tensor` is a view of, as a flat tensor of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)
