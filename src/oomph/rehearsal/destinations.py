"""Where a call wants a tensor: parses the arguments of `to`, `cuda`, `cpu` and `type`.

Modules and tensors take the same arguments for `to`, by position or by keyword; both are parsed
here, so that no spelling works for one and is missed for the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.rehearsal.recorder import Recorder, Side, is_gpu

#: Names of the positional arguments, by the type of the first one.
_AFTER_A_DEVICE = ("device", "dtype", "non_blocking", "copy")
_AFTER_A_DTYPE = ("dtype", "non_blocking", "copy")
_AFTER_A_TENSOR = ("tensor", "non_blocking", "copy")

#: The dtypes of PyTorch's old tensor types: `torch.cuda.FloatTensor` is `float32` on the GPU.
OLD_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
_NAMES = {dtype: name for name, dtype in OLD_TYPES.items()}
_OLD_TYPE = re.compile(rf"torch\.(cuda\.)?({'|'.join(OLD_TYPES)})")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The side and properties that a tensor should have; None where they stay as they are."""

    side: Side | None = None
    dtype: torch.dtype | None = None
    copies: bool = False
    """Whether to copy even if the tensor already matches."""
    non_blocking: bool = False
    memory_format: torch.memory_format | None = None


def destination_of_to(
    recorder: Recorder, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Destination:
    """The destination that `to(*args, **kwargs)` of a tensor or module asks for.

    PyTorch has already parsed the arguments, and refused unknown ones.
    """
    first = args[0] if args else None
    names: tuple[str, ...] = _AFTER_A_DEVICE
    if isinstance(first, Tensor) or "tensor" in kwargs:
        names = _AFTER_A_TENSOR
    elif isinstance(first, torch.dtype):
        names = _AFTER_A_DTYPE
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    device, dtype, other = given.get("device"), given.get("dtype"), given.get("tensor")
    side = None if device is None else side_of_device(device)
    if other is not None:
        side, dtype = recorder.side_of(other), other.dtype
    return Destination(
        side=side,
        dtype=dtype,
        copies=bool(given.get("copy", False)),
        non_blocking=bool(given.get("non_blocking", False)),
        memory_format=given.get("memory_format"),
    )


def destination_of_type(wanted: Any, *, non_blocking: bool = False) -> Destination | None:
    """The destination that `type(wanted)` asks for; None if it names no known type."""
    if isinstance(wanted, torch.dtype):
        return Destination(dtype=wanted, non_blocking=non_blocking)
    if not isinstance(wanted, str):
        wanted = f"{getattr(wanted, '__module__', '')}.{getattr(wanted, '__name__', '')}"
    match = _OLD_TYPE.fullmatch(wanted)
    if match is None:
        return None
    on_gpu, name = match.groups()
    side = Side.GPU if on_gpu else Side.HOST
    return Destination(side=side, dtype=OLD_TYPES[name], non_blocking=non_blocking)


def name_of_type(side: Side, dtype: torch.dtype) -> str | None:
    """A tensor's `type()`, as "torch.cuda.FloatTensor"; None for dtypes without a name."""
    name = _NAMES.get(dtype)
    return name and f"torch.{'cuda.' if side is Side.GPU else ''}{name}"


def side_of_device(device: Any) -> Side:
    """The side that a device, in any notation, belongs to."""
    return Side.GPU if is_gpu(device) else Side.HOST
