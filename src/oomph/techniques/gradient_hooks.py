"""Hooks on gradients: a step whose batch is split calls those of parameters once, with the sum.

A hook on a parameter's gradient, such as one that clamps it, must see the gradient of the whole
batch. While parts of a batch run, such hooks are withheld. Then one more backward, over the
parameters with hooks, delivers the sum of each one's gradients, and autograd calls the hooks as
usual.

Hooks on the gradients of modules would see the gradients of a part, slices of the whole batch's.
Whether slices suffice cannot be determined from the hook, so such hooks keep a batch whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from oomph.errors import BadInput
from oomph.techniques.python_state import PythonState
from oomph.torch_compat import modules, tensors

_REGISTERS = (tensors.BACKWARD_HOOKS, tensors.AFTER_ACCUMULATION)

_ADVICE = "take the hook away, or plan again: plans for a model that has it do without"


class HostGradients(Protocol):
    """Gradients that may be offloaded; see `HostOptimizer`."""

    def has_gradient(self, leaf: Tensor) -> bool:
        """Whether this parameter has a gradient."""

    def take_gradient(self, leaf: Tensor) -> Tensor:
        """Return the sum so far and give up ownership of it."""

    def holds_weight(self, leaf: Tensor) -> bool:
        """Whether the parameter itself is offloaded."""


class Masters(Protocol):
    """Maps parameters to their masters, which hold the gradients; see `MasterWeights`."""

    def master_of(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer steps in place of a parameter."""


def hooked_module(model: nn.Module) -> str:
    """Text that names a module with a backward hook; empty if there is none."""
    if any(getattr(every_module, name) for name in modules.BACKWARD_HOOKS_OF_ALL):
        return "every module has a backward hook"
    for path, one in model.named_modules():
        if any(getattr(one, name, None) for name in modules.BACKWARD_HOOKS):
            return f"{path or type(one).__name__} has a backward hook"
    return ""


def hooked_parameter(model: nn.Module) -> str:
    """Text that names a parameter with a user's hook on its gradient; empty if there is none."""
    for path, parameter in model.named_parameters():
        if _hooks_of(parameter):
            return f"the gradient of {path} has a hook"
    return ""


def why_whole_for_hooks(model: nn.Module, *, in_parts: bool = False) -> str:
    """Why hooks on gradients forbid splitting the batch; empty if they do not.

    `in_parts` says that the job itself runs its batch in parts and calls hooks for each.
    """
    hooked = hooked_module(model) or (hooked_parameter(model) if in_parts else "")
    return f"{hooked}, which would be called for other parts of the batch" if hooked else ""


def hooks_of_step(
    model: nn.Module,
    *,
    parts: int,
    as_the_job: bool,
    in_parts: bool,
    host: HostGradients | None = None,
    masters: Masters | None = None,
) -> GradientHooks:
    """The gradient hooks of a step in `parts` parts; raises if it could not call them correctly.

    `as_the_job` says that the job itself runs the batch in exactly these parts; `in_parts`, that it
    runs the batch in any parts.
    """
    put_own_hooks_last(model.parameters())
    if not as_the_job and (parts > 1 or in_parts):
        why = why_whole_for_hooks(model, in_parts=in_parts)
        if why:
            raise BadInput(f"the batch must not be split as the plan has it: {why}; {_ADVICE}")
    hooks = GradientHooks(model, once=parts > 1 and not as_the_job, host=host, masters=masters)
    if parts > 1:
        hooks.check()
    return hooks


