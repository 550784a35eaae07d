"""Tells the recorder what a script's memory is for, without owning its model or its loop.

Global hooks see every module, backward and optimizer. A module called while no other runs is a
root: its children are named by their path in it, its parameters become known, and a call of it that
trains begins a step. What lives from there until backward begins is an activation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

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

from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.storages import tensors_in
from oomph.rehearsal.timeline import Category

#: In the order they begin; a script that evaluates goes to "eval" and back.
SCRIPT_PHASES = ("build", "eval", "first step", "step")


class EnoughSteps(BaseException):
    """Stops the script: like a Ctrl-C, but one that nobody handles."""


class Observer:
    """Follows a script through its phases and stops it after `steps` optimizer steps."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self._recorder = recorder
        self._steps = steps
        #: By optimizer: a script may have several, and each is to make its steps.
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
        #: Steps of the optimizer that made most.
        self.steps_made = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, the script is followed."""
        backward = torch.autograd.backward

        def followed_backward(*args: Any, **kwargs: Any) -> None:
            self._before_backward()
            try:
                backward(*args, **kwargs)
            finally:
                self._after_backward()

        hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        try:
            with mock.patch.object(torch.autograd, "backward", followed_backward):
                self._enter_phase("build")
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._leave_phase()

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
        mark_model(getattr(root, "_orig_mod", root), self._recorder)
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
        """The first model's modules go by their path in it; a later one's after its class."""
        prefix = f"{type(root).__name__}." if self._roots else ""
        if next(root.parameters(), None) is not None:
            self._roots.add(root)
        root_name = type(getattr(root, "_orig_mod", root)).__name__
        for path, module in root.named_modules():
            path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
            self._paths[module] = f"{prefix}{path}".rstrip(".") or root_name

    def _mark_inputs(self, args: Any) -> None:
        """What a model is given is an input, though it was made on the GPU."""
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

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mark_optimizer_state(optimizer, self._recorder)
        self._steps_made[optimizer] = self._steps_made.get(optimizer, 0) + 1
        self.steps_made = max(self.steps_made, self._steps_made[optimizer])
        if min(self._steps_made.values()) >= self._steps:
            self._leave_phase()
            raise EnoughSteps


def mark_gradients(parameters: Iterator[Tensor] | list[Tensor], recorder: Recorder) -> None:
    """The gradients of these parameters are gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            recorder.categorise([parameter.grad], Category.GRADIENT, belongs_to=parameter)


def mark_optimizer_state(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Every tensor the optimizer keeps per parameter is optimizer state."""
    for parameter, state in optimizer.state.items():
        recorder.categorise(list(tensors_in(state)), Category.OPTIMIZER, belongs_to=parameter)


def mark_model(model: nn.Module, recorder: Recorder) -> None:
    """Parameters and buffers, each filed under the module that owns it."""
    for path, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        recorder.categorise(parameters, Category.PARAMETER, module=path)
        recorder.categorise(list(module.buffers(recurse=False)), Category.BUFFER, module=path)
