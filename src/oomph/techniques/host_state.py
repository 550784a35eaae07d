"""An optimizer's state in host memory, while the optimizer's own `state` shows it.

Tensors go to the host, whole parameters at a time; scalars such as step counters stay where they
are. What is stepped in pieces has one whole tensor on the host all the same, as a state dict has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomph.host.link import Link
from oomph.techniques.host_tensors import brought_home, host_tensor, to_host_now
from oomph.techniques.optimizer_twin import State
from oomph.techniques.step_buckets import Piece, Trained


class HostState:
    """The state of an optimizer's parameters."""

    def __init__(self, link: Link, optimizer: torch.optim.Optimizer) -> None:
        self._link = link
        self._optimizer = optimizer
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
        if not self._optimizer.state.get(trained.owned):
            for name, value in made.items():
                if _is_moved(value):
                    room = host_tensor(self._link, trained.like, value.dtype)
                    self._reserved[trained, name] = room

    def make(self, trained: Trained, made: State) -> None:
        """Have state of a parameter as another's first step made it, whatever is in it."""
        piece = Piece(
            trained=trained, start=0, stop=trained.leaf.numel(), is_whole=True, is_last=True
        )
        like = {
            name: torch.empty_like(trained.like, dtype=value.dtype, device="meta")
            if _is_moved(value)
            else value.clone()
            for name, value in made.items()
        }
        self.store(piece, like)

    def forget(self) -> None:
        """No parameter has state any more, or another one than so far."""
        self._reserved.clear()
        self._complete.clear()
        self._stepped.clear()
        self._moved.clear()

    def move_out(self, trained: Trained) -> None:
        """Take what state there is of a parameter to the host."""
        state = self._optimizer.state.get(trained.owned)
        if not state:
            return
        for name, value in state.items():
            if _is_moved(value):
                state[name] = to_host_now(self._link, value)
                self._moved.add(trained)  # each by itself: the next one may find no room
        self._complete.add(trained)

    def adopt(self, trained: Trained) -> None:
        """The state that the optimizer has of a parameter is on the host already."""
        self._complete.add(trained)
        self._moved.add(trained)

    def move_in(self, trained: Trained, home: torch.device) -> None:
        """Bring it back to where it was."""
        if trained not in self._moved:
            return
        state = self._optimizer.state[trained.owned]
        for name, value in state.items():
            if _is_moved(value):
                state[name] = brought_home(self._link, value, home, trained.leaf.device)

    def tensors(self, piece: Piece) -> dict[str, Tensor]:
        """This piece of what is on the host; nothing before its first step."""
        if not self._is_there(piece):
            return {}
        return {name: piece.of(v) for name, v in self._state(piece).items() if _is_moved(v)}

    def scalars(self, piece: Piece) -> State:
        """What is not on the host; all pieces but the last have copies, so that it counts once."""
        if not self._is_there(piece):
            return {}
        return {
            name: value.clone() if isinstance(value, Tensor) and not piece.is_last else value
            for name, value in self._state(piece).items()
            if not _is_moved(value)
        }

    def store(self, piece: Piece, state: State) -> dict[str, Tensor]:
        """Note that a piece was stepped; where on the host its state's tensors belong."""
        kept: State = self._optimizer.state[piece.trained.owned]
        for name, value in state.items():
            if not _is_moved(value):
                if piece.is_last:
                    kept[name] = value
            elif not isinstance(kept.get(name), Tensor):
                kept[name] = self._room(piece, name, value)
        self._stepped.add(piece)
        self._moved.add(piece.trained)
        if piece.is_last:
            self._complete.add(piece.trained)
        return {name: piece.of(kept[name]) for name, value in state.items() if _is_moved(value)}

    def _room(self, piece: Piece, name: str, value: Tensor) -> Tensor:
        reserved = self._reserved.pop((piece.trained, name), None)
        if reserved is not None and reserved.dtype == value.dtype:
            return reserved
        like = value if piece.is_whole else piece.trained.like
        return host_tensor(self._link, like, value.dtype)

    def _is_there(self, piece: Piece) -> bool:
        return piece.trained in self._complete or piece in self._stepped

    def _state(self, piece: Piece) -> State:
        state: State = self._optimizer.state[piece.trained.owned]
        return state


def _is_moved(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
