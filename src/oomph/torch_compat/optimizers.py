"""Optimizers, their hooks, the flags that schedulers check, and ops on lists of tensors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils._contextlib
from torch.optim import Optimizer
from torch.utils import _foreach_utils

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        used_for="finds hooks on all steps",
        without_it="hooks run once for each part of a step, or never",
    ),
    PrivateName(
        "torch.optim.optimizer._global_optimizer_post_hooks",
        used_for="finds and calls hooks on all steps",
        without_it="hooks run once for each part of a step, or never",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        used_for="finds hooks on an optimizer's steps",
        without_it="hooks run once for each part of a step, or never",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_post_hooks",
        used_for="finds hooks on an optimizer's steps",
        without_it="hooks run once for each part of a step, or never",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks",
        used_for="whether an optimizer's fused flags are still its plan's to take back",
        without_it="undoing a plan twice takes back flags of the user's",
    ),
    PrivateName(
        "torch.optim.optimizer._get_scalar_dtype",
        used_for="the type of a step's counter",
        without_it="a fused optimizer's counters are of another type than PyTorch's",
    ),
    PrivateName(
        "torch.optim.SGD._init_group",
        used_for="whether a class steps as the one that it derives from",
        without_it="optimizers derived from PyTorch's are stepped in parts, with other numbers",
    ),
    PrivateName(
        "torch.optim.SGD._step_supports_amp_scaling",
        used_for="whether GradScaler leaves unscaling to an optimizer",
        without_it="gradients are unscaled twice, or not at all",
        is_optional=True,
    ),
    PrivateName(
        "torch.optim.SGD._need_device_dtype_check_for_fused",
        used_for="an optimizer that is fused later looks at its parameters once",
        without_it="a plan's fused optimizer is not as it was when undone",
        is_optional=True,
    ),
    PrivateName(
        "torch.optim.Optimizer._opt_called",
        used_for="schedulers know that a step was made",
        without_it="schedulers warn of a wrong order of calls",
        is_optional=True,
    ),
    PrivateName(
        "torch.optim.Optimizer.step._wrapped_by_lr_sched",
        used_for="schedulers know that a step counts itself",
        without_it="schedulers warn of a wrong order of calls",
    ),
    PrivateName(
        "torch.utils._contextlib.context_decorator",
        used_for="the user's step is found inside of what PyTorch wraps around it",
        without_it="optimizers of PyTorch are taken for the user's own, and not stepped in parts",
    ),
    PrivateName(
        "torch._foreach_copy_",
        used_for="copies many tensors in few launches",
        without_it="steps take longer to be made undoable",
    ),
    PrivateName(
        "torch._foreach_mul_",
        used_for="clips gradients with the numbers of `clip_grad_norm_`",
        without_it="streamed steps clip with other numbers",
    ),
    PrivateName(
        "torch._foreach_norm",
        used_for="measures a gradient with the numbers of `clip_grad_norm_`",
        without_it="streamed steps clip with other numbers",
    ),
    PrivateName(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        used_for="unscales one gradient as GradScaler does",
        without_it="optimizers on the host do not work with GradScaler",
    ),
    PrivateName(
        "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
        used_for="the order in which `clip_grad_norm_` sums up types",
        without_it="streamed steps clip with other numbers",
    ),
    PrivateName(
        "torch.utils._foreach_utils._has_foreach_support",
        used_for="whether `clip_grad_norm_` takes many tensors at once",
        without_it="streamed steps clip with other numbers",
    ),
    PrivateName(
        "torch.utils._foreach_utils._foreach_supported_types",
        used_for="`clip_grad_norm_` takes many fake tensors at once, as it would real ones",
        without_it="clipping is rehearsed tensor by tensor, with other memory",
    ),
    PrivateName(
        "torch.optim.optimizer._foreach_supported_types",
        used_for="optimizers take many fake tensors at once, as they would real ones",
        without_it="steps are rehearsed tensor by tensor, with other memory",
    ),
)

# `torch.optim` deletes its submodule's name; the module itself is loaded.
_optimizer: Any = sys.modules[Optimizer.__module__]

#: Hooks on the steps of every optimizer.
pre_hooks_of_all: dict[int, Any] = _optimizer._global_optimizer_pre_hooks
post_hooks_of_all: dict[int, Any] = _optimizer._global_optimizer_post_hooks
pre_hooks_of: Callable[[Optimizer], dict[int, Any]] = operator.attrgetter(
    "_optimizer_step_pre_hooks"
)
post_hooks_of: Callable[[Optimizer], dict[int, Any]] = operator.attrgetter(
    "_optimizer_step_post_hooks"
)
load_hooks_of: Callable[[Optimizer], dict[int, Any]] = operator.attrgetter(
    "_optimizer_load_state_dict_post_hooks"
)
scalar_dtype: Callable[..., torch.dtype] = _optimizer._get_scalar_dtype

#: The method by which a step collects its parameters.
INIT_GROUP = "_init_group"
#: Attribute of an optimizer that unscales gradients itself.
UNSCALES = "_step_supports_amp_scaling"
#: Attribute of an optimizer that has yet to check its parameters for a fused kernel.
CHECKS_FUSED = "_need_device_dtype_check_for_fused"
#: Attribute of a step that a scheduler has wrapped.
WRAPPED_BY_SCHEDULER = "_wrapped_by_lr_sched"
#: Source files of the wrappers that PyTorch puts around the steps of its own optimizers.
WRAPPERS = {
    _optimizer.__file__,
    torch.utils._contextlib.__file__,
    # Once anything is compiled, the compiler wraps parts of every optimizer.
    str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py"),
}


def mark_stepped(optimizer: Optimizer) -> None:
    """Set the flag that schedulers check; they warn if it is missing."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# -- many tensors at once ------------------------------------------------------------------------

foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
group_tensors: Any = _foreach_utils._group_tensors_by_device_and_dtype
has_foreach: Callable[..., bool] = _foreach_utils._has_foreach_support
#: PyTorch's lists of the tensor classes that foreach ops support.
foreach_types: tuple[list[Any], ...] = (
    _optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
)
