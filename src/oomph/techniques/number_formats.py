"""The number formats that a layer can multiply in, as fallbacks from the safest down."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch

from oomph.errors import BadInput, UnknownName

#: GPUs have TF32 and bf16 from the first compute capability on, and FP8 from the second.
_AMPERE, _HOPPER = (8, 0), (9, 0)


class Level(StrEnum):
    """The number format of a layer's matrix products, the safest first."""

    FP32 = "fp32"
    TF32 = "tf32"
    """fp32 with 10 bits of mantissa inside products."""
    BF16 = "bf16"
    """Autocast to bf16."""
    FP16 = "fp16"
    """Autocast to fp16, for GPUs without bf16."""
    FP8 = "fp8"
    """Autocast to bf16, with linear layers in FP8."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype that autocast uses; None where autocast is off."""
        half = {Level.BF16: torch.bfloat16, Level.FP16: torch.float16, Level.FP8: torch.bfloat16}
        return half.get(self)


#: By a job's precision: the level of all its layers.
LEVELS = {
    "fp32": Level.FP32,
    "tf32": Level.TF32,
    "bf16-mixed": Level.BF16,
    "fp16-mixed": Level.FP16,
}


def make_ladder(names: Sequence[str]) -> tuple[Level, ...]:
    """The levels with these names, which must begin with fp32 and go down."""
    order = list(Level)
    for name in names:
        if name not in order:
            raise UnknownName("level", str(name), order, f"levels are {', '.join(order)}")
    ladder = tuple(map(Level, names))
    places = [order.index(level) for level in ladder]
    if places != sorted(set(places)):
        raise BadInput(f"a ladder goes down: {', '.join(order)}; not {', '.join(ladder)}")
    if len(ladder) < 2 or ladder[0] is not Level.FP32:
        raise BadInput(
            "a ladder has fp32, with which the others are compared, and at least one level below;"
            f" not {', '.join(ladder) or 'nothing'}"
        )
    return ladder


def ladder_of(device: torch.device, own: Level, *, compiled: bool) -> tuple[Level, ...]:
    """The levels of this device, from the slowest to the fastest, and the job's own level.

    FP8 is for compiled layers only: elsewhere, rounding costs more time than FP8 saves.
    """
    levels = {Level.FP32, own}
    capability = (0, 0)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    if capability >= _AMPERE:
        levels.add(Level.TF32)
    if own is Level.FP16 or (device.type == "cuda" and capability < _AMPERE):
        levels.add(Level.FP16)
    else:
        levels.add(Level.BF16)
        if compiled and capability >= _HOPPER:
            levels.add(Level.FP8)
    return tuple(level for level in Level if level in levels)
