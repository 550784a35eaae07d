"""An optimizer's state in host memory, while the optimizer's own `state` shows it.

Tensors go to the host, whole parameters at a time; scalars such as step counters stay where they
are. What is stepped in pieces has one whole tensor on the host all the same, as a state dict has.

Some of it may be on the disk instead (`DiskState`), where masters come and go with it. The
optimizer shows a stand-in for that, and the numbers only from `show` to `hide`. And that of some
parameters may stay on the GPU, where the plain optimizer has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from oomph.host.link import Copy, Link
from oomph.techniques.disk_state import DiskState, is_kept
from oomph.techniques.host_tensors import brought_home, gpu_like, host_tensor, to_host_now
from oomph.techniques.optimizer_twin import State
from oomph.techniques.step_buckets import Piece, Trained, whole


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
        #: What the optimizer shows of parameters whose state is on the disk, and its versions.
        self._shown: dict[Trained, dict[str, tuple[Tensor, int]]] = {}
        #: Parameters whose state is all there, and pieces of others that were stepped.
        self._complete: set[Trained] = set()
        self._stepped: set[Piece] = set()
        #: Those of which something is on the host.
        self._moved: set[Trained] = set()
        #: Room for state that the first step will make.
        self._reserved: dict[tuple[Trained, str], Tensor] = {}

    def reserve(self, trained: Trained, made: State) -> None:
        """Take host memory for a parameter's state before there is any; `made` is that of another.

        Where it runs out, it does so before anything was stepped.
        """
        if self._is_on_disk(trained) or trained in self._staying:
            return
        if not self._optimizer.state.get(trained.owned):
            for name, value in made.items():
                if is_kept(value):
                    room = host_tensor(self._link, trained.like, value.dtype)
                    self._reserved[trained, name] = room

    def make(self, trained: Trained, made: State) -> None:
        """Have state of a parameter as another's first step made it, whatever is in it."""
        like = {
            name: torch.empty_like(trained.like, dtype=value.dtype, device="meta")
            if is_kept(value)
            else value.clone()
            for name, value in made.items()
        }
        self.store(whole(trained), like)

    def forget(self) -> None:
        """No parameter has state any more, or another one than so far."""
        self._reserved.clear()
        self._complete.clear()
        self._stepped.clear()
        self._moved.clear()
        self._shown.clear()

    def move_out(self, trained: Trained) -> None:
        """Take what state there is of a parameter to the host."""
        state = self._optimizer.state.get(trained.owned)
        if not state:
            return
        if self._is_on_disk(trained) or trained in self._staying:
            self.adopt(trained)
            return
        for name, value in state.items():
            if is_kept(value):
                state[name] = to_host_now(self._link, value)
                self._moved.add(trained)  # each by itself: the next one may find no room
        self._complete.add(trained)

    def adopt(self, trained: Trained) -> None:
        """The state that the optimizer has of a parameter is on the host already.

        If it belongs on the disk or on the GPU it goes there from wherever it is.
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
        """Bring it back to where it was."""
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
        """Whether this piece was stepped before, or came with state."""
        return piece.trained in self._complete or piece in self._stepped

    def tensors(self, piece: Piece) -> dict[str, Tensor]:
        """This piece of what is in host memory; nothing before its first step."""
        trained = piece.trained
        if not self.has(piece) or self._is_on_disk(trained) or trained in self._staying:
            return {}
        return {name: piece.of(v) for name, v in self._state(piece).items() if is_kept(v)}

    def room_from_disk(self, piece: Piece, device: torch.device) -> dict[str, Tensor]:
        """Memory on the GPU for this piece of what is on the disk: of state, and of a master."""
        if self._disk is None or piece.trained not in self._disk:
            return {}
        return self._disk.room(piece, device, self._names_on_disk(piece))

    def from_disk(self, piece: Piece, room: Mapping[str, Tensor]) -> list[Copy]:
        """Begin to bring it there."""
        return self._disk.fetch(piece, room) if self._disk is not None else []

    def to_disk(self, piece: Piece, tensors: Mapping[str, Tensor]) -> list[Copy]:
        """Begin to take what belongs there of these to the disk, which is nothing or all it has."""
        if self._disk is None or piece.trained not in self._disk:
            return []
        names = self._disk.names(piece.trained)
        return self._disk.send(piece, {name: tensors[name] for name in names})

    def announce(self, pieces: Iterable[Piece]) -> None:
        """Say which pieces will be brought next, in this order."""
        if self._disk is not None:
            self._disk.announce((piece, self._names_on_disk(piece)) for piece in pieces)

    def show(self) -> None:
        """Have the numbers that are on the disk in host memory, for whoever reads the state."""
        for trained in self._not_shown():
            assert self._disk is not None
            names = self._disk.state_names(trained)
            numbers = self._disk.read(trained, torch.device("cpu"), names)
            self._optimizer.state[trained.owned].update(numbers)
            self._shown[trained] = {name: (t, t._version) for name, t in numbers.items()}

    @property
    def hidden_bytes(self) -> int:
        """Host memory that `show` takes."""
        if self._disk is None:
            return 0
        return sum(self._disk.nbytes(t, self._disk.state_names(t)) for t in self._not_shown())

    def hide(self) -> None:
        """Forget what `show` brought; what somebody wrote to it goes to the disk."""
        for trained in list(self._shown):
            self._write_back(trained)
            self._hide(trained)

    def finish(self) -> None:
        """Wait until all that belongs on the disk is there; raises what went wrong."""
        if self._disk is not None:
            self._disk.finish()

    def close(self) -> None:
        """Give the room on the disk back."""
        if self._disk is not None:
            self._disk.close()

    def resident(self, piece: Piece) -> State:
        """What does not come and go: scalars, and what stays. Nothing before its first step.

        All pieces but the last have copies of scalars, so that these count once.
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
        """Note that a piece was stepped; where in host memory its state's tensors belong."""
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
        """Have a piece of state that stays in its place on the GPU, if it was not stepped there."""
        device = piece.trained.leaf.device
        if not isinstance(kept.get(name), Tensor):
            if piece.is_whole and value.device == device:
                kept[name] = value
                return
            kept[name] = gpu_like(piece.trained.like, device, value.dtype)
        elsewhere = value.untyped_storage()._cdata != kept[name].untyped_storage()._cdata
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
        """Those whose state is all on the disk."""
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
        if any(state[n] is not t or t._version != version for n, (t, version) in shown.items()):
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
