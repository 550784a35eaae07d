"""The contents of modules, and the base classes that several layers share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm
from torch.nn.utils import stateless

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.nn.modules.batchnorm._BatchNorm",
        used_for="finds layers whose result depends on the whole batch",
        without_it="batches of models with BatchNorm are split, with other numbers",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._NormBase",
        used_for="finds layers with running statistics",
        without_it="statistics are updated twice where a block is recomputed",
    ),
    PrivateName(
        "torch.nn.modules.instancenorm._InstanceNorm",
        used_for="the same",
        without_it="statistics are updated twice where a block is recomputed",
    ),
    PrivateName(
        "torch.nn.modules.conv._ConvNd",
        used_for="finds convolutions",
        without_it="adaptive precision leaves convolutions out",
    ),
    PrivateName(
        "torch.nn.Module._parameters",
        used_for="a module's own parameters, shared ones under each name",
        without_it="weights cannot be counted, read from files or replaced",
    ),
    PrivateName(
        "torch.nn.Module._buffers",
        used_for="a module's own buffers, and puts others in their place",
        without_it="buffers are not put back when a step is taken back",
    ),
    PrivateName(
        "torch.nn.Module._modules",
        used_for="a module's parts, also while it is being built",
        without_it="`oomph run` finds no models",
    ),
    PrivateName(
        "torch.nn.Module._non_persistent_buffers_set",
        used_for="which buffers are not saved",
        without_it="buffers that are not saved are asked of checkpoints",
    ),
    PrivateName(
        "torch.nn.Module._forward_hooks",
        used_for="finds hooks of the user's",
        without_it="blocks with hooks are compiled or captured, and the hooks are not called",
    ),
    PrivateName(
        "torch.nn.Module._forward_pre_hooks",
        used_for="finds hooks of the user's",
        without_it="blocks with hooks are compiled or captured, and the hooks are not called",
    ),
    PrivateName(
        "torch.nn.Module._forward_hooks_with_kwargs",
        used_for="a register that is looked at only where it has entries",
        without_it="looking for what a forward writes to takes longer",
    ),
    PrivateName(
        "torch.nn.Module._forward_hooks_always_called",
        used_for="the same",
        without_it="looking for what a forward writes to takes longer",
    ),
    PrivateName(
        "torch.nn.Module._forward_pre_hooks_with_kwargs",
        used_for="the same",
        without_it="looking for what a forward writes to takes longer",
    ),
    PrivateName(
        "torch.nn.Module._state_dict_hooks",
        used_for="the same",
        without_it="looking for what a forward writes to takes longer",
    ),
    PrivateName(
        "torch.nn.Module._backward_hooks",
        used_for="finds modules with hooks on gradients",
        without_it="such modules' batches are split, and the hooks see parts",
    ),
    PrivateName(
        "torch.nn.Module._backward_pre_hooks",
        used_for="finds modules with hooks on gradients",
        without_it="such modules' batches are split, and the hooks see parts",
    ),
    PrivateName(
        "torch.nn.modules.module._global_backward_hooks",
        used_for="finds hooks on gradients of every module",
        without_it="batches are split, and the hooks see parts",
    ),
    PrivateName(
        "torch.nn.modules.module._global_backward_pre_hooks",
        used_for="finds hooks on gradients of every module",
        without_it="batches are split, and the hooks see parts",
    ),
    PrivateName(
        "torch.nn.Module._call_impl",
        used_for="finds in a traceback which module was called",
        without_it="reports of out of memory name no module",
    ),
    PrivateName(
        "torch.nn.utils.stateless._reparametrize_module",
        used_for="traces a block with fake weights",
        without_it="compiled blocks cannot be rehearsed",
    ),
)

BatchNorm = batchnorm._BatchNorm
NormBase = batchnorm._NormBase
InstanceNorm = instancenorm._InstanceNorm
ConvNd = conv._ConvNd

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter(
    "_parameters"
)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
unsaved_buffers_of: Callable[[nn.Module], set[str]] = operator.attrgetter(
    "_non_persistent_buffers_set"
)
forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = operator.attrgetter("_forward_hooks")
forward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = operator.attrgetter(
    "_forward_pre_hooks"
)
reparametrized = stateless._reparametrize_module


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """A module's own parameters, also where its class has a `parameters` that gives others."""
    return [one for one in parameters_of(module).values() if one is not None]


def own_buffers(module: nn.Module) -> list[Tensor]:
    """A module's own buffers, likewise."""
    return [one for one in buffers_of(module).values() if one is not None]


#: Attribute names, for code that accesses them by name.
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
CHILDREN = "_modules"
#: The function that calls a module's forward and its hooks.
CALL = "_call_impl"
#: Attributes with the gradient hooks of one module, and of all modules.
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
BACKWARD_HOOKS_OF_ALL = ("_global_backward_hooks", "_global_backward_pre_hooks")
#: Hook dictionaries of every module, most of which stay empty.
HOOK_REGISTERS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks")) | {
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
}
