"""A step is a transaction (rule 5): whatever fails inside it, all is as it was before.

What a step may change is remembered when it begins, without any memory of the device: random
streams, buffers, the loss scaler, what is known about weighing parts. The weights and the
optimizer's state change at its end only, as a whole or not at all (`optimizer_pieces`). Where they
are stepped inside backward, they are copied to the host first, all of them, while forward runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from oomph.running.host_copies import HostCopies
from oomph.running.optimizer_pieces import (
    remember_generators,
    remember_state,
    state_tensors,
)
from oomph.running.random_state import get_random_state, set_random_state
from oomph.running.step import Stage
from oomph.techniques.micro_batch import Weigher

_PutBack = Callable[[], None]

#: What a GradScaler leaves on an optimizer whose fused step fails.
_LEFT_BY_SCALER = ("grad_scale", "found_inf")
#: PyTorch's answer for a tensor of which several elements are one and the same.
_OVERLAPS = 1


class Transaction:
    """Remembers what a stage's step may change, and puts it back; one step after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = HostCopies()
        # Forward waits for the buffers: they must not wait for weights.
        self._weights = HostCopies(behind=self._buffers)
        self._put_back: list[_PutBack] = []

    @property
    def host_bytes(self) -> int:
        """Host memory that the copies take."""
        return self._buffers.nbytes + self._weights.nbytes

    def begin(self, stage: Stage) -> None:
        """Remember how things are."""
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
        else:
            self._weights.keep([])
        self._put_back = put_back

    def commit(self, stage: Stage) -> None:
        """The step is done, and nothing of it will be put back."""
        self._put_back = []
        if stage.in_backward is not None:
            stage.in_backward.before_step = None  # it holds what the optimizer may drop

    def roll_back(self, stage: Stage) -> None:
        """Put everything back as it was when the step began; gradients are dropped.

        Takes no memory of the device. Not to be called inside an `except`, whose traceback keeps
        the failed step's tensors alive.
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
        """What layers write to in forward, as BatchNorm its statistics.

        Those that are saved with the model are taken to change; the others are copied again only
        if they did. The scaler's two numbers go the same way.
        """
        places = [(module, dict(module._buffers)) for module in stage.model.modules()]
        scaler = stage.scaler
        numbers = [scaler._scale, scaler._growth_tracker] if scaler is not None else []
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
        # Backward begins with the last ones.
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
    """Which numbers it has and how far it got; their values are kept with the buffers'."""
    if scaler is None:
        return lambda: None
    numbers = {name: getattr(scaler, name) for name in ("_scale", "_growth_tracker")}

    def put_back() -> None:
        vars(scaler).update(numbers)
        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for name in _LEFT_BY_SCALER:
            vars(optimizer).pop(name, None)

    return put_back


def _buffers(model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Each buffer that can be written to, and whether it is saved with the model."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and torch._debug_has_internal_overlap(buffer) != _OVERLAPS:
                yield buffer, name not in module._non_persistent_buffers_set
