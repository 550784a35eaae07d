"""Determines where a program ran out of memory, from the frames of the exception."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from oomph.errors import BadInput
from oomph.explaining.holders import own_frames
from oomph.explaining.logbook import Logbook
from oomph.torch_compat.autograd import RUN_BACKWARD
from oomph.torch_compat.modules import CALL
from oomph.units import parse_bytes

#: Usual names of functions that save a model.
_SAVING = {
    "state_dict",
    "save",
    "save_file",
    "save_model",
    "save_pretrained",
    "save_checkpoint",
    "save_state",
    "_save_checkpoint",
    "dump_checkpoint",
}
#: `cudaErrorMemoryAllocation`: raised by libraries that allocate from the driver themselves.
_DRIVER_IS_FULL = 2
#: The part of the allocator's error message with the size of the failed request.
_ASKED_FOR = re.compile(r"Tried to allocate ([\d.]+ (?:bytes|[KMG]iB))")


class Phase(StrEnum):
    """What a program was doing."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVAL = "eval"
    SAVE = "save"
    BETWEEN = "between steps"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Where memory ran out."""

    phase: Phase
    place: str
    """The innermost line of the user's own files: `train.py:41`."""
    module: str
    """The innermost running module; empty in backward and outside the model."""
    first_optimizer_step: bool

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "phase": str(self.phase),
            "place": self.place,
            "module": self.module,
            "first_optimizer_step": self.first_optimizer_step,
        }


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception means that the device is out of memory; by its type, not its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, torch.AcceleratorError)
        and getattr(error, "error_code", None) == _DRIVER_IS_FULL
    )


def size_asked_for(error: BaseException) -> int:
    """Bytes requested according to the allocator's error, to three or more digits; 0 if none."""
    said = _ASKED_FOR.search(str(error))
    if said is None:
        return 0
    with contextlib.suppress(BadInput):  # sizes that cannot be parsed count as none
        return parse_bytes(said[1].replace("bytes", "B"))
    return 0


def frames_of(traceback: TracebackType | None) -> list[FrameType]:
    """The frames the exception went through and their callers, innermost first."""
    inside = _frames_inside(traceback)
    return [*inside, *_callers(inside[-1] if inside else None)]


def forget_locals(frames: Sequence[FrameType]) -> None:
    """Drop the copies made by reading frames' locals: until Python 3.13 a frame keeps them."""
    for frame in frames:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(frame.f_locals, dict):
            frame.f_locals.clear()


def locate(traceback: TracebackType | None, logbook: Logbook) -> Failure:
    """Where the exception was raised."""
    frames = frames_of(traceback)
    raised_in = _frames_inside(traceback)
    optimizer = next((one for one in map(_optimizer_of, raised_in) if one is not None), None)
    modules = [frame.f_locals["self"] for frame in raised_in if _is_call_of_module(frame)]
    return Failure(
        phase=_phase(raised_in, logbook, optimizer is not None, bool(modules)),
        place=_place(frames, traceback),
        module=_path(modules),
        first_optimizer_step=optimizer is not None and logbook.is_first_step(optimizer),
    )


def _phase(
    frames: Sequence[FrameType], logbook: Logbook, in_optimizer: bool, in_module: bool
) -> Phase:
    if in_optimizer:
        return Phase.OPTIMIZER
    if any(map(_is_saving, frames)):
        return Phase.SAVE
    if any(map(_is_backward, frames)):
        return Phase.BACKWARD
    if logbook.evaluating:
        return Phase.EVAL
    if in_module or logbook.in_step:
        return Phase.FORWARD
    if not logbook.trained and not logbook.steps:
        return Phase.BUILD
    return Phase.BETWEEN


def _frames_inside(traceback: TracebackType | None) -> list[FrameType]:
    """The frames that the exception went through, innermost first."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames[::-1]


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        yield frame


def _optimizer_of(frame: FrameType) -> torch.optim.Optimizer | None:
    """The optimizer, if the frame is its step."""
    if frame.f_code.co_name != "step":
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, torch.optim.Optimizer) else None


def _is_saving(frame: FrameType) -> bool:
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    return name in _SAVING or file.endswith(("torch/serialization.py", "safetensors/torch.py"))


def _is_backward(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("backward", "grad", RUN_BACKWARD) and (
        "torch/autograd" in frame.f_code.co_filename.replace("\\", "/")
    )


def _is_call_of_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == CALL and isinstance(frame.f_locals.get("self"), nn.Module)


def _path(modules: Sequence[nn.Module]) -> str:
    """The path of the innermost module within the outermost."""
    if not modules:
        return ""
    innermost, root = modules[0], modules[-1]
    for path, module in root.named_modules():
        if module is innermost:
            return path or type(root).__name__
    return type(innermost).__name__


def _place(frames: Sequence[FrameType], traceback: TracebackType | None) -> str:
    lines = {}
    while traceback is not None:
        lines[traceback.tb_frame] = traceback.tb_lineno
        traceback = traceback.tb_next
    for frame in own_frames(frames):
        number = lines.get(frame, frame.f_lineno)
        return f"{Path(frame.f_code.co_filename).name}:{number}"
    return ""
