"""Loads a checkpoint into a run, or for plain PyTorch.

Everything is checked first: all files, bit by bit, then whether the checkpoint matches this model
and optimizer. Only then is the first tensor changed. Tensors are read one at a time from the mapped
files, so loading makes no second copy of the model, neither here nor on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.engine.step import Stage
from oomph.errors import BadCheckpoint, OomphError, WrongCheckpoint
from oomph.plans.choices import Choices
from oomph.plans.plan import Plan
from oomph.process.random_state import set_random_state
from oomph.quoting import brief
from oomph.runs.checkpoint_content import (
    check_optimizer_state,
    check_random_state,
    check_scaler_state,
    check_settings,
    check_states,
    check_tensors_of,
    files_of,
    fits_closely,
    read_manifest,
)
from oomph.runs.checkpoint_folder import MANIFEST, checkpoints, newest_checkpoint
from oomph.runs.nested_state import put_together
from oomph.runs.saving import (
    MODEL,
    OPTIMIZER,
    STATE,
    Situation,
    Stateful,
    optimized_parameters,
    plain_model_state,
    same_tensors,
)
from oomph.runs.tensor_files import MappedTensors, check_file
from oomph.techniques.low_bit_state import has_low_bit_state, plain_state_dict


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint for plain PyTorch, on the host, ready for `load_state_dict`."""

    path: Path
    step: int
    plan: dict[str, Any]
    """The plan it was saved under, as JSON."""
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    scaler_state: dict[str, Any] | None
    states: dict[str, Any]
    """By name: the states of objects attached to the run, such as a scheduler."""
    extra: Any


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run found in the checkpoint it resumed from."""

    path: Path
    step: int
    extra: Any
    """The `extra` that was passed to `save`."""
    waiting: dict[str, Any]
    """States by name that nothing has claimed yet: claim them with `run.attach`."""
    notes: tuple[str, ...]
    """Why the run may differ in some bits from the saved one; empty if it does not."""


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, or a folder's newest, for plain PyTorch; all of it is checked."""
    stored = Stored(Path(path))
    model_state = stored.model_state(copied=True)
    names = stored.optimized()
    if lost := [name for name in names if not isinstance(model_state.get(name), Tensor)]:
        raise BadCheckpoint(f"{stored.path} has no parameter {brief(lost[0])}, which was optimized")
    optimized = [model_state[name] for name in names]
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
    """A checkpoint on disk whose files were all verified."""

    def __init__(self, path: Path) -> None:
        self.path = newest_checkpoint(path)
        try:
            self.content = read_manifest(self.path / MANIFEST)
            for name, written in files_of(self.content).items():
                check_file(self.path / name, written)
            self._files = {
                name: MappedTensors(self.path / name) for name in (MODEL, OPTIMIZER, STATE)
            }
        except BadCheckpoint as error:
            raise type(error)(f"{error}; {_advice(self.path)}") from None

    def plan(self) -> Plan:
        """The plan of the saved run."""
        return Plan.from_dict(self.content["plan"])

    def model_state(self, *, copied: bool) -> dict[str, Any]:
        """The model's state dict, with mapped tensors or copies in the saved memory layout."""
        stored, mapped = self.content["model"], self._files[MODEL]
        extra: dict[str, Any] = self._read(stored["extra"], STATE)
        owners = {name: stored["shared"].get(name, name) for name in stored["names"]}
        tensors = {name: mapped[name] for name in mapped.names}
        if not isinstance(extra, dict):
            raise BadCheckpoint(f"{self.path}: the model's further state is no table of names")
        if lost := [of for of in owners.values() if of not in tensors and of not in extra]:
            raise BadCheckpoint(f"{self.path} lacks the tensor {lost[0]}")
        if copied:
            strides = stored["strides"]
            tensors = {name: _laid_out(t.clone(), strides.get(name)) for name, t in tensors.items()}
        return {name: tensors[of] if of in tensors else extra[of] for name, of in owners.items()}

    def optimizer_state(self, *, copied: bool) -> dict[str, Any]:
        """The optimizer's state dict, 8-bit if it was; with mapped tensors or copies."""
        read: dict[str, Any] = self._read(
            self.content["optimizer"]["state"], OPTIMIZER, copied=copied
        )
        check_optimizer_state(read, [len(one) for one in self.content["optimizer"]["parameters"]])
        return read

    def optimized(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        return [name for group in self.content["optimizer"]["parameters"] for name in group]

    def state(self, key: str) -> Any:
        """One of the smaller entries, complete and on the host."""
        return self._read(self.content[key], STATE)

    def _read(self, stored: Any, file: str, *, copied: bool = True) -> Any:
        mapped, taken = self._files[file], set[str]()

        def get(name: str) -> Tensor:
            if name in taken:  # endless copies of one tensor could fill the memory
                raise BadCheckpoint(f"{self.path} uses the tensor {name} twice")
            taken.add(name)
            return mapped[name].clone() if copied else mapped[name]

        return put_together(stored, get)


def load(stored: Stored, now: Situation) -> Resumed:
    """Load the checkpoint into model, optimizer, scaler, attached states and random generators.

    Anything that does not fit is refused before anything is changed.
    """
    stage, content = now.stage, stored.content
    model_state = stored.model_state(copied=False)
    _check_model(stage, model_state, content["model"]["shared"])
    _check_optimizer(stage, content["optimizer"])
    states, scaler = stored.state("states"), stored.state("scaler")
    extra, streams = stored.state("extra"), stored.state("random")
    check_states(states)
    check_scaler_state(scaler)
    check_random_state(streams, now.device)
    optimizer_state = _state_for(stage, stored)
    _load_states(now.states, states)
    _load_model(stage, model_state)
    _load_optimizer(stage, optimizer_state)
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


def _advice(path: Path) -> str:
    others = [one for one in checkpoints(path.parent) if one != path]
    return f"there is also {others[-1]}" if others else "there is no other checkpoint beside it"


def _laid_out(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """The tensor, laid out in memory with this stride."""
    if stride is None or tuple(stride) == tensor.stride():
        return tensor
    if not fits_closely(tensor.shape, stride):
        raise BadCheckpoint(f"a tensor of {_say(tensor)} cannot have the strides {list(stride)}")
    lying = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device="cpu")
    return lying.copy_(tensor)


def _as_plain(state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """An optimizer's state as a plain optimizer would keep it for these parameters.

    State is laid out in memory like its parameter: fused kernels go through both in memory order. A
    placeholder for a parameter on the host does not show its layout; the host optimizer that keeps
    its state knows it.
    """
    try:
        plain = plain_state_dict(state_dict, dict(enumerate(parameters)))
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
        raise BadCheckpoint(f"the 8-bit state of the optimizer is none: {error}") from None

    def like(at: Any, value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.shape == parameters[at].shape
        stride = parameters[at].stride()
        return _laid_out(value, stride) if alike and any(stride) else value

    state = {
        at: one if isinstance(at, str) else {key: like(at, value) for key, value in one.items()}
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
    """Notes on what makes numbers differ, be it only in their last bits."""
    try:
        then = stored.plan()
    except OomphError as error:
        return [f"the saved plan cannot be compared with this one: {error}"]
    before, after = (_by_name(one.choices.concerning_tensors) for one in (then, now))
    names = dict.fromkeys((*before, *after))
    changed = [name for name in names if before.get(name) != after.get(name)]
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


def _by_name(choices: Choices) -> dict[str, Any]:
    """What is chosen, with the settings of each technique beside the other fields."""
    values = choices.as_dict()
    return {**values, **values.pop("techniques")}


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
    """Load the state of one attached object, and wrap its errors."""
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
            with contextlib.suppress(Exception):  # it may be the one that rejected its state
                states[name].load_state_dict(state)
        raise


def _load_model(stage: Stage, saved: Mapping[str, Any]) -> None:
    stage.model.load_state_dict(saved)
    if stage.masters is None:
        return
    for name, parameter in stage.model.named_parameters():
        if stage.masters.master_of(parameter) is not parameter:
            stage.masters.write(parameter, saved[name])


def _state_for(stage: Stage, stored: Stored) -> dict[str, Any]:
    """The optimizer's saved state, converted to what this one keeps."""
    optimizer = stage.optimizer
    assert optimizer is not None, "a run has an optimizer"
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Only state that stays on the CPU, outside a host optimizer, needs to be copied here; any other
    # destination makes its own copy.
    stays = stage.host is None and any(parameter.device.type == "cpu" for parameter in owned)
    state = stored.optimizer_state(copied=stays)
    check_settings(state["param_groups"], optimizer.param_groups, optimizer.defaults)
    if has_low_bit_state(optimizer):
        return state
    plain = _as_plain(state, owned)
    check_tensors_of(optimizer, plain)
    return plain


def _load_optimizer(stage: Stage, state: dict[str, Any]) -> None:
    optimizer = stage.optimizer
    assert optimizer is not None, "a run has an optimizer"
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()  # otherwise both states would be on the device
    optimizer.load_state_dict(state)
    if stage.in_backward is not None:
        stage.in_backward.dirty = False
    if stage.pieces is not None:
        stage.pieces.half_done = False
