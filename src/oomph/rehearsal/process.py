"""Restores the process after a script changed Python, torch or libraries in it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy
import torch

from oomph.process.rehearsal_threads import current_rehearsal, replaced_here, take_part
from oomph.torch_compat.backend_flags import set_backend_flag
from oomph.torch_compat.compiler import TRITON
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction, default_device

#: Settings that a training script is likely to change: how to read each, and how to restore it.
_TORCH_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (default_device, torch.set_default_device),
    (torch.is_grad_enabled, lambda on: torch.set_grad_enabled(on) and None),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
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
#: Modules that cache whether there is a GPU.
_REMEMBER = (
    "accelerate.utils.imports",
    "lightning.fabric.accelerators.cuda",
    "lightning.pytorch.accelerators.cuda",
    TRITON,
    "transformers.utils.import_utils",
)
#: Process-wide state of accelerate, kept in dictionaries.
_ACCELERATE_STATES = ("PartialState", "AcceleratorState", "GradientState")
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # calls that bypass the rehearsal must not reach a real GPU
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # load weights in the thread that is rehearsed
    "WANDB_MODE": "disabled",  # a rehearsal is not a run to be logged
}


@contextlib.contextmanager
def process_for(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set the process up as `python script arguments` would, and restore it afterwards."""
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
        _threads_take_part(),
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
                set_backend_flag(owner, name, value)


@contextlib.contextmanager
def libraries_for_real(script: Path) -> Iterator[None]:
    """While active, libraries imported for the first time create their constants as real tensors.

    The libraries outlive the rehearsal, and fake tensors must not. The script's own modules do not.
    """
    folder = str(script.parent.resolve())
    execute = importlib.machinery.SourceFileLoader.exec_module

    def executed(loader: importlib.machinery.SourceFileLoader, module: ModuleType) -> None:
        if _is_own(module, folder):
            return execute(loader, module)
        with DisableTorchFunction(), disable_current_modes():
            return execute(loader, module)

    with replaced_here(importlib.machinery.SourceFileLoader, "exec_module", executed):
        yield


@contextlib.contextmanager
def _threads_take_part() -> Iterator[None]:
    """Make threads that the script starts part of the rehearsal: they write no files either."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        rehearsal, run = current_rehearsal(), thread.run

        def taking_part() -> None:
            take_part(rehearsal)
            try:
                run()
            except Exception as error:
                if rehearsal is not None:
                    rehearsal.died_of.append(f"{type(error).__name__}: {error}".split("\n")[0])
                raise

        thread.run = taking_part  # type: ignore[method-assign]
        start(thread)

    with replaced_here(threading.Thread, "start", started):
        yield


@contextlib.contextmanager
def _own_modules(folder: str) -> Iterator[None]:
    """Import modules beside the script afresh, and forget them afterwards."""

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
    """Whether a module was found through the script's folder, which is first on the path."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str) or name == "__main__":
        return False
    stem = f"{folder}/{name.replace('.', '/')}"
    return os.path.realpath(file) in (f"{stem}.py", f"{stem}/__init__.py")


@contextlib.contextmanager
def _fresh_library_state() -> Iterator[None]:
    """Have libraries ask again whether there is a GPU, at the rehearsal's start and end."""
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
