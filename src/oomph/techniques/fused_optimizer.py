"""Let the optimizer step in one fused kernel, which needs no copies of the parameters (exact).

PyTorch's default on a GPU works on lists of all parameters at once and keeps a list of intermediate
results as large as the parameters. A fused kernel keeps none and is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, Target, register
from oomph.techniques.optimizer_steps import runs_step_of, sparse_gradient
from oomph.techniques.technique import (
    ApplyContext,
    Inspection,
    Technique,
    Tried,
    Undo,
)
from oomph.torch_compat.optimizers import CHECKS_FUSED, UNSCALES, load_hooks_of, scalar_dtype

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

#: What an optimizer made with `fused=True` is marked with: a GradScaler hands such a step its scale
#: instead of unscaling, and the next step checks that the kernel takes the parameters.
_MARKS = (UNSCALES, CHECKS_FUSED)

_FLAGS = {"fused": True, "foreach": False}

#: The optimizers whose step is fused by a plan now.
_fused_here: WeakSet[torch.optim.Optimizer] = WeakSet()

#: Types of weights most of whose elements PyTorch's fused SGD leaves as they are on the CPU.
_NOT_STEPPED_BY_SGD = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class FusedOptimizerSettings(Settings):
    """How the optimizer steps."""

    enabled: bool = False
    """Whether it steps in one fused kernel."""


@register
class FusedOptimizer(Technique[FusedOptimizerSettings]):
    """The optimizer steps in one fused kernel."""

    name = "fused_optimizer"
    title = "fused optimizer"
    settings = FusedOptimizerSettings
    changes = Target.OPTIMIZER
    tried = Tried.ALWAYS
    runs_in_foreign_loops = True

    def fidelity(self, settings: FusedOptimizerSettings, precision: str) -> Fidelity:
        return Fidelity.EXACT

    def inspect(self, job: Job) -> Inspection:
        return _Fusible(job)

    def apply(self, settings: FusedOptimizerSettings, context: ApplyContext) -> Undo:
        if sparse := sparse_gradient(context.model):
            raise BadInput(
                f"{sparse}, which no fused kernel takes: use sparse=False, or plan again"
            )
        return fuse_optimizer(context.optimizer, steps_on=context.device_type)

    def training_arguments(
        self, settings: FusedOptimizerSettings, choices: Choices, now: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {"optim": "adamw_torch_fused"} if now["optim"] == "adamw_torch" else {}


class _Fusible(Inspection):
    """Whether the optimizer has a fused step that the job does not use yet."""

    def __init__(self, job: Job) -> None:
        own = job.optimizer
        # Copies of the user's weights have no gaps.
        self._why_not = gap_in_memory(own) if isinstance(own, torch.optim.Optimizer) else ""

    @property
    def why_not(self) -> str:
        return self._why_not

    def built(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._why_not = self._why_not or sparse_gradient(model) or why_not_fused(optimizer)
        if all(group.get("fused") for group in optimizer.param_groups):
            self._why_not = "its steps are fused already"


def is_fused_here(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a plan fused the optimizer's step, which the user did not."""
    return optimizer in _fused_here


