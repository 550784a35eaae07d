"""Load: a checkpoint given back to a run, or to plain PyTorch.

First everything is checked: all files to the last bit, then whether the checkpoint is of this model
and this optimizer. Only then the first tensor is changed. Tensors are read one at a time from the
mapped files, so loading takes no second copy of the model, neither here nor on the device.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.errors import BadCheckpoint, OomphError, WrongCheckpoint
from oomph.planning.plan import Plan
from oomph.running.checkpoint_folder import MANIFEST, checkpoints, newest_checkpoint
from oomph.running.nested_state import put_together
from oomph.running.random_state import set_random_state
from oomph.running.saving import (
    KIND,
    MODEL,
    OPTIMIZER,
    SCHEMA_VERSION,
    STATE,
    Situation,
    Stateful,
    checksum_of,
    optimized_parameters,
    plain_model_state,
    same_tensors,
)
from oomph.running.step import Stage
from oomph.running.tensor_files import MappedTensors, Written, check_file
from oomph.techniques.low_bit_state import has_low_bit_state, plain_state_dict


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint for plain PyTorch, on the host: what `load_state_dict` takes."""

    path: Path
    step: int
    plan: dict[str, Any]
    """The plan it was saved under, as JSON."""
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    scaler_state: dict[str, Any] | None
    states: dict[str, Any]
    """By name: the states of what was attached to the run, a scheduler for example."""
    extra: Any


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run found in the checkpoint it goes on from."""

    path: Path
    step: int
    extra: Any
    """What `save` was given."""
    waiting: dict[str, Any]
    """States by name that nobody took yet: `run.attach` them."""
    notes: tuple[str, ...]
    """Why the run may not go on as the saved one would have, to the bit; empty where it does."""


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, or the newest of a folder, for plain PyTorch; all of it is checked."""
    stored = Stored(Path(path))
    model_state = stored.model_state(copied=True)
    optimized = [model_state[name] for name in stored.optimized()]
    return Checkpoint(
        path=stored.path,
        step=stored.content["step"],
        plan=stored.content["plan"],
        model_state=model_state,
        optimizer_state=_as_plain(stored.optimizer_state(copied=True), optimized),
        scaler_state=stored.state("scaler"),
        states=stored.state("states"),
        extra=stored.state("extra"),
    )


