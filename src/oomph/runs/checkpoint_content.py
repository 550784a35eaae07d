"""Validates the contents of a checkpoint's files before anything is done with them.

The checksums detect damage, but not tampering: whoever edits a manifest can write a matching
checksum. So every value is validated before it is used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oomph.errors import BadCheckpoint
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.reading import read_regular
from oomph.files.schema import Count, Mismatch, read_as
from oomph.quoting import brief
from oomph.runs.saving import (
    DEEPEST_MANIFEST,
    KIND,
    LARGEST_MANIFEST,
    MODEL,
    MOST_IN_MANIFEST,
    OPTIMIZER,
    SCHEMA_VERSION,
    STATE,
    checksum_of,
)
from oomph.runs.tensor_files import Written
from oomph.torch_compat.grad_scaler import GROWTH

#: PyTorch optimizers that keep more per parameter than tensors of its shape.
_OTHERWISE = ("LBFGS", "Adafactor")
#: Errors that PyTorch's, numpy's and Python's generators raise for an invalid state.
_NO_STATE = (TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """How the model's tensors relate: their names, shared tensors and strides."""

    names: tuple[str, ...]
    shared: dict[str, str]
    strides: dict[str, tuple[Count, ...]]
    extra: Any


@dataclass(frozen=True, kw_only=True)
class _Optimizer:
    """The names of the optimizer's parameters by group, and its state."""

    parameters: tuple[tuple[str, ...], ...]
    state: Any


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What every checkpoint has; the keys are those of `saving.save`."""

    step: Count
    plan: dict[str, Any]
    model: _Model
    optimizer: _Optimizer
    scaler: Any
    random: Any
    states: dict[str, Any]
    extra: Any
    files: dict[str, Written]


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of a manifest, checked."""
    try:
        manifest = parse_json(
            read_regular(path, most=LARGEST_MANIFEST),
            deepest=DEEPEST_MANIFEST,
            most_values=MOST_IN_MANIFEST,
            any_number=True,
            any_text=True,
        )
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except BadJson as error:
        raise BadCheckpoint(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise BadCheckpoint(f"{path} is not of a checkpoint of `run.save`")
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BadCheckpoint(
            f"{path} has schema {brief(version)}, and this oomph reads {SCHEMA_VERSION}"
        )
    content = manifest.get("content")
    if not isinstance(content, dict) or checksum_of(content) != manifest.get("crc32"):
        raise BadCheckpoint(f"{path} is damaged: its checksum is not the one it was written with")
    try:
        read = read_as(_Content, content, open_ended=True)
        if not isinstance(content["optimizer"].get("class"), str):
            raise Mismatch("has no optimizer.class")
    except Mismatch as problem:
        raise BadCheckpoint(f"{path} was changed into something else: {problem}") from None
    if set(read.files) != {MODEL, OPTIMIZER, STATE}:
        raise BadCheckpoint(f"{path} names other files than {MODEL}, {OPTIMIZER} and {STATE}")
    return content


def files_of(content: Mapping[str, Any]) -> dict[str, Written]:
    """The files listed in a checked manifest."""
    return {name: read_as(Written, entry) for name, entry in content["files"].items()}


def fits_closely(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this layout has no gaps or overlaps in memory."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return max(stride, default=0) <= max(expected, 1)


def check_optimizer_state(state: Any, sizes: Sequence[int]) -> None:
    """Raise an error for anything that is not the state of an optimizer with these groups."""
    if not isinstance(state, dict):
        raise BadCheckpoint("the checkpoint holds no optimizer's state")
    groups, by_parameter = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(by_parameter, dict):
        raise BadCheckpoint("the optimizer's state has no param_groups, or no state")
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise BadCheckpoint("the optimizer's state has a group without params")
    if [len(group["params"]) for group in groups] != list(sizes):
        raise BadCheckpoint("the optimizer's state has other groups than the manifest says")
    known = {at for group in groups for at in group["params"] if type(at) is int}
    if len(known) != sum(sizes):
        raise BadCheckpoint("the optimizer's state numbers its parameters otherwise")
    for at, one in by_parameter.items():
        if isinstance(at, str):
            continue  # state that a custom optimizer keeps for all parameters, under a name
        if type(at) is not int or at not in known or not isinstance(one, dict):
            raise BadCheckpoint(f"the optimizer's state has {brief(at)}, which is no parameter")
        for key, value in one.items():
            if not isinstance(key, str) or isinstance(value, str | bytes):
                raise BadCheckpoint(
                    f"the optimizer's state of {at} has {brief(key)} as {brief(value)}"
                )


def check_tensors_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise an error for state that one of PyTorch's own optimizers could not step with.

    They keep numbers per parameter, and tensors of one element or of the parameter's shape. Other
    optimizers may keep what they want.
    """
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ in _OTHERWISE:
        return
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [at for group in state["param_groups"] for at in group["params"]]
    for at, parameter in zip(numbers, owned, strict=True):
        for key, value in state["state"].get(at, {}).items():
            plain = value is None or isinstance(value, bool | int | float)
            shaped = isinstance(value, Tensor) and (
                value.numel() == 1 or value.shape == parameter.shape
            )
            if not plain and not shaped:
                raise BadCheckpoint(
                    f"the optimizer's {key} of parameter {at} cannot be {_say(value)}: a tensor of"
                    f" its shape, {list(parameter.shape)}, belongs there"
                )


def check_settings(
    saved: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Raise an error for group settings that are missing, or of another kind than the optimizer's.

    Switches may be missing: later versions of PyTorch have more of them, and have defaults for
    them.
    """
    for number, (then, now) in enumerate(zip(saved, own, strict=True)):
        for name, value in now.items():
            if name in defaults and name not in then and not isinstance(value, bool | None):
                raise BadCheckpoint(
                    f"the optimizer's group {number} has no {name} in the checkpoint"
                )
        for name, value in then.items():
            if name != "params" and name in now and not _alike(value, now[name]):
                raise BadCheckpoint(
                    f"the optimizer's group {number} has {brief(name)} as {_say(value)} in the"
                    f" checkpoint, and as {_say(now[name])} here"
                )


def _alike(then: Any, now: Any) -> bool:
    """Whether two settings are of one kind; a switch may be None, and a number may be a tensor."""
    if then is None:
        return isinstance(now, bool | None)
    if isinstance(then, list | tuple) and isinstance(now, list | tuple):
        return len(then) == len(now) and all(map(_alike, then, now))
    number = bool | int | float | Tensor
    kinds = (number, str, list | tuple | Mapping)
    return now is None or any(isinstance(then, k) and isinstance(now, k) for k in kinds)


def _say(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else brief(value)


def check_states(states: Any) -> None:
    """Raise an error unless these are states by name."""
    if not isinstance(states, dict) or not all(isinstance(name, str) for name in states):
        raise BadCheckpoint("the checkpoint's states of what was attached are no table of names")


def check_scaler_state(state: Any) -> None:
    """Raise an error for a state that fp16's loss scaler would not take."""
    if state is None or state == {}:
        return
    numbers = ("scale", "growth_factor", "backoff_factor", "growth_interval", GROWTH)
    if not isinstance(state, dict) or any(
        isinstance(state.get(name), bool) or not isinstance(state.get(name), int | float)
        for name in numbers
    ):
        raise BadCheckpoint(f"the loss scaler's state is not {', '.join(numbers)}, all numbers")


def check_random_state(state: Any, device: torch.device) -> None:
    """Try the random states on throwaway generators."""
    tensors = [state.get("torch"), state.get("device")] if isinstance(state, dict) else [None]
    if not all(
        isinstance(one, Tensor) and one.dtype == torch.uint8 and one.dim() == 1
        for one in tensors[: 1 if tensors[-1] is None else 2]
    ):
        raise BadCheckpoint("the checkpoint's random streams are no bytes")
    try:
        torch.Generator().set_state(state["torch"])
        if device.type == "cuda" and state["device"] is not None:
            torch.Generator(device).set_state(state["device"])
        np.random.RandomState().set_state(state["numpy"])
        random.Random().setstate(state["python"])
    except _NO_STATE as error:
        raise BadCheckpoint(f"the checkpoint's random streams are none: {error}") from None
