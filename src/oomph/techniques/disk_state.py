"""Optimizer state on the disk, for parameters whose state has no room in host memory.

Each piece of a parameter has a slot for each tensor of its state (`oomph.host.slots`), taken before
the first step: a disk that is too small says so then. A piece comes to the GPU, is stepped there
and goes back. In the optimizer's own `state` a stand-in without numbers has the tensor's place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from oomph.host.link import Copy
from oomph.host.slots import SlotStore
from oomph.techniques.host_tensors import gpu_like
from oomph.techniques.optimizer_twin import State
from oomph.techniques.step_buckets import Piece, Trained

#: Smaller parameters are not worth a slot: bytes of what is stepped.
LEAST = 1 << 20

_Key = tuple[Trained, int, str]


def choose_for_disk(parameters: Iterable[Trained], share: float) -> list[Trained]:
    """Some that have this share of all elements, spread evenly: the disk works all the while."""
    chosen = []
    wanted = 0.0
    for trained in parameters:
        wanted += share * trained.leaf.numel()
        is_small = trained.leaf.numel() * trained.owned.element_size() < LEAST
        if not is_small and wanted >= trained.leaf.numel() / 2:
            chosen.append(trained)
            wanted -= trained.leaf.numel()
    return chosen


class DiskState:
    """The state of some parameters, by their pieces."""

    def __init__(
        self,
        store: SlotStore,
        pieces: Mapping[Trained, Sequence[Piece]],
        made: Callable[[Trained], State],
    ) -> None:
        self._store = store
        self._pieces = pieces
        #: By parameter: the types of the tensors of its state.
        self._types = {
            trained: {name: v.dtype for name, v in made(trained).items() if is_kept(v)}
            for trained in pieces
        }
        self._slots: dict[_Key, int] = {
            (trained, piece.start, name): store.slot(piece.numel * dtype.itemsize)
            for trained, own in pieces.items()
            for piece in own
            for name, dtype in self._types[trained].items()
        }
        #: By slot: the last copy to it, until it is known to be on the disk.
        self._puts: dict[int, Copy] = {}
        self._sent: set[int] = set()

    def __contains__(self, trained: object) -> bool:
        return trained in self._pieces

    def fetch(self, piece: Piece, device: torch.device) -> tuple[dict[str, Tensor], list[Copy]]:
        """Begin to bring a piece that was sent before."""
        there = {
            name: gpu_like(piece.of(piece.trained.like), device, dtype)
            for name, dtype in self._types[piece.trained].items()
        }
        return there, [self._store.get(self._slot(piece, n), t) for n, t in there.items()]

    def send(self, piece: Piece, state: State) -> list[Copy]:
        """Let a piece's state leave for the disk."""
        copies = []
        for name in self._types[piece.trained]:
            slot = self._slot(piece, name)
            self._puts[slot] = self._store.put(slot, state[name])
            self._sent.add(slot)
            copies.append(self._puts[slot])
        return copies

    def announce(self, pieces: Iterable[Piece]) -> None:
        """Say which pieces will be fetched next, in this order."""
        self._store.announce(
            [
                self._slot(piece, name)
                for piece in pieces
                if piece.trained in self
                for name in self._types[piece.trained]
            ]
        )

    def write(self, trained: Trained, state: State) -> None:
        """Put a parameter's whole state there; its tensors are not needed any more afterwards."""
        for piece in self._pieces[trained]:
            part = {name: piece.of(state[name]) for name in self._types[trained]}
            for copy in self.send(piece, part):
                copy.wait()

    def read(
        self, trained: Trained, device: torch.device, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """A parameter's whole state, or some of its tensors, on a device."""
        self.finish()  # what goes from host to host waits for nobody
        whole = {
            name: gpu_like(trained.like, device, dtype)
            for name, dtype in self._types[trained].items()
            if names is None or name in names
        }
        for piece in self._pieces[trained]:
            for name, tensor in whole.items():
                slot = self._slot(piece, name)
                if slot in self._sent:
                    self._store.get(slot, piece.of(tensor)).finish()
                else:  # the first step broke off before it
                    piece.of(tensor).zero_()
        return whole

    def nbytes(self, trained: Trained) -> int:
        """What the state of a parameter takes."""
        return sum(trained.leaf.numel() * t.itemsize for t in self._types[trained].values())

    def types(self, trained: Trained) -> Mapping[str, torch.dtype]:
        """Of the tensors of a parameter's state, by their names."""
        return self._types[trained]

    def finish(self) -> None:
        """Wait until all that was sent is on the disk; raises what went wrong."""
        puts, self._puts = self._puts, {}
        for copy in puts.values():
            copy.finish()

    def close(self) -> None:
        """Give the room back."""
        self._store.close()

    def _slot(self, piece: Piece, name: str) -> int:
        return self._slots[piece.trained, piece.start, name]


def is_kept(value: object) -> bool:
    """Whether a value of an optimizer's state is kept outside the GPU: counters are not."""
    return isinstance(value, Tensor) and value.dim() > 0