class Stored:
    """A checkpoint on the disk whose every file is as it was written."""

    def __init__(self, path: Path) -> None:
        self.path = newest_checkpoint(path)
        try:
            self.content = _read_manifest(self.path / MANIFEST)
            for name, entry in self.content["files"].items():
                check_file(self.path / name, Written(**entry))
            self._files = {
                name: MappedTensors(self.path / name) for name in (MODEL, OPTIMIZER, STATE)
            }
        except BadCheckpoint as error:
            raise type(error)(f"{error}; {_advice(self.path)}") from None

    def plan(self) -> Plan:
        """The plan that the saved run was under."""
        return Plan.from_dict(self.content["plan"])

    def model_state(self, *, copied: bool) -> dict[str, Any]:
        """The model's state dict; its tensors are mapped, or copies that lie as the saved did."""
        stored, mapped = self.content["model"], self._files[MODEL]
        extra: dict[str, Any] = self._read(stored["extra"], STATE)
        owners = {name: stored["shared"].get(name, name) for name in stored["names"]}
        tensors = {name: mapped[name] for name in mapped.names}
        if copied:
            strides = stored["strides"]
            tensors = {name: _laid_out(t.clone(), strides.get(name)) for name, t in tensors.items()}
        return {name: tensors[of] if of in tensors else extra[of] for name, of in owners.items()}

    def optimizer_state(self, *, copied: bool) -> dict[str, Any]:
        """The optimizer's state dict, 8-bit where it was; its tensors are mapped, or copies."""
        read: dict[str, Any] = self._read(
            self.content["optimizer"]["state"], OPTIMIZER, copied=copied
        )
        return read

    def optimized(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        return [name for group in self.content["optimizer"]["parameters"] for name in group]

    def state(self, key: str) -> Any:
        """One of the smaller things, whole and on the host."""
        return self._read(self.content[key], STATE)

    def _read(self, stored: Any, file: str, *, copied: bool = True) -> Any:
        mapped = self._files[file]
        return put_together(stored, lambda name: mapped[name].clone() if copied else mapped[name])


def load(stored: Stored, now: Situation) -> Resumed:
    """Give model, optimizer, scaler, states and random streams what the checkpoint has.

    Whatever does not fit is refused before anything is changed.
    """
    stage, content = now.stage, stored.content
    model_state = stored.model_state(copied=False)
    _check_model(stage, model_state, content["model"]["shared"])
    _check_optimizer(stage, content["optimizer"])
    states, scaler = stored.state("states"), stored.state("scaler")
    extra, streams = stored.state("extra"), stored.state("random")
    _load_states(now.states, states)
    _load_model(stage, model_state)
    _load_optimizer(stage, stored)
    if stage.scaler is not None and scaler:
        stage.scaler.load_state_dict(scaler)
    set_random_state(streams, now.device)
    return Resumed(
        path=stored.path,
        step=content["step"],
        extra=extra,
        waiting={name: one for name, one in states.items() if name not in now.states},
        notes=(
            *_differences(stored, now.plan),
            *_other_types(stage, model_state),
            *_starting_anew(now.states, states, stage, scaler),
        ),
    )


# -- reading ---------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadCheckpoint(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise BadCheckpoint(f"{path} is not of a checkpoint of `run.save`")
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BadCheckpoint(f"{path} has schema {version!r}, and this oomph reads {SCHEMA_VERSION}")
    content: dict[str, Any] = manifest.get("content", {})
    if checksum_of(content) != manifest.get("crc32"):
        raise BadCheckpoint(f"{path} is damaged: its checksum is not the one it was written with")
    return content


def _advice(path: Path) -> str:
    others = [one for one in checkpoints(path.parent) if one != path]
    return f"there is also {others[-1]}" if others else "there is no other checkpoint beside it"


def _laid_out(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """The tensor with its numbers in memory as the stride says."""
    if stride is None or tuple(stride) == tensor.stride():
        return tensor
    return torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype).copy_(tensor)


def _as_plain(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """An optimizer's state as a plain one would keep it for these parameters.

    Where a parameter is laid out in another order than its dimensions have, so is its state: fused
    kernels go through both as they lie in memory. One that shows nothing, as its numbers are on the
    host, says nothing of its layout; whoever keeps its state there knows it.
    """
    plain = plain_state_dict(state_dict, dict(enumerate(parameters)))

    def like(at: Any, value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.shape == parameters[at].shape
        stride = parameters[at].stride()
        return _laid_out(value, stride) if alike and any(stride) else value

    state = {
        at: {key: like(at, value) for key, value in one.items()}
        for at, one in plain["state"].items()
    }
    return {**plain, "state": state}


# -- checking --------------------------------------------------------------------------------------


def _check_model(stage: Stage, saved: Mapping[str, Any], shared: Mapping[str, str]) -> None:
    own = plain_model_state(stage)
    for name, value in own.items():
        if name not in saved:
            raise WrongCheckpoint(f"this model has {name}, which the checkpoint has not")
        if isinstance(value, Tensor) and (was := _say(saved[name])) != (now := _say(value)):
            raise WrongCheckpoint(f"{name} is {was} in the checkpoint and {now} in this model")
    if missing := [name for name in saved if name not in own]:
        raise WrongCheckpoint(f"the checkpoint has {missing[0]}, which this model has not")
    for name, owner in same_tensors(own).items():
        if shared.get(name, name) != shared.get(owner, owner):
            raise WrongCheckpoint(
                f"{name} is tied to {owner} in this model, and was not when saved"
            )


def _say(value: Any) -> str:
    return "×".join(map(str, value.shape)) or "one number" if isinstance(value, Tensor) else "other"


def _check_optimizer(stage: Stage, saved: Mapping[str, Any]) -> None:
    kind = type(stage.optimizer).__name__
    if saved["class"] != kind:
        raise WrongCheckpoint(f"the checkpoint is of {saved['class']}, and the optimizer is {kind}")
    own = optimized_parameters(stage)
    if len(own) != len(saved["parameters"]):
        raise WrongCheckpoint(
            f"the optimizer has {len(own)} groups of parameters, and {len(saved['parameters'])}"
            " when saved"
        )
    for number, (names, saved_names) in enumerate(zip(own, saved["parameters"], strict=True)):
        if names != saved_names:
            pairs = [*zip(names, saved_names, strict=False), (len(names), len(saved_names))]
            now, then = next((one, other) for one, other in pairs if one != other)
            raise WrongCheckpoint(
                f"the optimizer's group {number} holds {now} where it held {then} when saved"
            )


def _differences(stored: Stored, now: Plan) -> list[str]:
    """What makes numbers differ in their last bits, or more."""
    try:
        then = stored.plan()
    except OomphError as error:
        return [f"the saved plan cannot be compared with this one: {error}"]
    before, after = then.choices.as_dict(), now.choices.as_dict()
    changed = [name for name in before if before[name] != after[name] and name != "allocator"]
    notes = [
        f"the plan is another ({', '.join(name.replace('_', ' ') for name in changed)}): results"
        " are those of the saved run but for rounding"
    ]
    places = {
        "torch": (then.made_for.torch, now.made_for.torch),
        "the device": (then.made_for.gpu or "the CPU", now.made_for.gpu or "the CPU"),
    }
    moved = [f"{what} is {b}, and was {a}" for what, (a, b) in places.items() if a != b]
    return (notes if changed else []) + moved


def _other_types(stage: Stage, saved: Mapping[str, Any]) -> list[str]:
    for name, value in plain_model_state(stage).items():
        if isinstance(value, Tensor) and value.dtype != saved[name].dtype:
            return [f"{name} was saved as {saved[name].dtype} and is {value.dtype} in this model"]
    return []


def _starting_anew(
    states: Mapping[str, Stateful], saved: Mapping[str, Any], stage: Stage, scaler: Any
) -> list[str]:
    names = [name for name in states if name not in saved]
    if stage.scaler is not None and not scaler:
        names.append("the loss scaler")
    return [f"the checkpoint has no state of {name}, which starts anew" for name in names]


# -- changing --------------------------------------------------------------------------------------


def load_state(name: str, stateful: Stateful, state: Any) -> None:
    """Give one attached thing its state; its own errors are said in words."""
    try:
        stateful.load_state_dict(state)
    except OomphError:
        raise
    except Exception as error:
        raise WrongCheckpoint(
            f"{name} ({type(stateful).__name__}) does not take its saved state:"
            f" {type(error).__name__}: {error}"
        ) from error


def _load_states(states: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    before: dict[str, Any] = {}
    try:
        for name, stateful in states.items():
            if name in saved:
                before[name] = stateful.state_dict()
                load_state(name, stateful, saved[name])
    except BaseException:
        for name, state in before.items():
            with contextlib.suppress(Exception):  # it may be the one that takes none
                states[name].load_state_dict(state)
        raise


def _load_model(stage: Stage, saved: Mapping[str, Any]) -> None:
    stage.model.load_state_dict(saved)
    if stage.masters is None:
        return
    for name, parameter in stage.model.named_parameters():
        if stage.masters.master_of(parameter) is not parameter:
            stage.masters.write(parameter, saved[name])


def _load_optimizer(stage: Stage, stored: Stored) -> None:
    optimizer = stage.optimizer
    assert optimizer is not None, "a run has an optimizer"
    optimizer.zero_grad(set_to_none=True)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # What goes to a GPU, or to an optimizer's own place on the host, is copied by that.
    stays = stage.host is None and any(parameter.device.type == "cpu" for parameter in owned)
    state = stored.optimizer_state(copied=stays)
    if not has_low_bit_state(optimizer):
        state = _as_plain(state, owned)
    optimizer.state.clear()  # or there would be two of each on the device
    optimizer.load_state_dict(state)
    if stage.in_backward is not None:
        stage.in_backward.dirty = False
    if stage.pieces is not None:
        stage.pieces.half_done = False
