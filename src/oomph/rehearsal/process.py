"""A process as it was before: what a script changes in Python, torch and libraries is put back."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

#: Settings a training script is likely to change: how to read each, and how to put it back.
_TORCH_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: torch.utils._device.CURRENT_DEVICE, torch.set_default_device),
    (torch.is_grad_enabled, lambda on: torch.set_grad_enabled(on) and None),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_rng_state, torch.set_rng_state),
    (
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on),
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
_BACKEND_FLAGS = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
)
#: Modules that remember whether there is a GPU.
_REMEMBER = (
    "accelerate.utils.imports",
    "lightning.fabric.accelerators.cuda",
    "lightning.pytorch.accelerators.cuda",
    "torch.utils._triton",
    "transformers.utils.import_utils",
)
#: Whole-process state of accelerate, kept in dictionaries.
_ACCELERATE_STATES = ("PartialState", "AcceleratorState", "GradientState")
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # what slips past the rehearsal must not reach a real GPU
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # weights are loaded in the thread that is rehearsed
    "WANDB_MODE": "disabled",  # a rehearsal is no run to be logged
}


@contextlib.contextmanager
def process_for(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """A process that `python script arguments` would find, and the old one back afterwards."""
    folder = str(script.parent.resolve())
    working_folder, environment = Path.cwd(), dict(os.environ)
    python_random, numpy_random = random.getstate(), numpy.random.get_state()
    settings = [(put, read()) for read, put in _TORCH_SETTINGS]
    flags = [(owner, name, getattr(owner, name)) for owner, name in _BACKEND_FLAGS]
    with (
        warnings.catch_warnings(),
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.object(sys, "excepthook", sys.excepthook),
        contextlib.redirect_stdout(sys.stdout),
        contextlib.redirect_stderr(sys.stderr),
        _own_modules(folder),
        _fresh_library_state(),
    ):
        os.environ.update(_ENVIRONMENT)
        try:
            yield
        finally:
            os.chdir(working_folder)
            os.environ.clear()
            os.environ.update(environment)
            random.setstate(python_random)
            numpy.random.set_state(numpy_random)
            for put, value in settings:
                put(value)
            for owner, name, value in flags:
                setattr(owner, name, value)


@contextlib.contextmanager
def libraries_for_real(script: Path) -> Iterator[None]:
    """While active, libraries imported for the first time make their constants for real.

    They outlive the rehearsal, and a fake tensor must not. The script's own modules do not.
    """
    folder = str(script.parent.resolve())
    execute = importlib.machinery.SourceFileLoader.exec_module

    def executed(loader: importlib.machinery.SourceFileLoader, module: ModuleType) -> None:
        if _is_own(module, folder):
            return execute(loader, module)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return execute(loader, module)

    with mock.patch.object(importlib.machinery.SourceFileLoader, "exec_module", executed):
        yield


@contextlib.contextmanager
def _own_modules(folder: str) -> Iterator[None]:
    """Modules beside the script are imported afresh, and forgotten afterwards."""

    def take_out() -> dict[str, ModuleType]:
        own = {
            name: module for name, module in list(sys.modules.items()) if _is_own(module, folder)
        }
        for name in own:
            del sys.modules[name]
        return own

    before = take_out()
    try:
        yield
    finally:
        take_out()
        sys.modules.update(before)


def _is_own(module: Any, folder: str) -> bool:
    """Whether a module was found because the script's folder is first on the path."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str) or name == "__main__":
        return False
    stem = f"{folder}/{name.replace('.', '/')}"
    return os.path.realpath(file) in (f"{stem}.py", f"{stem}/__init__.py")


@contextlib.contextmanager
def _fresh_library_state() -> Iterator[None]:
    """Libraries ask anew whether there is a GPU, when the rehearsal begins and when it ends."""
    _forget_answers()
    states = _accelerate_states()
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        _forget_answers()
        states = _accelerate_states()
        for index, state in enumerate(states):
            state.clear()
            state.update(before[index] if before else {})


def _forget_answers() -> None:
    for name in _REMEMBER:
        for value in list(vars(sys.modules.get(name, ModuleType(name))).values()):
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def _accelerate_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    return [getattr(module, name)._shared_state for name in _ACCELERATE_STATES] if module else []