class GradientHooks:
    """A user's gradient hooks in one step; with `once`, they are not called for each part."""

    def __init__(
        self,
        model: nn.Module,
        *,
        once: bool,
        host: HostGradients | None = None,
        masters: Masters | None = None,
    ) -> None:
        self._parameters = [p for p in model.parameters() if _hooks_of(p)]
        self._once, self._host, self._masters = once, host, masters
        #: Parameters whose hooks were withheld, in the order of the last backward.
        self._came: dict[Tensor, None] = {}

    @property
    def are_there(self) -> bool:
        """Whether there are any hooks."""
        return bool(self._parameters)

    @property
    def are_called_once(self) -> bool:
        """Whether the hooks are called once, with the sum of all parts."""
        return self._once and self.are_there

    def check(self) -> None:
        """Refuse a step in parts whose hooks would see something other than they should."""
        for parameter in self._parameters:
            register = getattr(parameter, tensors.AFTER_ACCUMULATION, None) or {}
            after = [hook for hook in register.values() if _is_users(hook)]
            if not self._once and after and (self._host is not None or self._masters is not None):
                raise BadInput(
                    "a hook is called when gradients were added up, and this plan has the sums of"
                    f" parts elsewhere; {_ADVICE}"
                )
            if self._once and self._host is not None:
                self._check_weights(self._host, parameter, [parameter] if after else [])

    def _check_weights(
        self, host: HostGradients, parameter: Tensor, given: Iterable[Tensor]
    ) -> None:
        """Refuse hooks that may read weights that are offloaded once all parts have run."""
        known = PythonState([("hook", hook) for hook in _hooks_of(parameter)], inside=False)
        if any(map(host.holds_weight, (*given, *(one for _, one in known.tensors)))):
            raise BadInput(
                f"a hook on the gradient of a parameter {list(parameter.shape)} may read weights,"
                " which wait off the GPU when all parts of a batch were run: take the hook away,"
                " or plan again with `whole_batch=True`"
            )

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """While active, hooks that are to be called once are not called."""
        withheld = [
            (parameter, register, key, hook)
            for parameter in self._parameters
            for register in _registers(parameter)
            for key, hook in register.items()
            if self._once and _is_users(hook)
        ]
        try:
            for parameter, register, key, _ in withheld:
                register[key] = self._noting(parameter)
            yield
        finally:
            for _, register, key, hook in withheld:
                if key in register:  # not removed in the meantime
                    register[key] = hook

    def call(self) -> None:
        """Have autograd accumulate each gradient's sum once more, which calls its hooks.

        They are called in backward's order, so hooks that draw noise draw it in the same order.
        """
        order = {parameter: at for at, parameter in enumerate(self._came)}
        there = [parameter for parameter in self._parameters if self._is_there(parameter)]
        # Autograd runs the nodes that were created last first.
        there.sort(key=lambda parameter: order.get(parameter, len(order)), reverse=True)
        sums = [_Sum.apply(self._take, parameter) for parameter in there]
        if sums:
            torch.autograd.backward(sums)

    def _noting(self, parameter: Tensor) -> Callable[..., None]:
        """The placeholder for a withheld hook; it records the order of parameters."""

        def note(*_: Any) -> None:
            self._came.pop(parameter, None)
            self._came[parameter] = None

        return note

    def _is_there(self, parameter: Tensor) -> bool:
        if self._host is not None:
            return self._host.has_gradient(parameter)
        return self._owned(parameter).grad is not None

    def _take(self, parameter: Tensor) -> Tensor:
        """Take the sum of a parameter's gradients; no other reference to it remains."""
        if self._host is not None:
            return self._host.take_gradient(parameter).to(parameter.dtype)
        owned = self._owned(parameter)
        gradient, owned.grad = owned.grad, None
        assert gradient is not None
        return gradient.to(parameter.dtype)

    def _owned(self, parameter: Tensor) -> Tensor:
        return self._masters.master_of(parameter) if self._masters is not None else parameter


class _Sum(torch.autograd.Function):
    """A graph root whose backward takes a parameter's gradient and passes it on."""

    @staticmethod
    def forward(ctx: Any, take: Callable[[Tensor], Tensor], parameter: Tensor) -> Tensor:
        ctx.take, ctx.parameter = take, parameter
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, ctx.take(ctx.parameter)


def put_own_hooks_last(parameters: Iterable[Tensor]) -> None:
    """Have a user's hooks, whenever they were added, called before this package's.

    This package's hooks remove the gradient: they step with it or offload it.
    """
    for parameter in parameters:
        register = getattr(parameter, tensors.AFTER_ACCUMULATION, None)
        if not register:
            continue
        users = [_is_users(hook) for hook in register.values()]
        if users != sorted(users, reverse=True):
            hooks = sorted(register.items(), key=lambda entry: not _is_users(entry[1]))
            register.clear()
            register.update(hooks)


def _hooks_of(parameter: Tensor) -> list[Any]:
    found = (hook for register in _registers(parameter) for hook in register.values())
    return [hook for hook in found if _is_users(hook)]


def _registers(parameter: Tensor) -> list[Any]:
    found = (getattr(parameter, name, None) for name in _REGISTERS)
    return [register for register in found if register]


def _is_users(hook: Any) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith("oomph.")
