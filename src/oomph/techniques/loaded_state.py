"""An optimizer's state dict that is loaded into the places where its state waits."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.memory.link import Link
from oomph.techniques.host_state import HostState
from oomph.techniques.host_tensors import host_tensor
from oomph.techniques.optimizer_twin import State
from oomph.techniques.step_buckets import Trained


class LoadedState:
    """Holds a loaded state back from PyTorch, which would move all of it to the GPU first."""

    def __init__(
        self,
        *,
        link: Link,
        optimizer: torch.optim.Optimizer,
        state: HostState,
        staying: Collection[Trained],
        on_disk: Container[Trained],
    ) -> None:
        self._link = link
        self._optimizer = optimizer
        self._state = state
        self._staying = staying
        self._on_disk = on_disk
        #: By index in the optimizer.
        self._held_back: dict[int, State] = {}

    def hold_back(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict without state, for PyTorch to load."""
        saved = itertools.chain(*(group["params"] for group in state_dict["param_groups"]))
        places = {number: at for at, number in enumerate(saved)}
        self._held_back = {places[number]: one for number, one in state_dict["state"].items()}
        return {**state_dict, "state": {}}

    def take(self, trained: Sequence[Trained]) -> Iterator[Trained]:
        """Give the optimizer what was held back; yields each parameter that has its state now."""
        loading, self._held_back = self._held_back, {}
        self._state.forget()
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        by_owned = {one.owned: one for one in trained}
        for at, parameter in enumerate(owned):
            if at not in loading:
                continue
            one = by_owned.get(parameter)
            self._optimizer.state[parameter] = {
                name: self._placed(name, value, parameter, one)
                for name, value in loading[at].items()
            }
            if one is not None:
                yield one

    def _placed(self, name: str, value: Any, parameter: Tensor, trained: Trained | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "step":
            return value.clone()
        if value.dim() and trained is not None and trained in self._on_disk:
            return value.to(parameter.dtype)  # written to the disk from where it is
        if trained is not None and trained in self._staying:
            return value.to(device=trained.leaf.device, dtype=parameter.dtype, copy=True)
        if value.dim() and trained is not None:
            # With the parameter's memory layout, unless this state has a shape of its own.
            like = trained.like if trained.like.shape == value.shape else value
            here = host_tensor(self._link, like, parameter.dtype)
            here.copy_(value)
            return here
        device = trained.leaf.device if trained is not None else parameter.device
        return value.to(device=device, dtype=parameter.dtype, copy=True)
