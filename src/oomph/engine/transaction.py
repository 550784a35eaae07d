"""A step is a transaction (rule 5): if anything inside it fails, the state before it is restored.

What a step may change is remembered when it begins, without using device memory: random state,
buffers, the loss scaler, and how parts are weighed. Weights and optimizer state change only at its
end, as a whole or not at all (`optimizer_pieces`). If they are stepped inside backward, or by code
with unknown effects, all of them are first copied to the host while forward runs. There is no such
copy if the optimizer is on the host and steps inside backward, or if host memory has no room for
it: a step that breaks off there with some weights stepped raises `StepBroken`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oomph.engine.host_copies import HostCopies
from oomph.engine.optimizer_memory import remember_optimizer
from oomph.engine.optimizer_pieces import (
    OptimizerPieces,
    remember_generators,
    remember_state,
    state_tensors,
)
from oomph.engine.step import Stage
from oomph.memory.limits import host_limits
from oomph.process.random_state import get_random_state, set_random_state
from oomph.techniques.micro_batch import Weigher
from oomph.torch_compat.grad_scaler import GROWTH, SCALE, forget_steps, growth_of, scale_of
from oomph.torch_compat.modules import buffers_of, unsaved_buffers_of
from oomph.torch_compat.tensors import internal_overlap

_PutBack = Callable[[], None]

#: The share of free host memory that unplanned copies of weights may take.
MOST_OF_HOST = 0.5
#: Attributes that a GradScaler leaves on an optimizer whose fused step fails.
_LEFT_BY_SCALER = ("grad_scale", "found_inf")
#: PyTorch's value for a tensor in which several elements share memory.
_OVERLAPS = 1


class Transaction:
    """Remembers what a stage's step may change, and restores it; for one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = HostCopies()
        # Forward waits for the buffers' copies, so those must not wait for the weights'.
        self._weights = HostCopies(behind=self._buffers)
        self._put_back: list[_PutBack] = []

    @property
    def host_bytes(self) -> int:
        """Host memory used by the copies."""
        return self._buffers.nbytes + self._weights.nbytes

    def begin(self, stage: Stage) -> None:
        """Remember the state before the step."""
        self._put_back = []
        assert stage.optimizer is not None
        put_back = [
            _remember_random(self._device),
            _remember_weigher(stage.weigher),
            _remember_scaler(stage.scaler, stage.optimizer),
            self._remember_buffers(stage),
        ]
        if stage.in_backward is not None:
            put_back.append(self._remember_weights(stage))
        elif stage.host is None and stage.pieces is not None and stage.pieces.are_steps_whole:
            put_back.append(self._remember_whole(stage, stage.pieces))
        else:
            self._weights.keep([])
        self._put_back = put_back

    def commit(self, stage: Stage) -> None:
        """The step is done: nothing of it will be rolled back."""
        self._put_back = []
        if stage.in_backward is not None:
            stage.in_backward.before_step = None  # it holds tensors that the optimizer may drop
        if stage.pieces is not None:
            stage.pieces.before_whole = None

    def roll_back(self, stage: Stage) -> None:
        """Restore everything as it was when the step began; gradients are dropped.

        Allocates no device memory. Do not call it inside an `except`, whose traceback keeps the
        failed step's tensors alive.
        """
        assert stage.optimizer is not None
        if stage.host is not None:
            stage.host.abandon()
        owned = (p for group in stage.optimizer.param_groups for p in group["params"])
        for parameter in (*owned, *stage.model.parameters()):
            parameter.grad = None
        put_back = self._put_back
        self.commit(stage)
        for one in put_back:
            one()

    def _remember_buffers(self, stage: Stage) -> _PutBack:
        """Remember what layers write to in forward, such as BatchNorm its statistics.

        Buffers saved with the model are assumed to change; others are copied again only if they
        did. The scaler's two numbers are treated like buffers.
        """
        places = [(module, dict(buffers_of(module))) for module in stage.model.modules()]
        scaler = stage.scaler
        numbers = [scale_of(scaler), growth_of(scaler)] if scaler is not None else []
        buffers = {id(buffer): (buffer, saved) for buffer, saved in _buffers(stage.model)}
        kept = [buffer for buffer, _ in buffers.values()]
        kept += [number for number in numbers if number is not None]
        still = {key for key, (_, saved) in buffers.items() if not saved}
        self._buffers.keep([kept], still)
        self._buffers.wait(kept)

        def put_back() -> None:
            for module, own in places:
                module._buffers.clear()
                module._buffers.update(own)
            for tensor in kept:
                self._buffers.put_back(tensor)

        return put_back

    def _remember_weights(self, stage: Stage) -> _PutBack:
        optimizer, in_backward, masters = stage.optimizer, stage.in_backward, stage.masters
        assert optimizer is not None and in_backward is not None
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = {p: [p, *state_tensors(optimizer, p)] for p in owned}
        states, random = remember_state(optimizer, owned), remember_generators(optimizer)
        # Backward begins with the last parameters.
        self._weights.keep(list(reversed(tensors.values())))
        stepped: list[Tensor] = []

        def before_step(parameter: Tensor) -> None:
            stepped.append(parameter)
            self._weights.wait(tensors[parameter])

        in_backward.before_step = before_step

        def put_back() -> None:
            for parameter in stepped:
                for tensor in tensors[parameter]:
                    self._weights.put_back(tensor)
                if masters is not None:
                    masters.refresh(parameter)
            states()
            random()
            in_backward.dirty = False

        return put_back

    def _remember_whole(self, stage: Stage, pieces: OptimizerPieces) -> _PutBack:
        """Remember what a step with unknown effects may change, including its hooks."""
        optimizer, masters = stage.optimizer, stage.masters
        assert optimizer is not None
        python = remember_optimizer(optimizer)
        tensors = [one for one in python.tensors if one.layout is torch.strided]
        size = sum(one.nbytes for one in tensors)
        if size > self._weights.nbytes + MOST_OF_HOST * host_limits().memory:
            self._weights.keep([])  # if such a step breaks off, it is reported
            return lambda: None
        self._weights.keep([tensors])
        pieces.before_whole = functools.partial(self._weights.wait, tensors)

        def put_back() -> None:
            python.put_back()
            for tensor in tensors:
                self._weights.put_back(tensor)
            if masters is not None:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        masters.refresh(parameter)
            pieces.half_done = False

        return put_back


def _remember_random(device: torch.device) -> _PutBack:
    state = get_random_state(device)
    return lambda: set_random_state(state, device)


def _remember_weigher(weigher: Weigher | None) -> _PutBack:
    if weigher is None:
        return lambda: None
    known: dict[str, Any] = {
        name: value.copy() if isinstance(value, (dict, list)) else value
        for name, value in vars(weigher).items()
    }
    return lambda: vars(weigher).update(known)


def _remember_scaler(
    scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer
) -> _PutBack:
    """Remember its attributes; their values are kept with the buffers'."""
    if scaler is None:
        return lambda: None
    numbers = {name: getattr(scaler, name) for name in (SCALE, GROWTH)}

    def put_back() -> None:
        vars(scaler).update(numbers)
        forget_steps(scaler)
        for name in _LEFT_BY_SCALER:
            vars(optimizer).pop(name, None)

    return put_back


def _buffers(model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Each buffer that can be written to, and whether it is saved with the model."""
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and internal_overlap(buffer) != _OVERLAPS:
                yield buffer, name not in unsaved_buffers_of(module)
