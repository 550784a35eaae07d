"""State that a forward depends on beside its modules and arguments: random streams and settings.

PyTorch's checkpoint restores PyTorch's own random streams and autocast. This module handles the
rest: random numbers of Python and numpy, settings that a `with` around the forward may change, and
torch function modes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from oomph.techniques.python_state import same_state
from oomph.torch_compat.function_modes import DeviceContext, function_mode_stack
from oomph.torch_compat.functorch import interpreter_stack

_cuda = torch.backends.cuda

#: The getter and setter of each setting.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)


def is_transformed() -> bool:
    """Whether this code runs inside a `grad`, `vmap` or `jvp` of `torch.func`.

    Tensors there have no memory of their own that could be moved, and saving hooks are not called.
    """
    return interpreter_stack() is not None


class Surroundings:
    """The random streams, settings and modes at one moment."""

    def __init__(self) -> None:
        self._settings = [get() for get, _ in _SETTINGS]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._modes = _users_modes()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """While active, restore the recorded state; afterwards return to the current one."""
        now = Surroundings()
        self._set(now)
        with contextlib.ExitStack() as modes:
            # Backward runs without the innermost mode, because that mode handles `backward` itself.
            for mode in self._modes:
                if not any(mode is one for one in now._modes):
                    modes.enter_context(mode)
            try:
                yield
            finally:
                now._set(Surroundings())

    def _set(self, other: Surroundings) -> None:
        """Restore what differs from `other`, the current state."""
        if self._python != other._python:
            random.setstate(self._python)
        if not same_state(self._numpy, other._numpy):
            np.random.set_state(self._numpy)
        for (_, put), before, now in zip(_SETTINGS, self._settings, other._settings, strict=True):
            if before != now:
                put(before)


def _users_modes() -> list[TorchFunctionMode]:
    """The active function modes, except this package's and a default device.

    PyTorch's checkpoint restores the default device itself.
    """
    stack = function_mode_stack()
    found = [mode for mode in stack if not isinstance(mode, DeviceContext)]
    return [mode for mode in found if not type(mode).__module__.startswith("oomph.")]
