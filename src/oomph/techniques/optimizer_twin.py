"""A second optimizer of the same class that steps a few tensors with state it is handed.

The user's own optimizer stays as it is: its groups, its state and whatever patched its step. The
twin is given some tensors, one of the user's groups and the state of each tensor, makes the step
that the user's would make of them, and forgets them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.techniques.optimizer_in_backward import PER_PARAMETER, runs_step_of
from oomph.techniques.partial_steps import part_of_a_step

#: Have a fused kernel on the CPU.
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
#: Look at more of a parameter than one element at a time.
_WHOLE = (torch.optim.Adafactor, torch.optim.Muon)

Group = Mapping[str, Any]
State = dict[str, Any]


class OptimizerTwin:
    """Steps what it is given as `optimizer` would; `on_host` by the CPU's best kernel."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, on_host: bool = False) -> None:
        self._twin = copy.copy(optimizer)  # without its hooks and what was patched into it
        own = {name: value for name, value in vars(optimizer).items() if name != "step"}
        for name in own.keys() - vars(self._twin).keys():
            setattr(self._twin, name, own[name])
        self._twin.state = defaultdict(dict)
        self._twin.param_groups = []
        self._flags: dict[str, Any] = {}
        if on_host:
            fused = runs_step_of(optimizer, _FUSED_ON_CPU)
            known = optimizer.defaults
            wanted = {"fused": fused, "foreach": None if fused else True, "capturable": False}
            self._flags = {name: value for name, value in wanted.items() if name in known}

    def step(self, group: Group, tensors: Sequence[Tensor], states: Sequence[State]) -> list[State]:
        """Step tensors that have gradients; their states afterwards, which may be new ones."""
        twin = self._twin
        twin.param_groups = [{**group, **self._flags, "params": list(tensors)}]
        for tensor, state in zip(tensors, states, strict=True):
            if state:
                twin.state[tensor] = state
        try:
            with part_of_a_step():
                twin.step()
            return [dict(twin.state.get(tensor, {})) for tensor in tensors]
        finally:
            twin.param_groups = []
            twin.state.clear()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of part of a parameter is that part of the parameter's step."""
    return runs_step_of(optimizer, PER_PARAMETER) and not runs_step_of(optimizer, _WHOLE)


def frozen_groups(optimizer: torch.optim.Optimizer, *, on_host: bool = False) -> list[Group]:
    """The groups' hyper-parameters as they are now, whatever a scheduler does to them later."""

    def frozen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu().clone() if on_host else value.detach().clone()
        if isinstance(value, tuple):
            return tuple(frozen(one) for one in value)
        return value

    return [
        {name: frozen(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
