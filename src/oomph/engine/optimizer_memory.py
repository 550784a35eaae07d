"""Remembers everything that an optimizer and additions to its step keep, to restore it.

PyTorch's own optimizers are known to change only their state and groups. A custom optimizer, a
replaced `step` and hooks on it may keep data anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.techniques.optimizer_steps import foreign_step_hooks
from oomph.techniques.python_state import PythonState


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer keeps, except the tensors' values, which are kept elsewhere."""

    tensors: list[Tensor]
    """Weights, state, and tensors of additions, without duplicates."""
    put_back: Callable[[], None]
    """Restores the same tensors and numbers."""


def remember_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerMemory:
    """Remember what the optimizer keeps now."""
    added = [("the step", vars(optimizer).get("step")), ("the optimizer", optimizer)]
    added += [("a hook", hook) for hook in foreign_step_hooks(optimizer, None)]
    python = PythonState(added)
    groups = [(group, _copied(group)) for group in optimizer.param_groups]
    states = {owned: _copied(state) for owned, state in optimizer.state.items()}

    def put_back() -> None:
        python.put_back()
        for group, before in groups:
            group.clear()
            group.update(_copied(before))
        optimizer.param_groups[:] = [group for group, _ in groups]
        optimizer.state.clear()
        optimizer.state.update((owned, _copied(state)) for owned, state in states.items())

    found = [
        *(tensor for _, before in groups for tensor in _tensors(before)),
        *(tensor for state in states.values() for tensor in _tensors(state)),
        *(tensor for _, tensor in python.tensors),
    ]
    return OptimizerMemory(
        tensors=list({id(one): one for one in found}.values()), put_back=put_back
    )


def _copied(value: Any) -> Any:
    """The same tensors and numbers in new containers."""
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
