"""A second optimizer of the same class that steps a few tensors with the state it is given.

The user's own optimizer stays as it is: its groups, its state and any patch of its step. The twin
is given some tensors, one of the user's groups and the state of each tensor, makes the step that
the user's optimizer would make, and forgets them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.techniques.fused_optimizer import steps_rightly_on_cpu
from oomph.techniques.optimizer_steps import PER_PARAMETER, runs_step_of
from oomph.techniques.partial_steps import part_of_a_step

#: Optimizers with a fused kernel on the CPU.
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
#: Optimizers whose step is not elementwise.
_WHOLE = (torch.optim.Adafactor, torch.optim.Muon)

Group = Mapping[str, Any]
State = dict[str, Any]


class OptimizerTwin:
    """Steps given tensors as `optimizer` would; with `on_host`, by the CPU's fastest kernel."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, on_host: bool = False) -> None:
        self._twin = copy.copy(optimizer)  # without its hooks and a patched step
        own = {name: value for name, value in vars(optimizer).items() if name != "step"}
        for name in own.keys() - vars(self._twin).keys():
            setattr(self._twin, name, own[name])
        self._twin.state = defaultdict(dict)
        self._twin.param_groups = []
        self._flags: dict[str, Any] = {}
        if on_host:
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            fused = runs_step_of(optimizer, _FUSED_ON_CPU) and all(
                p.is_floating_point() and steps_rightly_on_cpu(optimizer, p) for p in owned
            )
            known = optimizer.defaults
            wanted = {"fused": fused, "foreach": None if fused else True, "capturable": False}
            self._flags = {name: value for name, value in wanted.items() if name in known}

    def step(self, group: Group, tensors: Sequence[Tensor], states: Sequence[State]) -> list[State]:
        """Step tensors that have gradients; returns their states, which may be new objects."""
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
    """Whether stepping a slice of a parameter gives that slice of the parameter's step."""
    return runs_step_of(optimizer, PER_PARAMETER) and not runs_step_of(optimizer, _WHOLE)


def frozen_groups(optimizer: torch.optim.Optimizer, *, on_host: bool = False) -> list[Group]:
    """Copies of the groups' hyper-parameters, which a scheduler does not change later."""

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
