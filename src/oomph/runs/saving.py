"""Saves a run to disk in the format of the plain job (rule 8).

A checkpoint is a folder. `model.safetensors` holds the model's own state dict; the other two such
files hold the tensors of the optimizer and of everything else. `checkpoint.json` holds the rest:
how the tensors belong together, and the size and checksum of each file.

Nothing in it depends on the plan: master weights are saved as the model's fp32 weights, a fused
optimizer's state as a plain one's. Only 8-bit state is saved as it is, so that it can be restored
exactly; it is converted when it is loaded for anything else.

Tensors are written in pieces: saving takes no memory on the device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from oomph.engine.step import Stage
from oomph.errors import BadInput
from oomph.files.writing import open_new
from oomph.plans.plan import Plan
from oomph.process.random_state import get_random_state
from oomph.runs.checkpoint_folder import MANIFEST, checkpoints, new_checkpoint
from oomph.runs.nested_state import DEEPEST, JSON_LEVELS, take_apart
from oomph.runs.tensor_files import size_of, write_tensors

SCHEMA_VERSION = 1
KIND = "oomph checkpoint"

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"

#: Limits on a manifest: bytes, values and nesting levels.
LARGEST_MANIFEST, MOST_IN_MANIFEST = 2 << 30, 200_000_000
DEEPEST_MANIFEST = JSON_LEVELS * DEEPEST + 20

#: An upper bound on the disk space needed beyond the files' own sizes.
_MARGIN = 1 << 16


class Stateful(Protocol):
    """An object saved with a run: a scheduler, a loader, or anything else with a state."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, made of numbers, strings, lists, dictionaries and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore the state that `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The complete state of a run between two steps."""

    plan: Plan
    stage: Stage
    device: torch.device
    step: int
    states: Mapping[str, Stateful]
    extra: Any = None
    """Any other data that the user wants to save."""


def save(now: Situation, folder: Path, *, keep: int) -> Path:
    """Write a checkpoint to the folder, keep the last `keep` there, and return its path."""
    files: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}, STATE: {}}
    state = files[STATE]
    content = {
        "step": now.step,
        "torch": torch.__version__,
        "plan": now.plan.as_dict(),
        "model": _take_model_apart(now.stage, files[MODEL], state),
        "optimizer": {
            "class": type(now.stage.optimizer).__name__,
            "parameters": optimized_parameters(now.stage),
            "state": take_apart(now.stage.optimizer_state(), "optimizer", files[OPTIMIZER]),
        },
        "scaler": take_apart(scaler_state(now.stage), "scaler", state),
        "random": take_apart(get_random_state(now.device), "random", state),
        "states": {
            name: take_apart(one.state_dict(), f"states.{name}", state)
            for name, one in now.states.items()
        },
        "extra": take_apart(now.extra, "extra", state),
    }
    size = sum(map(size_of, files.values())) + _size_of_manifest(content) + _MARGIN
    with new_checkpoint(folder, step=now.step, size=size, keep=keep) as private:
        host = now.stage.host
        numbers = [host.numbers] if host is not None else []
        written = {name: write_tensors(private / name, files[name], *numbers) for name in files}
        content["files"] = {name: dataclasses.asdict(one) for name, one in written.items()}
        _write_manifest(private / MANIFEST, content)
    return checkpoints(folder)[-1]


def plain_model_state(stage: Stage) -> dict[str, Any]:
    """The model's state dict as it would be without a plan; see `Stage.model_state`."""
    masters = stage.masters
    state = stage.model_state()
    if masters is not None:
        for name, parameter in stage.model.named_parameters(remove_duplicate=False):
            if (master := masters.master_of(parameter)) is not parameter and name in state:
                state[name] = master
    return state


def optimized_parameters(stage: Stage) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups."""
    assert stage.optimizer is not None, "a run has an optimizer"
    names = {parameter: name for name, parameter in stage.model.named_parameters()}
    leaf_of = stage.masters.leaf_of if stage.masters is not None else lambda owned: owned
    return [
        [names[leaf_of(owned)] for owned in group["params"]]  # type: ignore[index]
        for group in stage.optimizer.param_groups
    ]


def scaler_state(stage: Stage) -> dict[str, Any] | None:
    """The state of fp16's loss scaler; None without one."""
    return stage.scaler.state_dict() if stage.scaler is not None else None


def checksum_of(content: Mapping[str, Any]) -> str:
    """A checksum that shows whether a manifest was changed."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def same_tensors(state: Mapping[str, Any]) -> dict[str, str]:
    """By name: the first name of the same tensor, as tied weights have several."""
    first: dict[Any, str] = {}
    shared = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            place = value.device, value.data_ptr(), value.shape, value.stride(), value.dtype
            owner = first.setdefault(place, name)
            if owner != name:
                shared[name] = owner
    return shared


def _take_model_apart(
    stage: Stage, tensors: dict[str, Tensor], others: dict[str, Tensor]
) -> dict[str, Any]:
    state = plain_model_state(stage)
    shared = same_tensors(state)
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    tensors.update(
        (name, value) for name, value in state.items() if name not in shared and name not in extra
    )
    # Parameters have their masters' layout; masters elsewhere may not show it.
    laid_out = stage.model_state()
    if (host := stage.host) is not None:
        laid_out |= {name: host.lies_as(laid_out[name]) for name in tensors}
    return {
        "names": list(state),
        "shared": shared,
        "strides": {name: laid_out[name].stride() for name in tensors if _permuted(laid_out[name])},
        "extra": take_apart(extra, "model", others),
    }


def _permuted(tensor: Tensor) -> bool:
    """Whether it has its dimensions permuted in memory, without gaps."""
    return not tensor.is_contiguous() and (
        torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def _size_of_manifest(content: Mapping[str, Any]) -> int:
    """Size in bytes; refuses a manifest that could not be read again."""
    text = json.dumps(content)
    values = text.count("[") + text.count("{") + text.count(",")
    if len(text) + _MARGIN > LARGEST_MANIFEST or values + _MARGIN > MOST_IN_MANIFEST:
        raise BadInput(
            f"what is to be saved has {values:,} values beside its tensors, and a checkpoint at"
            f" most {MOST_IN_MANIFEST:,}: keep long lists of numbers in tensors"
        )
    return len(text)


def _write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    manifest = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "crc32": checksum_of(content),
        "content": content,
    }
    with open_new(path) as file:
        file.write(json.dumps(manifest).encode())
        file.flush()
        os.fsync(file.fileno())
