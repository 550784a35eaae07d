"""Optimizer steps that, when memory runs out, have either not begun or can be completed.

A fused step is one kernel that takes no memory; only missing state is allocated and steps are
counted before it. Any other step is made for a few parameters at a time, the largest first, with a
copy of what these have: if memory runs out, they are restored and stepped one by one. Gradients are
dropped as they are used, and later pieces are smaller, so after the first piece there is room for
all others. If the first one does not fit, nothing has changed.

This needs an optimizer whose step of one parameter looks at no other parameter. Other optimizers
step as a whole; the tensors' version counters show whether a failed step had changed anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.engine.host_copies import HostCopies
from oomph.engine.out_of_memory import free_what_is_left, ran_out_of_memory
from oomph.process.interrupts import interrupts
from oomph.techniques.fused_optimizer import is_fused_here
from oomph.techniques.host_tensors import bytes_of
from oomph.techniques.low_bit_state import has_low_bit_state, rounding_generators
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.optimizer_in_backward import shown_only
from oomph.techniques.optimizer_steps import added_to_step, why_not_divided
from oomph.techniques.partial_steps import part_of_a_step, tell_followers
from oomph.torch_compat.optimizers import UNSCALES, foreach_copy_
from oomph.torch_compat.tensors import version_of

#: Bytes of weights and state copied at a time, unless one parameter alone has more.
PIECE = 64 << 20

#: Saves what a step of some parameters changes, and returns what restores it.
_Keep = Callable[[torch.optim.Optimizer, Sequence[Tensor]], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Parameters of one group that are stepped together."""

    group: dict[str, Any]
    parameters: tuple[Tensor, ...]
    keep: _Keep
    """Saves what must be restored if the piece fails."""


