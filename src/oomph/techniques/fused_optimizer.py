"""Let the optimizer step in one fused kernel, which needs no copies of the parameters (exact).

PyTorch's default on a GPU works on lists of all parameters at once and keeps a list of intermediate
results as large as the parameters. A fused kernel keeps none and is faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from oomph.errors import BadInput
from oomph.techniques.optimizer_in_backward import runs_step_of
from oomph.techniques.technique import Undo

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

#: What an optimizer made with `fused=True` is marked with: a GradScaler hands such a step its scale
#: instead of unscaling, and the next step checks that the kernel takes the parameters.
_MARKS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")

_FLAGS = {"fused": True, "foreach": False}


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse_optimizer` takes this optimizer."""
    return not _why_not(optimizer)


def fuse_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    """Step all groups with fused kernels from now on; the state so far is kept."""
    why = _why_not(optimizer)
    if why:
        raise BadInput(f"this optimizer has no fused step: {why}; leave it as it is")
    flags_before = [{flag: group[flag] for flag in _FLAGS} for group in optimizer.param_groups]
    defaults_before = {flag: optimizer.defaults[flag] for flag in _FLAGS}
    marks_before = {mark: vars(optimizer)[mark] for mark in _MARKS if mark in vars(optimizer)}
    _fuse(optimizer)
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
        if handle.id not in optimizer._optimizer_load_state_dict_post_hooks:
            return
        handle.remove()
        shown.remove()
        optimizer.defaults.update(defaults_before)
        for mark in _MARKS:
            vars(optimizer).pop(mark, None)
        vars(optimizer).update(marks_before)
        for at, group in enumerate(optimizer.param_groups):
            group.update(flags_of(at))
        _place_counters(optimizer)

    return undo


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    if not runs_step_of(optimizer, _FUSED):
        return f"{type(optimizer).__name__} has no fused kernel"
    for group in optimizer.param_groups:
        if group["differentiable"]:
            return "a fused kernel is not differentiable"
        for parameter in group["params"]:
            place = parameter.device.type
            if not parameter.is_floating_point() or place not in ("cuda", "cpu"):
                return f"a parameter is {parameter.dtype} on {place}"
            if isinstance(optimizer, torch.optim.Adagrad) and place == "cuda" and not _new_enough():
                return "Adagrad has a fused kernel for GPUs from torch 2.13 on"
    return ""


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
        dtype = _get_scalar_dtype(is_fused=group["fused"])
        for parameter in group["params"]:
            counter = optimizer.state.get(parameter, {}).get("step")
            if isinstance(counter, Tensor):
                device = parameter.device if on_device else torch.device("cpu")
                optimizer.state[parameter]["step"] = counter.to(device, dtype)
