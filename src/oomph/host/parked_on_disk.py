"""Memory of the GPU that is parked on the disk.

It goes there in pieces of a size that does not depend on what is parked, so that the buffers before
the disk, and with them the host memory it takes, are known before anything is. A place that is too
small gets more pieces; none is given back before all are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from oomph.host.link import Copies, Copy
from oomph.host.parked import Parked, Parking, Place
from oomph.host.slots import OpenSlots, SlotStore

#: Bytes of a piece, and so of each buffer: long enough for the disk, short enough to share it out.
PIECE = 16 << 20
#: Some that are on their way to the disk or from it, and as many that wait for the GPU.
BUFFERS = 8


class DiskParking(Parking):
    """In slots on the disk: its buffers are taken now, its room when something is first parked.

    A disk that is full says so then, and takes what it can the next time.
    """

    def __init__(self, open_slots: OpenSlots) -> None:
        super().__init__()
        self._store: SlotStore | None = open_slots(PIECE, BUFFERS)

    def expect(self, coming: Iterable[Parked]) -> None:
        """Let the disk read it ahead, as far as there are buffers."""
        if self._store is None:
            return
        slots = (
            slot
            for parked in coming
            if isinstance(parked.place, _DiskPlace)
            for slot in parked.place.slots
        )
        self._store.announce(list(dict.fromkeys(slots)))

    def clear(self) -> None:
        """Give the disk's room back, now or when the last that is parked there is fetched."""
        is_empty = all(place.is_free for places in self._places.values() for place in places)
        super().clear()
        if self._store is not None and is_empty:
            self._store.close()
        self._store = None

    def _make_place(self) -> Place:
        assert self._store is not None, "nothing is parked any more"
        return _DiskPlace(self._store)


class _DiskPlace(Place):
    """Slots for pieces."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        #: By slot: its bytes.
        self._rooms: dict[int, int] = {}
        #: Those that hold what was put last.
        self.slots: list[int] = []

    def put(self, source: Tensor) -> Copy:
        """Copy to the disk, all of whose room is there before the first piece leaves."""
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
        """Piece by piece."""
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
