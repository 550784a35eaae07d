"""An optimizer's state in host memory, shown through the optimizer's own `state`.

State tensors are offloaded to the host, a whole parameter at a time; scalars such as step counters
stay where they are. A parameter that is stepped in pieces still has whole tensors on the host, as
in a state dict.

Some state may be on the disk instead (`DiskState`), where masters are fetched and written with it.
The optimizer shows stand-ins for it, and its values only between `show` and `hide`. The state of
some parameters may stay on the GPU, where the plain optimizer has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from oomph.memory.link import Copy, Link
from oomph.techniques.disk_state import DiskState, is_kept
from oomph.techniques.host_tensors import brought_home, gpu_like, host_tensor, to_host_now
from oomph.techniques.optimizer_twin import State
from oomph.techniques.step_buckets import Piece, Trained, whole
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import version_of


class HostState:
    """The state of an optimizer's parameters."""

    def __init__(
        self,
        link: Link,
        optimizer: torch.optim.Optimizer,
        disk: DiskState | None = None,
        staying: Collection[Trained] = (),
    ) -> None:
        self._link = link
        self._optimizer = optimizer
        self._disk = disk
        self._staying = staying
        #: Shown values of parameters whose state is on the disk, with their versions when loaded.
        self._shown: dict[Trained, dict[str, tuple[Tensor, int]]] = {}
        #: Parameters whose state is complete, and stepped pieces of the others.
        self._complete: set[Trained] = set()
        self._stepped: set[Piece] = set()
        #: Parameters with offloaded state.
        self._moved: set[Trained] = set()
        #: Memory reserved for state that the first step will make.
        self._reserved: dict[tuple[Trained, str], Tensor] = {}

    def reserve(self, trained: Trained, made: State) -> None:
        """Reserve host memory for a parameter's future state, modelled on the sample state `made`.

        If host memory runs out, it does so before anything was stepped.
        """
        if self._is_on_disk(trained) or trained in self._staying:
            return
        if not self._optimizer.state.get(trained.owned):
            for name, value in made.items():
                if is_kept(value):
                    room = host_tensor(self._link, trained.like, value.dtype)
                    self._reserved[trained, name] = room

    def make(self, trained: Trained, made: State) -> None:
        """Create a parameter's state, modelled on the sample `made`, with undefined values."""
        like = {
            name: torch.empty_like(trained.like, dtype=value.dtype, device="meta")
            if is_kept(value)
            else value.clone()
            for name, value in made.items()
        }
        self.store(whole(trained), like)

    def forget(self) -> None:
        """Forget all bookkeeping: the optimizer's state was dropped or replaced."""
        self._reserved.clear()
        self._complete.clear()
        self._stepped.clear()
        self._moved.clear()
        self._shown.clear()

    def move_out(self, trained: Trained) -> None:
        """Offload the existing state of a parameter."""
        state = self._optimizer.state.get(trained.owned)
        if not state:
            return
        if self._is_on_disk(trained) or trained in self._staying:
            self.adopt(trained)
            return
        for name, value in state.items():
            if is_kept(value):
                state[name] = to_host_now(self._link, value)
                self._moved.add(trained)  # after each tensor: the next one may run out of memory
        self._complete.add(trained)

    def adopt(self, trained: Trained) -> None:
        """Take over a parameter's state that the optimizer already has on the host.

        State that belongs on the disk or on the GPU is moved there from wherever it is.
        """
        if trained in self._staying:
            state = self._optimizer.state[trained.owned]
            device = trained.leaf.device
            state.update((name, v.to(device)) for name, v in state.items() if is_kept(v))
        if self._is_on_disk(trained):
            self._write(trained)
            self._hide(trained)
        self._complete.add(trained)
        self._moved.add(trained)

    def move_in(self, trained: Trained, home: torch.device) -> None:
        """Move a parameter's state back to `home`."""
        if trained not in self._moved:
            return
        state = self._optimizer.state[trained.owned]
        if self._is_on_disk(trained):
            assert self._disk is not None
            self._write_back(trained)
            state.update(self._disk.read(trained, home, self._disk.state_names(trained)))
            return
        for name, value in state.items():
            if is_kept(value) and trained in self._staying:
                state[name] = value.to(home)
            elif is_kept(value):
                state[name] = brought_home(self._link, value, home, trained.leaf.device)

    def has(self, piece: Piece) -> bool:
        """Whether this piece has state, because it was stepped or came with state."""
        return piece.trained in self._complete or piece in self._stepped

    def tensors(self, piece: Piece) -> dict[str, Tensor]:
        """This piece of the state tensors in host memory; nothing before its first step."""
        trained = piece.trained
        if not self.has(piece) or self._is_on_disk(trained) or trained in self._staying:
            return {}
        return {name: piece.of(v) for name, v in self._state(piece).items() if is_kept(v)}

    def room_from_disk(self, piece: Piece, device: torch.device) -> dict[str, Tensor]:
        """GPU memory for this piece of the state and master that are on the disk."""
        if self._disk is None or piece.trained not in self._disk:
            return {}
        return self._disk.room(piece, device, self._names_on_disk(piece))

    def from_disk(self, piece: Piece, room: Mapping[str, Tensor]) -> list[Copy]:
        """Begin to fetch this piece from the disk into `room`."""
        return self._disk.fetch(piece, room) if self._disk is not None else []

    def to_disk(self, piece: Piece, tensors: Mapping[str, Tensor]) -> list[Copy]:
        """Begin to write all of a piece's state and master to the disk, if they belong there."""
        if self._disk is None or piece.trained not in self._disk:
            return []
        names = self._disk.names(piece.trained)
        return self._disk.send(piece, {name: tensors[name] for name in names})

    def announce(self, pieces: Iterable[Piece]) -> None:
        """Announce which pieces will be fetched next, in this order."""
        if self._disk is not None:
            self._disk.announce((piece, self._names_on_disk(piece)) for piece in pieces)

    def show(self) -> None:
        """Load the state that is on the disk into host memory, for reading."""
        for trained in self._not_shown():
            assert self._disk is not None
            names = self._disk.state_names(trained)
            numbers = self._disk.read(trained, torch.device("cpu"), names)
            self._optimizer.state[trained.owned].update(numbers)
            self._shown[trained] = {name: (t, version_of(t)) for name, t in numbers.items()}

    @property
    def hidden_bytes(self) -> int:
        """Bytes of host memory that `show` takes."""
        if self._disk is None:
            return 0
        return sum(self._disk.nbytes(t, self._disk.state_names(t)) for t in self._not_shown())

    def hide(self) -> None:
        """Drop what `show` loaded; changed values are written back to the disk."""
        for trained in list(self._shown):
            self._write_back(trained)
            self._hide(trained)

    def finish(self) -> None:
        """Wait for all writes to the disk; raises the error of a failed one."""
        if self._disk is not None:
            self._disk.finish()

    def close(self) -> None:
        """Release the disk space."""
        if self._disk is not None:
            self._disk.close()

    def resident(self, piece: Piece) -> State:
        """The state that is not streamed: scalars, and state that stays on the GPU.

        Empty before the piece's first step. All pieces but the last get copies of scalars, so that
        a step counter is incremented only once.
        """
        if not self.has(piece):
            return {}
        found: State = {}
        for name, value in self._state(piece).items():
            if not is_kept(value):
                copied = isinstance(value, Tensor) and not piece.is_last
                found[name] = value.clone() if copied else value
            elif piece.trained in self._staying:
                found[name] = piece.of(value)
        return found

    def store(self, piece: Piece, state: State) -> dict[str, Tensor]:
        """Note that a piece was stepped; returns the host tensors to copy its state into."""
        kept: State = self._optimizer.state[piece.trained.owned]
        on_disk = self._is_on_disk(piece.trained)
        for name, value in state.items():
            if not is_kept(value):
                if piece.is_last:
                    kept[name] = value
            elif piece.trained in self._staying:
                self._keep(piece, kept, name, value)
            elif not isinstance(kept.get(name), Tensor):
                if on_disk:
                    assert self._disk is not None
                    kept[name] = self._disk.stand_in(piece.trained, name)
                else:
                    kept[name] = self._room(piece, name, value)
        self._stepped.add(piece)
        self._moved.add(piece.trained)
        if piece.is_last:
            self._complete.add(piece.trained)
        if on_disk or piece.trained in self._staying:
            return {}
        return {name: piece.of(kept[name]) for name, value in state.items() if is_kept(value)}

    def _keep(self, piece: Piece, kept: State, name: str, value: Tensor) -> None:
        """Store a piece of state that stays on the GPU, unless it was stepped in place."""
        device = piece.trained.leaf.device
        if not isinstance(kept.get(name), Tensor):
            if piece.is_whole and value.device == device:
                kept[name] = value
                return
            kept[name] = gpu_like(piece.trained.like, device, value.dtype)
        elsewhere = cdata_of(value.untyped_storage()) != cdata_of(kept[name].untyped_storage())
        if elsewhere and value.device == device:
            piece.of(kept[name]).copy_(value)

    def _room(self, piece: Piece, name: str, value: Tensor) -> Tensor:
        reserved = self._reserved.pop((piece.trained, name), None)
        if reserved is not None and reserved.dtype == value.dtype:
            return reserved
        like = value if piece.is_whole else piece.trained.like
        return host_tensor(self._link, like, value.dtype)

    def _is_on_disk(self, trained: Trained) -> bool:
        return self._disk is not None and trained in self._disk

    def _not_shown(self) -> list[Trained]:
        """Parameters whose state is complete, on the disk and not shown."""
        return [t for t in self._complete if self._is_on_disk(t) and t not in self._shown]

    def _names_on_disk(self, piece: Piece) -> list[str]:
        if self._disk is None or piece.trained not in self._disk:
            return []
        return self._disk.names(piece.trained, has_state=self.has(piece))

    def _write_back(self, trained: Trained) -> None:
        shown = self._shown.get(trained)
        state = self._optimizer.state.get(trained.owned)
        if shown is None or state is None:
            return
        if any(state[n] is not t or version_of(t) != version for n, (t, version) in shown.items()):
            self._write(trained)

    def _write(self, trained: Trained) -> None:
        assert self._disk is not None
        state = self._optimizer.state[trained.owned]
        names = self._disk.state_names(trained)
        self._disk.write(trained, {name: state[name] for name in names})

    def _hide(self, trained: Trained) -> None:
        assert self._disk is not None
        self._shown.pop(trained, None)
        state = self._optimizer.state[trained.owned]
        for name in self._disk.state_names(trained):
            state[name] = self._disk.stand_in(trained, name)

    def _state(self, piece: Piece) -> State:
        state: State = self._optimizer.state[piece.trained.owned]
        return state
