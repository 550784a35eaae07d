"""Tells the recorder what a script's memory is for, without control over its model or its loop.

Global hooks see every module, backward and optimizer. A module called while no other module runs is
a root: its submodules are named by their path in it, its parameters become known, and a training
call of it begins a step. Memory allocated from then on that survives until backward is an
activation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from oomph.process.rehearsal_threads import rehearses_here, replaced_here
from oomph.rehearsal.recorder import Recorder, Side
from oomph.rehearsal.storages import tensors_in
from oomph.rehearsal.timeline import Category
from oomph.techniques.watched_tensors import own_work
from oomph.torch_compat.compiler import ORIGINAL
from oomph.torch_compat.modules import own_buffers, own_parameters
from oomph.units import format_bytes

#: Phases in the order they begin; a script that evaluates switches to "eval" and back.
SCRIPT_PHASES = ("build", "eval", "first step", "step")


#: Bytes by which memory may grow per step without a note: room for scalars that are logged.
LITTLE = 1 << 20


class EnoughSteps(BaseException):
    """Stops the script: like a Ctrl-C, but of a type that no script catches."""


class Observer:
    """Follows a script through its phases and stops it after `steps` optimizer steps."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self._recorder = recorder
        self._steps = steps
        #: Steps per optimizer: a script may have several, and each has to make its steps.
        self._steps_made: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._depth = 0
        self._backwards = 0
        self._phase_name = ""
        self._phase: AbstractContextManager[None] | None = None
        self._forward: AbstractContextManager[None] | None = None
        #: By parameter id: the side it was on when a model or optimizer last used it, and its
        #: bytes.
        self._used: dict[int, tuple[Side, int]] = {}
        #: Bytes alive on the GPU after each step of the optimizer that has made the most steps.
        self._alive_after: list[int] = []
        #: Steps of the optimizer that has made the most steps.
        self.steps_made = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the script while active."""
        backward = torch.autograd.backward

        def followed_backward(*args: Any, **kwargs: Any) -> None:
            self._before_backward()
            try:
                backward(*args, **kwargs)
            finally:
                self._after_backward()

        hooks = (
            register_module_forward_pre_hook(_here(self._enter_module)),
            register_module_forward_hook(_here(self._leave_module), always_call=True),
            register_optimizer_step_pre_hook(_here(self._before_step)),
            register_optimizer_step_post_hook(_here(self._after_step)),
        )
        try:
            with replaced_here(torch.autograd, "backward", followed_backward):
                self._enter_phase("build")
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._leave_phase()

    def warnings(self) -> list[str]:
        """Reasons why what the script did cannot have been a step on the GPU, as sentences."""
        if not self._recorder.timeline.blocks:
            return [
                "The script took no memory on the GPU: what it runs stays on the host, or is not"
                " in the script's own process. What is predicted is the GPU without it."
            ]
        if self._bytes_on(Side.HOST) and not self._bytes_on(Side.GPU):
            return [
                "No parameter that the script used was on the GPU: its models stayed on the host"
                f" ({format_bytes(self._bytes_on(Side.HOST))} of parameters), and what is predicted"
                " is the GPU without them. Move them there as you would for the real run."
            ]
        return []

    def notes(self) -> list[str]:
        """Remarks on where parameters were, and on memory that grows from step to step."""
        return [*self._note_on_host(), *self._note_on_growth()]

    def _note_on_host(self) -> Iterator[str]:
        on_host = self._bytes_on(Side.HOST)
        if on_host and self._bytes_on(Side.GPU):
            yield f"{format_bytes(on_host)} of the parameters that were used stayed on the host"

    def _note_on_growth(self) -> Iterator[str]:
        """Lists that keep tensors, and optimizers that keep a history, need more each step."""
        before, after = [0, *self._alive_after][-2:] if len(self._alive_after) > 1 else (0, 0)
        if after - before > max(LITTLE, before // 100):
            yield (
                f"{format_bytes(after - before)} more were alive after the last optimizer step than"
                " after the one before it: if that goes on, a longer run needs more than predicted"
            )

    def _bytes_on(self, side: Side) -> int:
        return sum(nbytes for where, nbytes in self._used.values() if where is side)

    # -- phases -----------------------------------------------------------------------------------

    def _enter_phase(self, name: str) -> None:
        if name == self._phase_name:
            return
        self._leave_phase()
        self._phase_name, self._phase = name, self._recorder.phase(name)
        self._phase.__enter__()

    def _leave_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase_name, self._phase = "", None

    def _enter_step(self) -> None:
        self._enter_phase("step" if self.steps_made else "first step")

    # -- modules ----------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0 and self._backwards == 0:
            self._enter_root(module, args)
        self._depth += 1
        self._recorder.enter_module(self._paths.get(module, type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        self._depth -= 1
        self._recorder.leave_module()

    def _enter_root(self, root: nn.Module, args: Any) -> None:
        if root not in self._paths:
            self._name_modules(root)
        mark_model(getattr(root, ORIGINAL, root), self._recorder)
        self._note_use(root.parameters())
        if self._forward is None:
            self._mark_inputs(args)
        if not (root.training and torch.is_grad_enabled()):
            self._enter_phase("eval")
        else:
            self._enter_step()
            if self._forward is None:
                self._forward = self._recorder.forward()
                self._forward.__enter__()

    def _name_modules(self, root: nn.Module) -> None:
        """Name the first model's modules by their path; prefix a later model's with its class."""
        prefix = f"{type(root).__name__}." if self._roots else ""
        if next(root.parameters(), None) is not None:
            self._roots.add(root)
        root_name = type(getattr(root, ORIGINAL, root)).__name__
        for path, module in root.named_modules():
            path = path.replace(f"{ORIGINAL}.", "").removesuffix(ORIGINAL)
            self._paths[module] = f"{prefix}{path}".rstrip(".") or root_name

    def _mark_inputs(self, args: Any) -> None:
        """File a model's arguments as inputs, even if they were made on the GPU."""
        for block in map(self._recorder.block_of, tensors_in(args)):
            if block is not None and block.category is Category.TEMPORARY:
                block.category = Category.INPUT

    # -- backward and step ------------------------------------------------------------------------

    def _before_backward(self) -> None:
        self._backwards += 1
        self._enter_step()
        if self._forward is not None:
            self._forward.__exit__(None, None, None)
            self._forward = None

    def _after_backward(self) -> None:
        self._backwards -= 1
        for root in self._roots:
            mark_gradients(root.parameters(), self._recorder)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._recorder.categorise(parameters, Category.PARAMETER)
        mark_gradients(parameters, self._recorder)
        self._note_use(parameters)

    def _note_use(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            self._used[id(parameter)] = self._recorder.side_of(parameter), parameter.nbytes

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            _fill_history(optimizer)
        mark_optimizer_state(optimizer, self._recorder)
        self._steps_made[optimizer] = self._steps_made.get(optimizer, 0) + 1
        if self._steps_made[optimizer] > self.steps_made:
            self.steps_made = self._steps_made[optimizer]
            self._alive_after.append(self._recorder.allocated)
        if min(self._steps_made.values()) >= self._steps:
            self._leave_phase()
            raise EnoughSteps


def _here(hook: Callable[..., None]) -> Callable[..., None]:
    """Limit a global hook, which PyTorch calls in all threads, to those that rehearse."""

    def hooked(*args: Any) -> None:
        if rehearses_here():
            hook(*args)

    return hooked


def mark_gradients(parameters: Iterator[Tensor] | list[Tensor], recorder: Recorder) -> None:
    """File these parameters' gradients as gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            recorder.categorise([parameter.grad], Category.GRADIENT, belongs_to=parameter)


def _fill_history(optimizer: torch.optim.LBFGS) -> None:
    """Fill in the history that exists after many steps, since only a few are rehearsed."""
    (group,) = optimizer.param_groups
    state = optimizer.state[group["params"][0]]
    direction = state.get("d")
    if direction is None:
        return
    for name, like in (
        ("old_dirs", direction),
        ("old_stps", direction),
        ("ro", direction.new_empty(())),
    ):
        history = state[name]
        history += [torch.empty_like(like) for _ in range(group["history_size"] - len(history))]


def mark_optimizer_state(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """File every tensor that the optimizer keeps as optimizer state."""
    with own_work():  # looking at the state would otherwise complete a step
        for key, state in optimizer.state.items():
            # A custom optimizer may also use strings as keys, for instance for a count of all its
            # steps.
            parameter = key if isinstance(key, Tensor) else None
            recorder.categorise(list(tensors_in(state)), Category.OPTIMIZER, belongs_to=parameter)


def mark_model(model: nn.Module, recorder: Recorder) -> None:
    """File parameters and buffers under the modules that own them."""
    with own_work():
        for path, module in model.named_modules():
            parameters = own_parameters(module)
            recorder.categorise(parameters, Category.PARAMETER, module=path)
            recorder.categorise(own_buffers(module), Category.BUFFER, module=path)
