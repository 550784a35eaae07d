"""Records a few numbers per step while a program runs normally, in bounded space.

Two kinds of hooks watch a program: before and after each step of any optimizer, and before each
call of a root, a module that is in no other module. Modules inside a root are not watched, so there
is no cost per layer, and compiled code is not affected.

A note is skipped if notes would cost more than half a percent of the time since the last one of its
kind; two kinds may alternate.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from oomph.explaining.meters import Meter
from oomph.rehearsal.storages import tensors_in
from oomph.techniques.partial_steps import is_partial
from oomph.torch_compat.compiler import COMPILED_CALL
from oomph.torch_compat.modules import CHILDREN, PARAMETERS

_Kind = TypeVar("_Kind")

#: A note is skipped unless this many times its own duration has passed since the last of its kind.
LEAST_PAUSE = 200
#: So many notes of a kind are always taken: short runs need them all.
ALWAYS = 64
#: Beyond this number, every other note is dropped.
MOST_NOTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Memory after a step, or before a call in evaluation."""

    step: int
    """Optimizer steps completed, or calls in this evaluation."""
    allocated: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a root was called with."""

    shape: tuple[int, ...] = ()
    """Shape of its largest tensor."""
    elements: int = 0
    """Elements of that tensor."""


class Notes(list[Note]):
    """Notes of one kind, taken so rarely that they cost almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0
        self._paid = 0.0
        self._last = 0.0

    def take(self, meter: Meter, step: int) -> None:
        """Record what the meter shows, unless it is too soon."""
        now = time.perf_counter()
        mean = self._paid / self._taken if self._taken else 0.0
        if self._taken >= ALWAYS and now - self._last < LEAST_PAUSE * mean:
            return
        if not meter.is_ready():
            return
        sample = meter.sample()
        self.append(Note(step=step, allocated=sample.allocated, peak=sample.peak))
        if len(self) > MOST_NOTES:
            del self[1:-1:2]
        self._last = time.perf_counter()
        self._paid += self._last - now
        self._taken += 1


class Logbook:
    """Follows a program's steps and keeps what explains them."""

    follows_whole_steps = True

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.steps = 0
        """Optimizer steps completed, by the optimizer with the most."""
        self.notes = Notes()
        """Notes after optimizer steps."""
        self.eval_notes = Notes()
        """Notes before the calls of the current or last evaluation."""
        self.call_notes = Notes()
        """Notes before the training calls since the last optimizer step."""
        self.most_calls = 0
        """Most training calls in a completed step."""
        self.evaluating = False
        """Whether the last call of a root was in evaluation."""
        self.trained = False
        """Whether a root was called in training."""
        self.in_step = False
        """Whether a root was called in training since the last optimizer step."""
        self.inputs = Inputs()
        self.largest_before = Inputs()
        """The largest inputs of training calls in completed steps."""
        self._steps_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._hooked: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._looked_for: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._eval_calls = self._calls = 0
        self._largest_in_step = Inputs()

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, the program is followed."""
        add_group, evaluate = torch.optim.Optimizer.add_param_group, nn.Module.eval

        def add_group_and_look(
            optimizer: torch.optim.Optimizer, param_group: dict[str, Any]
        ) -> None:
            add_group(optimizer, param_group)
            if len(optimizer.param_groups) == 1:
                self._look_for_roots()

        def look_and_evaluate(module: nn.Module) -> nn.Module:
            # New roots may exist already; searching takes long, so it is done once per module.
            if module not in self._hooked and module not in self._looked_for:
                self._looked_for.add(module)
                self._look_for_roots()
            return evaluate(module)

        hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        self._look_for_roots()
        try:
            # An optimizer is created when the model exists but has not run yet; without an
            # optimizer, a model is at least set to evaluation.
            with (
                mock.patch.object(torch.optim.Optimizer, "add_param_group", add_group_and_look),
                mock.patch.object(nn.Module, "eval", look_and_evaluate),
            ):
                yield
        finally:
            for hook in (*hooks, *self._hooked.values()):
                hook.remove()

    def is_first_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has not completed a step yet."""
        return optimizer not in self._steps_of

    # -- roots ------------------------------------------------------------------------------------

    def _look_for_roots(self) -> None:
        for root in find_roots(gc.get_objects()):
            # A module compiled in place would be recompiled because of a new hook.
            compiled = getattr(root, COMPILED_CALL, None) is not None
            if root not in self._hooked and not compiled and has_parameters(root):
                self._hooked[root] = root.register_forward_pre_hook(
                    self._before_call, with_kwargs=True
                )

    def _before_call(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._meter.is_ready()
        self.inputs = largest_input(args, kwargs)
        if root.training and torch.is_grad_enabled():
            self.trained, self.in_step, self.evaluating = True, True, False
            self._calls += 1
            self._largest_in_step = larger(self._largest_in_step, self.inputs)
            if self._calls > 1:
                self.call_notes.take(self._meter, self._calls)
            return
        if not self.evaluating:
            self.evaluating, self._eval_calls = True, 0
            self.eval_notes.clear()
        self._eval_calls += 1
        self.eval_notes.take(self._meter, self._eval_calls)

    # -- steps ------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_partial():
            return
        if not self.steps and self.is_first_step(optimizer):
            self._look_for_roots()  # the model's wrapper may have been created after the optimizer

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_partial():
            return
        made = self._steps_of.get(optimizer, 0) + 1
        self._steps_of[optimizer] = made
        self.in_step = False
        self.most_calls, self._calls = max(self.most_calls, self._calls), 0
        self.call_notes.clear()
        self.largest_before = larger(self.largest_before, self._largest_in_step)
        self._largest_in_step = Inputs()
        if made > self.steps:
            self.steps = made
            self.notes.take(self._meter, made)


def instances(kind: type[_Kind], objects: list[Any]) -> list[_Kind]:
    """The objects of a kind, among all objects."""
    # `type` rather than `isinstance`: a proxy object may run code for that. Each type is tested
    # once, since there may be a million objects.
    kinds = {one for one in set(map(type, objects)) if issubclass(one, kind)}
    return [one for one in objects if type(one) in kinds]


def find_roots(objects: list[Any]) -> list[nn.Module]:
    """The modules, among all objects, that are in no other module."""
    modules = instances(nn.Module, objects)
    inside = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inside]


def _children(module: nn.Module) -> list[nn.Module]:
    """A module's children; none if its construction is incomplete or failed."""
    parts: dict[str, nn.Module | None] = vars(module).get(CHILDREN, {})
    return [part for part in parts.values() if part is not None]


def has_parameters(module: nn.Module) -> bool:
    """Whether a module, or one inside it, has weights."""
    return PARAMETERS in vars(module) and next(module.parameters(), None) is not None


def larger(one: Inputs, other: Inputs) -> Inputs:
    """The inputs with more elements."""
    return other if other.elements > one.elements else one


def largest_input(args: Any, kwargs: Any) -> Inputs:
    """The largest tensor among the arguments of a call."""
    largest: Callable[[Tensor], int] = torch.Tensor.numel
    tensor = max((*tensors_in(args), *tensors_in(kwargs)), key=largest, default=None)
    if tensor is None:
        return Inputs()
    return Inputs(shape=tuple(tensor.shape), elements=tensor.numel())
