"""Find out whether an optimizer's step is PyTorch's own, or code was added to it.

Some techniques divide one step into many, each of a few parameters, or let a twin make it. Code
that a user added to the step would then run many times, each time with a part of the parameters, or
not at all. So these techniques require an optimizer whose step is that of one of PyTorch's classes
and nothing else: its class does not override `step`, `optimizer.step` was not replaced, and it has
no hooks. All other optimizers are stepped as a whole. The wrapper that a scheduler puts around
`optimizer.step` is fine: it only notes the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from oomph.errors import BadInput
from oomph.techniques.partial_steps import is_follower
from oomph.torch_compat.optimizers import (
    INIT_GROUP,
    WRAPPERS,
    post_hooks_of,
    post_hooks_of_all,
    pre_hooks_of,
    pre_hooks_of_all,
)

#: Classes that step each parameter without looking at any other parameter.
PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

#: The methods of a step: a class that overrides one of them steps in another way.
_METHODS = ("step", INIT_GROUP)

#: The folder of PyTorch's optimizers.
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)

_Step = TypeVar("_Step", bound=Callable[..., Any])
#: Steps by which techniques replace an optimizer's own; see `steps_in_its_place`.
_KNOWN: set[CodeType] = set()


class Masters(Protocol):
    """Replaces the model's parameters in the optimizer by other tensors; see `MasterWeights`.

    It moves the gradient of an owned tensor into place before other hooks run, and its own hooks on
    the optimizer's step look only at the parameters in the optimizer's groups.
    """

    def leaf_of(self, owned: Tensor) -> Tensor:
        """The model's parameter whose backward produces the gradient of this tensor."""


def steps_in_its_place(step: _Step) -> _Step:
    """Mark a technique's step that steps the optimizer's parameters as the replaced step would."""
    _KNOWN.add(step.__code__)
    return step


def runs_step_of(
    optimizer: torch.optim.Optimizer, classes: Iterable[type[torch.optim.Optimizer]]
) -> bool:
    """Whether the optimizer is of one of these classes, or of a subclass with the same step."""
    return any(
        isinstance(optimizer, cls)
        and all(_same_method(type(optimizer), cls, name) for name in _METHODS)
        for cls in classes
    )


def foreign_step_hooks(optimizer: torch.optim.Optimizer, masters: Masters | None) -> list[Any]:
    """Hooks of other code that run before or after each step of the optimizer."""
    hooks: Iterable[Any] = (
        *pre_hooks_of_all.values(),
        *post_hooks_of_all.values(),
        *pre_hooks_of(optimizer).values(),
        *post_hooks_of(optimizer).values(),
    )
    foreign = [hook for hook in hooks if not is_follower(hook)]
    return [h for h in foreign if masters is None or getattr(h, "__self__", None) is not masters]


def added_to_step(optimizer: torch.optim.Optimizer, masters: Masters | None = None) -> str:
    """Code that was added to the step of the optimizer's class, as text; empty without any."""
    if replaced := replaced_step(optimizer):
        return replaced
    if hooks := foreign_step_hooks(optimizer, masters):
        return f"the optimizer's step has hooks, as {_name(hooks[0])}"
    return ""


def sparse_gradient(model: nn.Module) -> str:
    """Names a weight whose gradient is sparse, as text; empty without one."""
    for path, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and module.weight.requires_grad:
            return f"the gradient of {path or 'the model'}.weight is sparse"
    return ""


def why_not_divided(optimizer: torch.optim.Optimizer, masters: Masters | None = None) -> str:
    """Why a step must include all parameters at once, as text; empty where it need not."""
    if not runs_step_of(optimizer, PER_PARAMETER):
        return f"nobody can tell whether {type(optimizer).__name__} steps each parameter by itself"
    return added_to_step(optimizer, masters)


def check_per_parameter(
    optimizer: torch.optim.Optimizer, technique: str, masters: Masters | None = None
) -> None:
    """Refuse an optimizer that may not step each parameter by itself, or has an extended step."""
    if not runs_step_of(optimizer, PER_PARAMETER):
        known = ", ".join(cls.__name__ for cls in PER_PARAMETER)
        raise BadInput(
            f"{technique} needs an optimizer that steps each parameter by itself, which nobody "
            f"can tell of {type(optimizer).__name__}: use one of torch.optim's {known}"
        )
    if added := added_to_step(optimizer, masters):
        raise BadInput(
            f"{added}, which {technique} would not run once for each step: take it away, or plan "
            "again for the optimizer as it is now"
        )


def replaced_step(optimizer: torch.optim.Optimizer) -> str:
    """What `optimizer.step` was replaced by, as text; empty where it was not replaced."""
    step = vars(optimizer).get("step")
    if step is None:
        return ""
    found = getattr(step, "__func__", step)
    while _file_of(found) == lr_scheduler.__file__ and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    known = isinstance(found, FunctionType) and found.__code__ in _KNOWN
    is_own = known or found is inspect.getattr_static(type(optimizer), "step")
    return "" if is_own else f"somebody replaced optimizer.step by {_name(step)}"


def _same_method(own: type, known: type, name: str) -> bool:
    """Whether a class has the same method as a PyTorch class, and that is PyTorch's own code."""
    method = _unwrapped(getattr(own, name, None))
    is_pytorchs = method is None or _file_of(method).startswith(_OPTIMIZERS)
    return method is _unwrapped(getattr(known, name, None)) and is_pytorchs


def _unwrapped(function: Any) -> Any:
    """A function without the wrappers of PyTorch's optimizers; wrappers of other code stay."""
    while _file_of(function) in WRAPPERS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _file_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return str(code.co_filename) if code is not None else ""


def _name(called: Any) -> str:
    function = getattr(called, "__func__", called)
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)
