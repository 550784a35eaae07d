"""GPU memory that is evicted to disk.

It is written in pieces of a fixed size, so that the size of the host buffers before the disk is
known before anything is evicted. A place that is too small gets more pieces; places are freed only
all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from oomph.memory.evicted import Evicted, EvictionStore, Place
from oomph.memory.link import Copies, Copy
from oomph.memory.numbered_store import NumberedStore, OpenStore

#: Bytes of a piece, and so of each buffer: long enough for the disk, short enough to divide up.
PIECE = 16 << 20
#: About half of them are on their way to or from the disk, the other half wait for the GPU.
BUFFERS = 8


class DiskEvictionStore(EvictionStore):
    """Evicts to disk; takes its buffers now and disk space at the first eviction.

    If the disk is full, that eviction raises the error, and the next one tries again.
    """

    def __init__(self, open_store: OpenStore) -> None:
        super().__init__()
        self._store: NumberedStore | None = open_store(PIECE, BUFFERS)

    def expect(self, coming: Iterable[Evicted]) -> None:
        """Have the disk prefetch as much as there are buffers for."""
        if self._store is None:
            return
        slots = (
            slot
            for evicted in coming
            if isinstance(evicted.place, _DiskPlace)
            for slot in evicted.place.slots
        )
        self._store.announce(list(dict.fromkeys(slots)))

    def clear(self) -> None:
        """Free the disk space, now or when the last evicted tensor is fetched."""
        is_empty = all(place.is_free for places in self._places.values() for place in places)
        super().clear()
        if self._store is not None and is_empty:
            self._store.close()
        self._store = None

    def _make_place(self) -> Place:
        assert self._store is not None, "nothing is parked any more"
        return _DiskPlace(self._store)


class _DiskPlace(Place):
    """Slots for the pieces of one tensor."""

    def __init__(self, store: NumberedStore) -> None:
        self._store = store
        #: Bytes by slot.
        self._rooms: dict[int, int] = {}
        #: The slots that hold what was put last.
        self.slots: list[int] = []

    def put(self, source: Tensor) -> Copy:
        """Copy to disk; all the space is reserved before the first piece is copied."""
        while (missing := source.nbytes - sum(self._rooms.values())) > 0:
            size = min(missing, PIECE)
            self._rooms[self._store.slot(size)] = size
        pieces = dict(self._pieces(source))
        self.slots = list(pieces)
        return Copies([self._store.put(slot, part) for slot, part in pieces.items()])

    def get(self, target: Tensor) -> Copy:
        """Copy to the GPU."""
        return Copies([self._store.get(slot, part) for slot, part in self._pieces(target)])

    def give_up(self, get: Copy) -> None:
        """Give up each piece."""
        assert isinstance(get, Copies)
        for piece in get.each:
            self._store.give_up(piece)

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        left = tensor.view(torch.uint8)
        for slot, size in self._rooms.items():
            if not left.numel():
                return
            yield slot, left[:size]
            left = left[size:]
