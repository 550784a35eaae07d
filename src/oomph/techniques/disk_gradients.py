"""Room on the disk for gradients that leave the GPU, where host memory is short.

Each piece of a parameter that is stepped by itself has a slot (`oomph.host.slots`), large enough
for whatever type its gradient may leave in. The buffers before the disk are taken at once, the
slots as soon as it is known whose gradients leave, before the first one does: a disk that is full
says so then, and takes what is missing the next time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from oomph.host.link import Copies, Copy
from oomph.host.slots import OpenSlots, SlotStore
from oomph.techniques.disk_state import is_worth_a_slot
from oomph.techniques.step_buckets import Piece, Trained, pieces_of


def open_disk_gradients(
    open_slots: OpenSlots, parameters: Iterable[Trained], *, bucket: int, ahead: int
) -> DiskGradients | None:
    """For some of these parameters, or None where all are small; the rest as `HostPlacement`."""
    sizes = [
        _nbytes(piece)
        for trained in filter(is_worth_a_slot, parameters)
        for piece in pieces_of(trained, bucket)
    ]
    if not sizes:
        return None
    # As many as come ahead, one that is stepped and one that leaves.
    return DiskGradients(open_slots(max(sizes), ahead + 2), bucket)


class DiskGradients:
    """The gradients of some parameters, by their pieces of at most `bucket` bytes."""

    def __init__(self, store: SlotStore, bucket: int) -> None:
        self._store = store
        self._bucket = bucket
        self._pieces: dict[Trained, Sequence[Piece]] = {}
        #: By parameter and the first element of a piece.
        self._slots: dict[tuple[Trained, int], int] = {}

    def __contains__(self, trained: object) -> bool:
        return trained in self._pieces

    def reserve(self, parameters: Iterable[Trained]) -> None:
        """Take the room of those that are worth it, or of what is missing since it last failed."""
        for trained in filter(is_worth_a_slot, parameters):
            pieces = pieces_of(trained, self._bucket)
            for piece in pieces:
                if (trained, piece.start) not in self._slots:
                    self._slots[trained, piece.start] = self._store.slot(_nbytes(piece))
            self._pieces[trained] = pieces

    def put(self, trained: Trained, gradient: Tensor) -> Copy:
        """Let all of a gradient leave for the disk."""
        # All of them first: one that lies otherwise takes memory, which may fail, to lie in a row.
        parts = [(slot, piece.of(gradient)) for piece, slot in self._all(trained)]
        return Copies([self._store.put(slot, part) for slot, part in parts])

    def get(self, wanted: Piece, room: Tensor) -> list[Copy]:
        """Begin to bring a piece that is stepped by itself, or the whole of a gradient."""
        if wanted.is_whole:
            return [self._store.get(slot, p.of(room)) for p, slot in self._all(wanted.trained)]
        return [self._store.get(self._slots[wanted.trained, wanted.start], room)]

    def close(self) -> None:
        """Give the room and the buffers back."""
        self._store.close()

    def _all(self, trained: Trained) -> list[tuple[Piece, int]]:
        return [(piece, self._slots[trained, piece.start]) for piece in self._pieces[trained]]


def _nbytes(piece: Piece) -> int:
    """Of its gradient as the optimizer has it: it never leaves in a larger type."""
    return piece.numel * piece.trained.owned.element_size()