def steps_rightly_on_cpu(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether the CPU's fused kernel makes the step of a parameter that it should make."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return not (is_sgd and parameter.dtype in _NOT_STEPPED_BY_SGD)


def gap_in_memory(optimizer: torch.optim.Optimizer) -> str:
    """A parameter whose numbers do not lie one behind the other, in words; empty without one.

    A fused kernel goes over memory as if there were no gaps, and would step what is in them.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
                return f"a parameter {list(parameter.shape)} has gaps in its memory"
    return ""


def fuse_optimizer(optimizer: torch.optim.Optimizer, *, steps_on: str = "") -> Undo:
    """Step all groups with fused kernels from now on; the state so far is kept."""
    why = why_not_fused(optimizer, steps_on=steps_on)
    if why:
        raise BadInput(f"this optimizer has no fused step: {why}; leave it as it is")
    flags_before = [{flag: group[flag] for flag in _FLAGS} for group in optimizer.param_groups]
    defaults_before = {flag: optimizer.defaults[flag] for flag in _FLAGS}
    marks_before = {mark: vars(optimizer)[mark] for mark in _MARKS if mark in vars(optimizer)}
    _fuse(optimizer)
    _fused_here.add(optimizer)
    begun = _BeforeSteps(optimizer)
    # A loaded state brings the flags it was saved with.
    handle = optimizer.register_load_state_dict_post_hook(_fuse)

    def flags_of(at: int) -> dict[str, Any]:
        return flags_before[at] if at < len(flags_before) else defaults_before

    def show_flags_before(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What is saved is the user's: it is loaded where there may be no plan."""
        groups = state_dict["param_groups"]
        return {
            **state_dict,
            "param_groups": [{**group, **flags_of(at)} for at, group in enumerate(groups)],
        }

    shown = optimizer.register_state_dict_post_hook(show_flags_before)

    def undo() -> None:
        if handle.id not in load_hooks_of(optimizer):
            return
        _fused_here.discard(optimizer)
        handle.remove()
        shown.remove()
        begun.remove()
        optimizer.defaults.update(defaults_before)
        for mark in _MARKS:
            vars(optimizer).pop(mark, None)
        vars(optimizer).update(marks_before)
        for at, group in enumerate(optimizer.param_groups):
            group.update(flags_of(at))
        _place_counters(optimizer)

    return undo


class _BeforeSteps:
    """Has a fused kernel find what it needs that other steps do without.

    It goes over a weight, its gradient and its state as they lie in memory: all lie as the weight
    does, which may lie in another order since its state was made, as where a model was given
    another memory format. The kernel of SGD takes the first steps of all its tensors or of none:
    parameters that get their first gradient after others get the momentum of a first step.
    """

    #: It runs before every part of a step, which changes nothing where there is nothing to do.
    follows_whole_steps = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Leave the optimizer alone from now on."""
        self._handle.remove()

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if not group["fused"]:
                continue
            stepped = [one for one in group["params"] if one.grad is not None]
            for one in stepped:
                _lay_as_the_weight(one, optimizer.state.get(one, {}))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                _begin_late(optimizer, group, stepped)


def _lay_as_the_weight(parameter: Tensor, state: dict[str, Any]) -> None:
    """Have a weight's gradient and state lie in memory in the order that it does."""
    for name, value in state.items():
        if isinstance(value, Tensor) and not _lies_as(value, parameter):
            state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    if parameter.grad is not None and not _lies_as(parameter.grad, parameter):
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def _lies_as(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a kernel that goes over the memory of both meets the same elements together."""
    if tensor.shape != parameter.shape or tensor.layout is not parameter.layout:
        return True  # a counter, or what no fused kernel takes
    both = zip(tensor.shape, tensor.stride(), parameter.stride(), strict=True)
    return all(size < 2 or one == other for size, one, other in both)


def _begin_late(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], stepped: list[Tensor]
) -> None:
    new = [one for one in stepped if not _momentum(optimizer, one)]
    if len(new) < len(stepped):
        for one in new:
            optimizer.state[one]["momentum_buffer"] = _first_momentum(one, group)


def _momentum(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return optimizer.state.get(parameter, {}).get("momentum_buffer") is not None


def _first_momentum(parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """What a step that is not the first one makes a first step's momentum of.

    Momentum is multiplied and added to what dampening leaves of the gradient; at first, it is the
    gradient.
    """
    assert parameter.grad is not None
    if not group["dampening"]:
        return torch.zeros_like(parameter.grad)
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    gradient = gradient.add(parameter, alpha=group["weight_decay"])
    return gradient.mul_(group["dampening"] / group["momentum"])


def why_not_fused(optimizer: torch.optim.Optimizer, *, steps_on: str = "") -> str:
    """Why an optimizer has no fused step, in words; empty where it has one.

    `steps_on` is the type of the device that steps, where weights may wait elsewhere.
    """
    if not runs_step_of(optimizer, _FUSED):
        return f"{type(optimizer).__name__} has no fused kernel"
    for group in optimizer.param_groups:
        if group["differentiable"]:
            return "a fused kernel is not differentiable"
        for parameter in group["params"]:
            place = parameter.device.type
            if not parameter.is_floating_point() or place not in ("cuda", "cpu"):
                return f"a parameter is {parameter.dtype} on {place}"
            place = steps_on or place
            if place == "cpu" and not steps_rightly_on_cpu(optimizer, parameter):
                return f"PyTorch's fused SGD does not step {parameter.dtype} on the CPU rightly"
            if isinstance(optimizer, torch.optim.Adagrad) and place == "cuda" and not _new_enough():
                return "Adagrad has a fused kernel for GPUs from torch 2.13 on"
    return gap_in_memory(optimizer)


def _new_enough() -> bool:
    return torch.__version__ >= "2.13"


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    optimizer.defaults.update(_FLAGS)
    for mark in _MARKS:
        setattr(optimizer, mark, True)
    for group in optimizer.param_groups:
        group.update(_FLAGS)
    _place_counters(optimizer)


def _place_counters(optimizer: torch.optim.Optimizer) -> None:
    """Step counters live with the parameter for a fused kernel, on the host otherwise."""
    for group in optimizer.param_groups:
        on_device = group["fused"] or group.get("capturable", False)
        dtype = scalar_dtype(is_fused=group["fused"])
        for parameter in group["params"]:
            counter = optimizer.state.get(parameter, {}).get("step")
            if isinstance(counter, Tensor):
                device = parameter.device if on_device else torch.device("cpu")
                optimizer.state[parameter]["step"] = counter.to(device, dtype)