class OptimizerPieces:
    """Steps an optimizer as a whole or not at all."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: MasterWeights | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        #: Whether the last step broke off after some parameters had been stepped, so that weights
        #: and state are partly those of the next step.
        self.half_done = False
        #: Called before a step that is not divided.
        self.before_whole: Callable[[], None] | None = None

    @property
    def are_steps_whole(self) -> bool:
        """Whether all parameters are stepped at once, since the step may look at all of them."""
        return not self._can_be_divided()

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Make one step; gradients may be gone afterwards."""
        if scaler is None:
            self._step()
            return
        with self._shown_unscaled(), self._stepping_in_its_place():
            scaler.step(self._optimizer)
        self.half_done = True
        _insist(scaler.update)
        self.half_done = False

    def _step(self) -> None:
        if not self._can_be_divided():
            self._step_whole()
            return
        pieces = self._kernels() if self._is_fused() else self._pieces()
        with part_of_a_step():
            for piece in pieces:
                self._step_piece(piece)
                self.half_done = True
        self.half_done = False
        tell_followers(self._optimizer)

    @contextlib.contextmanager
    def _shown_unscaled(self) -> Iterator[None]:
        """While active, a scaler unscales gradients before a user's hook sees them.

        A fused step unscales them itself, which the user's original step does not.
        """
        mark, own = UNSCALES, vars(self._optimizer)
        if not (is_fused_here(self._optimizer) and added_to_step(self._optimizer, self._masters)):
            yield
            return
        own[mark] = False
        try:
            yield
        finally:
            own[mark] = True

    @contextlib.contextmanager
    def _stepping_in_its_place(self) -> Iterator[None]:
        """While active, calls of the optimizer's step are replaced by one of this kind."""
        optimizer = self._optimizer
        own = vars(optimizer).get("step")
        inside = False

        def step(*args: Any, **kwargs: Any) -> None:
            nonlocal inside
            assert not args and not kwargs and not inside
            inside = True
            put_back()
            self._step()

        def put_back() -> None:
            if own is not None:
                vars(optimizer)["step"] = own
            else:
                vars(optimizer).pop("step", None)

        vars(optimizer)["step"] = step
        try:
            yield
        finally:
            put_back()

    # -- the whole --------------------------------------------------------------------------------

    def _step_whole(self) -> None:
        """Step as a whole; the tensors' versions show whether a failed step had begun."""
        if self.before_whole is not None:
            self.before_whole()
        before = [
            (tensor, version_of(tensor))
            for _, parameter in self._stepped()
            for tensor in _tensors_of(self._optimizer, parameter)
        ]
        states = remember_state(self._optimizer, [parameter for _, parameter in self._stepped()])
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        try:
            self._optimizer.step()
        except BaseException:
            # Fused kernels do not count versions, so assume that it had.
            self.half_done = fused or any(version_of(tensor) != was for tensor, was in before)
            if not self.half_done:
                states()
            raise

    # -- pieces -----------------------------------------------------------------------------------

    def _is_fused(self) -> bool:
        """Whether nothing is allocated once the first weight is changed."""
        optimizer = self._optimizer
        plain = not has_low_bit_state(optimizer) and not hasattr(optimizer, "grad_scale")
        return plain and all(group.get("fused") for group in optimizer.param_groups)

    def _kernels(self) -> list[_Piece]:
        """All parameters with a gradient, by the fused kernel that steps them."""
        kernels: dict[Any, list[Tensor]] = {}
        groups = {}
        for group, parameter in self._stepped():
            groups[id(group)] = group
            key = id(group), parameter.device, parameter.dtype
            kernels.setdefault(key, []).append(parameter)
        return [
            _Piece(group=groups[key[0]], parameters=tuple(parameters), keep=_counters)
            for key, parameters in kernels.items()
        ]

    def _can_be_divided(self) -> bool:
        return not why_not_divided(self._optimizer, self._masters)

    def _pieces(self) -> list[_Piece]:
        """All parameters with a gradient, the largest first."""
        pieces: list[_Piece] = []
        room = 0
        for group, parameter in sorted(self._stepped(), key=lambda at: -at[1].nbytes):
            size = sum(bytes_of(tensor) for tensor in _tensors_of(self._optimizer, parameter))
            if pieces and pieces[-1].group is group and size <= room:
                together = (*pieces.pop().parameters, parameter)
                room -= size
            else:
                together = (parameter,)
                room = PIECE - size
            pieces.append(_Piece(group=group, parameters=together, keep=_clones))
        return pieces

    def _step_piece(self, piece: _Piece) -> None:
        failure = self._try(piece)
        if failure is None:
            return
        free_what_is_left(piece.parameters[0].device)
        if piece.keep is _clones and len(piece.parameters) > 1:
            for parameter in piece.parameters:
                self._step_piece(dataclasses.replace(piece, parameters=(parameter,)))
                self.half_done = True
            return
        if piece.keep is _clones:
            # Alone, and with its copy on the host, it takes the least memory possible.
            piece = dataclasses.replace(piece, keep=_copies_on_host)
        failure = self._try(piece)
        if failure is not None:
            raise torch.OutOfMemoryError(failure)

    def _try(self, piece: _Piece) -> str | None:
        """Step a piece; if memory runs out, restore it and return the error message."""
        try:
            kept = _Kept(self._optimizer, piece)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return str(error)
        try:
            with shown_only(self._optimizer, piece.group, piece.parameters):
                self._optimizer.step()
            if piece.keep is not _counters and not self.half_done:
                interrupts.let_through()  # the last moment at which it can be rolled back
        except BaseException as error:
            kept.put_back(self._masters)
            if not ran_out_of_memory(error):
                raise
            return str(error)
        for parameter in piece.parameters:
            parameter.grad = None
        return None

    # -- what there is ----------------------------------------------------------------------------

    def _stepped(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [
            (group, parameter)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]


def _insist(work: Callable[[], None]) -> None:
    """Do work that completes a step already made; repeat it once if memory runs out."""
    try:
        work()
        return
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
    work()


class _Kept:
    """The values of some parameters and their state before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, piece: _Piece) -> None:
        self._parameters = piece.parameters
        self._states = remember_state(optimizer, piece.parameters)
        self._random = remember_generators(optimizer)
        self._values = piece.keep(optimizer, piece.parameters)

    @torch.no_grad()
    def put_back(self, masters: MasterWeights | None) -> None:
        self._values()
        self._states()
        self._random()
        if masters is not None:
            for parameter in self._parameters:
                masters.refresh(parameter)


def remember_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> Callable[[], None]:
    """Returns a function that restores the same state tensors, but not their values."""
    states = [(p, dict(optimizer.state[p])) for p in parameters if p in optimizer.state]
    new = [p for p in parameters if p not in optimizer.state]

    def put_back() -> None:
        for parameter in new:
            optimizer.state.pop(parameter, None)
        for parameter, state in states:
            present = optimizer.state[parameter]
            present.clear()
            present.update(state)

    return put_back


def remember_generators(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns a function that restores an 8-bit optimizer's random generators."""
    generators = rounding_generators(optimizer)
    states = {device: one.get_state() for device, one in generators.items()}

    def put_back() -> None:
        for device in [device for device in generators if device not in states]:
            del generators[device]
        for device, state in states.items():
            generators[device].set_state(state)

    return put_back


def state_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """The optimizer's state tensors for a parameter."""
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, Tensor)]


def _tensors_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    return [parameter, *state_tensors(optimizer, parameter)]


def _changed_by_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Weights and state; also gradients, if they are unscaled or used as scratch memory."""
    changed = [tensor for p in parameters for tensor in _tensors_of(optimizer, p)]
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    if nesterov or hasattr(optimizer, "grad_scale"):
        changed += [p.grad for p in parameters if p.grad is not None]
    return changed


def _clones(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Copies on the device: fast, and there is room if the step itself has any."""
    tensors = _changed_by_step(optimizer, parameters)
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back() -> None:
        for tensor, copy in copies:
            tensor.copy_(copy)

    return put_back


def _copies_on_host(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> Callable[[], None]:
    tensors = _changed_by_step(optimizer, parameters)
    copies = HostCopies()
    copies.keep([tensors])
    copies.wait(tensors)

    def put_back() -> None:
        for tensor in tensors:
            copies.put_back(tensor)

    return put_back


def _counters(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Before a fused kernel, only step counters and new state are changed."""
    counters = [optimizer.state.get(parameter, {}).get("step") for parameter in parameters]
    counters = [counter for counter in counters if counter is not None]
    values = torch.stack(counters) if counters else None

    def put_back() -> None:
        if values is not None:
            foreach_copy_(counters, list(values.unbind()))

    return put_back
