"""Precision: autocast to bf16 or fp16, fp16's loss scaler, and TF32 for fp32 products."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from oomph.job import AUTOCAST
from oomph.techniques.technique import Undo


def autocast(
    precision: str, device_type: str, *, cast_cache: bool = True
) -> AbstractContextManager[Any]:
    """The autocast region of a precision, or nothing where it has none.

    With `cast_cache` the weights' half-precision copies live for the whole region; without, each is
    made where it is used and dropped when nothing saved it. The gradients of a weight that is used
    several times are then added in fp32 instead of half precision.
    """
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype, cache_enabled=cast_cache)


def make_scaler(precision: str, device_type: str) -> torch.amp.GradScaler | None:
    """fp16's loss scaler; other precisions need none."""
    return torch.amp.GradScaler(device_type) if precision == "fp16-mixed" else None


def use_tf32(on: bool = True) -> Undo:
    """Run fp32 matrix products and convolutions on Tensor Cores, with 10 bits of mantissa.

    With `on` false they are run in full, which is PyTorch's default for matrix products alone.
    """
    undo = remember_tf32()
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    return undo


def remember_tf32() -> Undo:
    """What puts the settings of `use_tf32` back as they are now."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def undo() -> None:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]

    return undo
