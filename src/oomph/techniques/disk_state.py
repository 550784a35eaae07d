"""Optimizer state and masters on the disk, for parameters that do not fit in host memory.

Each piece of a parameter has a slot for each tensor of its state, and one for its master if it has
one (`oomph.memory.numbered_store`). Slots are taken before the first step, so that a disk that is
too small raises then. A piece is fetched to the GPU, stepped there and written back. In the
optimizer, a stand-in replaces each tensor: of the same shape and type, filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from oomph.memory.link import Copy
from oomph.memory.numbered_store import NumberedStore, OpenStore
from oomph.techniques.host_tensors import StandIns, gpu_like
from oomph.techniques.optimizer_twin import State
from oomph.techniques.step_buckets import Piece, Trained, pieces_of

#: Parameters below this size, in bytes of the stepped tensor, are not worth a slot.
LEAST = 1 << 20
#: The name of a parameter's master, next to the names of its state.
MASTER = "master"

_Key = tuple[Trained, int, str]


def choose_for_disk(parameters: Iterable[Trained], share: float) -> list[Trained]:
    """Choose parameters with this share of all elements, spread evenly to keep the disk busy."""
    chosen = []
    wanted = 0.0
    for trained in parameters:
        wanted += share * trained.leaf.numel()
        if is_worth_a_slot(trained) and wanted >= trained.leaf.numel() / 2:
            chosen.append(trained)
            wanted -= trained.leaf.numel()
    return chosen


def is_worth_a_slot(trained: Trained) -> bool:
    """Whether a parameter is large enough for the disk."""
    return trained.leaf.numel() * trained.owned.element_size() >= LEAST


def open_disk_state(
    open_store: OpenStore,
    chosen: Iterable[Trained],
    made: Callable[[Trained], State],
    *,
    bucket: int,
    ahead: int,
) -> DiskState | None:
    """Disk space for the state and masters of `chosen` parameters; None if there are none.

    `made` returns the state that a first step makes; `bucket` and `ahead` are as for
    `HostPlacement`.
    """
    pieces = {trained: pieces_of(trained, bucket) for trained in chosen}
    types = {trained: _types(trained, made(trained)) for trained in pieces}
    sizes = {
        dtype.itemsize * max(piece.numel for piece in pieces[trained])
        for trained, own in types.items()
        for dtype in own.values()
    }
    if not sizes:
        return None
    # One for each piece fetched ahead, one for the piece being stepped, one for the piece written.
    buffers = max(map(len, types.values())) * (ahead + 2)
    store = open_store(max(sizes), buffers)
    try:
        return DiskState(store, pieces, types)
    except BaseException:
        store.close()
        raise


class DiskState:
    """The state and masters of some parameters, by piece and name."""

    def __init__(
        self,
        store: NumberedStore,
        pieces: Mapping[Trained, Sequence[Piece]],
        types: Mapping[Trained, Mapping[str, torch.dtype]],
    ) -> None:
        self._store = store
        self._pieces = pieces
        self._types = types
        self._slots: dict[_Key, int] = {
            (trained, piece.start, name): store.slot(piece.numel * dtype.itemsize)
            for trained, own in pieces.items()
            for piece in own
            for name, dtype in types[trained].items()
        }
        #: By slot: the last write to it, until it is known to be on the disk.
        self._puts: dict[int, Copy] = {}
        self._sent: set[int] = set()
        self._stand_ins: StandIns[tuple[Trained, str]] = StandIns()

    def __contains__(self, trained: object) -> bool:
        return trained in self._pieces

    def names(self, trained: Trained, *, has_state: bool = True) -> list[str]:
        """Names of a parameter's tensors: its state, if it has any yet, and its master."""
        return [name for name in self._types[trained] if has_state or name == MASTER]

    def state_names(self, trained: Trained) -> list[str]:
        """Names of the tensors of a parameter's state."""
        return [name for name in self._types[trained] if name != MASTER]

    def room(self, piece: Piece, device: torch.device, names: Collection[str]) -> dict[str, Tensor]:
        """Memory on the GPU for some tensors of a piece."""
        like, types = piece.of(piece.trained.like), self._types[piece.trained]
        return {name: gpu_like(like, device, types[name]) for name in names}

    def fetch(self, piece: Piece, room: Mapping[str, Tensor]) -> list[Copy]:
        """Begin to fetch tensors of a piece that were sent before."""
        return [self._store.get(self._slot(piece, name), there) for name, there in room.items()]

    def send(self, piece: Piece, tensors: Mapping[str, Tensor]) -> list[Copy]:
        """Begin to write tensors of a piece to the disk."""
        copies = []
        for name, tensor in tensors.items():
            slot = self._slot(piece, name)
            self._puts[slot] = self._store.put(slot, tensor)
            self._sent.add(slot)
            copies.append(self._puts[slot])
        return copies

    def announce(self, wanted: Iterable[tuple[Piece, Collection[str]]]) -> None:
        """Announce which pieces, and which tensors of each, will be fetched next, in order."""
        self._store.announce([self._slot(piece, name) for piece, names in wanted for name in names])

    def write(self, trained: Trained, tensors: Mapping[str, Tensor]) -> None:
        """Write a parameter's whole tensors; the caller may free them afterwards."""
        for piece in self._pieces[trained]:
            for copy in self.send(piece, {name: piece.of(t) for name, t in tensors.items()}):
                copy.wait()

    def read(
        self, trained: Trained, device: torch.device, names: Collection[str]
    ) -> dict[str, Tensor]:
        """Some of a parameter's tensors as a whole, on a device."""
        self.finish()  # host-to-host copies do not wait for pending writes
        whole = {name: gpu_like(trained.like, device, self._types[trained][name]) for name in names}
        for piece in self._pieces[trained]:
            for name, tensor in whole.items():
                slot = self._slot(piece, name)
                if slot in self._sent:
                    self._store.get(slot, piece.of(tensor)).finish()
                else:  # the first step was aborted before it
                    piece.of(tensor).zero_()
        return whole

    def nbytes(self, trained: Trained, names: Collection[str]) -> int:
        """The bytes of some of a parameter's tensors."""
        return sum(trained.leaf.numel() * self._types[trained][name].itemsize for name in names)

    def stand_in(self, trained: Trained, name: str) -> Tensor:
        """The stand-in for a tensor: one NaN, expanded to its shape."""
        dtype = self._types[trained][name]
        return self._stand_ins.of((trained, name), trained.like.shape, dtype)

    def numbers(self, tensor: Tensor) -> Tensor:
        """The tensor's actual values: read from the disk for a stand-in, else the tensor itself."""
        found = self._stand_ins.find(tensor)
        if found is None:
            return tensor
        trained, name = found
        return self.read(trained, torch.device("cpu"), [name])[name]

    def finish(self) -> None:
        """Wait until everything sent is on the disk; raises the error of a failed write."""
        puts, self._puts = self._puts, {}
        for copy in puts.values():
            copy.finish()

    def close(self) -> None:
        """Release the disk space and the buffers."""
        self._store.close()

    def _slot(self, piece: Piece, name: str) -> int:
        return self._slots[piece.trained, piece.start, name]


def is_kept(value: object) -> bool:
    """Whether a value of an optimizer's state is offloaded; counters are not."""
    return isinstance(value, Tensor) and value.dim() > 0


def _types(trained: Trained, made: State) -> dict[str, torch.dtype]:
    """The dtypes of a parameter's tensors on the disk, by name."""
    types = {name: value.dtype for name, value in made.items() if is_kept(value)}
    return {**types, MASTER: trained.owned.dtype} if trained.has_master else types
