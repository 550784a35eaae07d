"""Function modes and subclasses, which intercept calls of PyTorch functions from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.utils import _device

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._C.DisableTorchFunction",
        used_for="asks a tensor past every mode and subclass",
        without_it="oomph's own work is watched, counted, or never ends",
    ),
    PrivateName(
        "torch._C.DisableTorchFunctionSubclass",
        used_for="asks a tensor past its subclass alone",
        without_it="chunked losses and watched tensors never end",
    ),
    PrivateName(
        "torch._C._disabled_torch_function_impl",
        used_for="tells subclasses that change what functions do",
        without_it="activations of such subclasses come back from the host as plain tensors",
    ),
    PrivateName(
        "torch.overrides._get_current_function_mode",
        used_for="whether a mode is innermost",
        without_it="blocks that run several samples at once, and text of fake tensors, go wrong",
    ),
    PrivateName(
        "torch.overrides._get_current_function_mode_stack",
        used_for="the user's modes around a forward, for its second run",
        without_it="recomputed blocks run without the user's modes",
    ),
    PrivateName(
        "torch.overrides._pop_mode_temporarily",
        used_for="calls a function without the innermost mode",
        without_it="as without `_get_current_function_mode`",
    ),
    PrivateName(
        "torch._C._nn._parse_to",
        used_for="answers `Module.to` for a card that is rehearsed",
        without_it="models that are moved to a card cannot be rehearsed",
    ),
    PrivateName(
        "torch._C._set_grad_enabled",
        used_for="passes a common call on without looking at it",
        without_it="rehearsals for a card take longer",
    ),
    PrivateName(
        "torch.utils._device.DeviceContext",
        used_for="where tensors that name no device are made; no mode of the user's own",
        without_it="scripts leave a default device behind; a second run takes it for a mode",
    ),
    PrivateName(
        "torch.utils._device._device_constructors",
        used_for="finds the functions that make tensors on a default device",
        without_it="tensors that name no device are counted on the card",
    ),
)

DisableTorchFunction: Any = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass: Any = torch._C.DisableTorchFunctionSubclass
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

current_function_mode = overrides._get_current_function_mode
function_mode_stack = overrides._get_current_function_mode_stack
pop_function_mode = overrides._pop_mode_temporarily

#: Functions as a function mode receives them.
parse_to: Callable[..., tuple[Any, ...]] = torch._C._nn._parse_to
set_grad_enabled: Any = torch._C._set_grad_enabled

DeviceContext = _device.DeviceContext
device_constructors = _device._device_constructors


def default_device() -> torch.device | None:
    """The default device of this thread, or None.

    PyTorch's own variable is one for all threads: two that enter a device's context at once leave
    it as neither of them found it.
    """
    modes = function_mode_stack()
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
