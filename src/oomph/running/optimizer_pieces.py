"""An optimizer step that runs out of memory has either not begun or comes to its end.

A fused step is one kernel that takes no memory, and all that comes before it is that missing state
is made and steps are counted. Any other step is made a few parameters at a time, the largest first,
with a copy of what the few have: where memory runs out among them they are put back and tried again
one by one. Gradients are dropped as they are used, and what comes later is smaller, so after the
first piece there is room for all others. If the first one does not fit, nothing was changed.

That needs an optimizer whose step of one parameter looks at no other parameter. Others step as they
are: whether one that failed had changed anything is told by the tensors' version counters.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.running.host_copies import HostCopies
from oomph.running.out_of_memory import free_what_is_left, ran_out_of_memory
from oomph.techniques.low_bit_state import has_low_bit_state, rounding_generators
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.optimizer_in_backward import (
    PER_PARAMETER,
    foreign_step_hooks,
    runs_step_of,
    shown_only,
)

#: Bytes of weights and state that are copied at a time, where no parameter alone has more.
PIECE = 64 << 20

#: Keeps what a step of some parameters changes, and gives what puts it back.
_Keep = Callable[[torch.optim.Optimizer, Sequence[Tensor]], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Parameters of one group that are stepped together."""

    group: dict[str, Any]
    parameters: tuple[Tensor, ...]
    keep: _Keep
    """What they may have when it fails that they had not before."""


class OptimizerPieces:
    """Steps an optimizer as a whole or not at all."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: MasterWeights | None = None
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        #: Whether the last step was broken off when some parameters had been stepped: weights and
        #: state are then partly those of the next step.
        self.half_done = False

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """One step; gradients may be gone afterwards."""
        if scaler is None:
            self._step()
            return
        with self._stepping_in_its_place():
            scaler.step(self._optimizer)
        self.half_done = True
        _insist(scaler.update)
        self.half_done = False

    def _step(self) -> None:
        if not self._can_be_divided():
            self._step_whole()
            return
        pieces = self._kernels() if self._is_fused() else self._pieces()
        for piece in pieces:
            self._step_piece(piece)
            self.half_done = True
        self.half_done = False

    @contextlib.contextmanager
    def _stepping_in_its_place(self) -> Iterator[None]:
        """While active, whoever steps the optimizer makes a step of this kind."""
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
        """Step as it is; tensors' versions tell whether a step that failed had begun."""
        before = [
            (tensor, tensor._version)
            for _, parameter in self._stepped()
            for tensor in _tensors_of(self._optimizer, parameter)
        ]
        states = remember_state(self._optimizer, [parameter for _, parameter in self._stepped()])
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        try:
            self._optimizer.step()
        except BaseException:
            # Fused kernels do not count versions: nobody can tell.
            self.half_done = fused or any(tensor._version != was for tensor, was in before)
            if not self.half_done:
                states()
            raise

    # -- pieces -----------------------------------------------------------------------------------

    def _is_fused(self) -> bool:
        """Whether nothing takes memory once the first weight is changed."""
        optimizer = self._optimizer
        plain = not has_low_bit_state(optimizer) and not hasattr(optimizer, "grad_scale")
        return plain and all(group.get("fused") for group in optimizer.param_groups)

    def _kernels(self) -> list[_Piece]:
        """All parameters that have a gradient, by the fused kernel that steps them."""
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
        per_parameter = runs_step_of(self._optimizer, PER_PARAMETER)
        return per_parameter and not foreign_step_hooks(self._optimizer, self._masters)

    def _pieces(self) -> list[_Piece]:
        """All parameters that have a gradient, the largest first."""
        pieces: list[_Piece] = []
        room = 0
        for group, parameter in sorted(self._stepped(), key=lambda at: -at[1].nbytes):
            size = sum(tensor.nbytes for tensor in _tensors_of(self._optimizer, parameter))
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
            # Alone, and with its copy elsewhere, it takes the least there is.
            piece = dataclasses.replace(piece, keep=_copies_on_host)
        failure = self._try(piece)
        if failure is not None:
            raise torch.OutOfMemoryError(failure)

    def _try(self, piece: _Piece) -> str | None:
        """Step a piece; where memory runs out, put it back and return what was said."""
        try:
            kept = _Kept(self._optimizer, piece)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return str(error)
        try:
            with shown_only(self._optimizer, piece.group, piece.parameters):
                self._optimizer.step()
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
    """Do what belongs to a step that is made already: once more, should memory run out."""
    try:
        work()
        return
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
    work()


class _Kept:
    """What some parameters and their state are before a step."""

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
    """What makes the optimizer hold the same state tensors again; not their values."""
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
    """What puts the random bits of an 8-bit optimizer back where they are."""
    generators = rounding_generators(optimizer)
    states = {device: one.get_state() for device, one in generators.items()}

    def put_back() -> None:
        for device in [device for device in generators if device not in states]:
            del generators[device]
        for device, state in states.items():
            generators[device].set_state(state)

    return put_back


def state_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """What the optimizer keeps of a parameter."""
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, Tensor)]


def _tensors_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    return [parameter, *state_tensors(optimizer, parameter)]


def _changed_by_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Weights and state; gradients, too, where they are unscaled or serve as scratch memory."""
    changed = [tensor for p in parameters for tensor in _tensors_of(optimizer, p)]
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    if nesterov or hasattr(optimizer, "grad_scale"):
        changed += [p.grad for p in parameters if p.grad is not None]
    return changed


def _clones(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Copies on the device: quick, and there is room where the step itself has any."""
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
    """All that is changed before a fused kernel is how many steps there were, and new state."""
    counters = [optimizer.state.get(parameter, {}).get("step") for parameter in parameters]
    counters = [counter for counter in counters if counter is not None]
    values = torch.stack(counters) if counters else None

    def put_back() -> None:
        if values is not None:
            torch._foreach_copy_(counters, list(values.unbind()))

    return put_back
