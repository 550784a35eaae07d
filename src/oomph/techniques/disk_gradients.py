"""Disk space for offloaded gradients, for when host memory is short.

Each separately stepped piece of a parameter has a slot (`oomph.memory.numbered_store`), large
enough for any type its gradient may be offloaded in. The disk's buffers are taken at once. The
slots are taken as soon as it is known which gradients are offloaded, before the first one is: a
full disk raises then, and the next attempt takes only the missing slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from oomph.memory.link import Copies, Copy
from oomph.memory.numbered_store import NumberedStore, OpenStore
from oomph.techniques.disk_state import is_worth_a_slot
from oomph.techniques.step_buckets import Piece, Trained, pieces_of


def open_disk_gradients(
    open_store: OpenStore, parameters: Iterable[Trained], *, bucket: int, ahead: int
) -> DiskGradients | None:
    """For some of these parameters, or None if all are small.

    The other arguments are as for `HostPlacement`.
    """
    sizes = [
        _nbytes(piece)
        for trained in filter(is_worth_a_slot, parameters)
        for piece in pieces_of(trained, bucket)
    ]
    if not sizes:
        return None
    # One for each piece fetched ahead, one for the piece being stepped, one for the piece written.
    return DiskGradients(open_store(max(sizes), ahead + 2), bucket)


class DiskGradients:
    """The gradients of some parameters, in pieces of at most `bucket` bytes."""

    def __init__(self, store: NumberedStore, bucket: int) -> None:
        self._store = store
        self._bucket = bucket
        self._pieces: dict[Trained, Sequence[Piece]] = {}
        #: By parameter and the first element of a piece.
        self._slots: dict[tuple[Trained, int], int] = {}

    def __contains__(self, trained: object) -> bool:
        return trained in self._pieces

    def reserve(self, parameters: Iterable[Trained]) -> None:
        """Take slots for large enough parameters, or those still missing after a failed attempt."""
        for trained in filter(is_worth_a_slot, parameters):
            pieces = pieces_of(trained, self._bucket)
            for piece in pieces:
                if (trained, piece.start) not in self._slots:
                    self._slots[trained, piece.start] = self._store.slot(_nbytes(piece))
            self._pieces[trained] = pieces

    def put(self, trained: Trained, gradient: Tensor) -> Copy:
        """Write a whole gradient to the disk."""
        # Make all parts first: one that is not contiguous is copied, which may run out of memory.
        parts = [(slot, piece.of(gradient)) for piece, slot in self._all(trained)]
        return Copies([self._store.put(slot, part) for slot, part in parts])

    def get(self, wanted: Piece, room: Tensor) -> list[Copy]:
        """Begin to fetch a separately stepped piece, or a whole gradient."""
        if wanted.is_whole:
            return [self._store.get(slot, p.of(room)) for p, slot in self._all(wanted.trained)]
        return [self._store.get(self._slots[wanted.trained, wanted.start], room)]

    def close(self) -> None:
        """Release the disk space and the buffers."""
        self._store.close()

    def _all(self, trained: Trained) -> list[tuple[Piece, int]]:
        return [(piece, self._slots[trained, piece.start]) for piece in self._pieces[trained]]


def _nbytes(piece: Piece) -> int:
    """Bytes of its gradient in the optimizer's type; it is never offloaded in a larger one."""
    return piece.numel * piece.trained.owned.element_size()
