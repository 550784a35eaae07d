"""Chooses the attention kernel that a GPU would run, and calls that kernel's own op.

The kernels save different tensors for backward and need different workspaces, so the choice makes
gigabytes of difference. The rules are those of ATen's `sdp_utils.cpp` (torch 2.11 to 2.13); the ops
are called on fake tensors, so that autograd saves what it would save on the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from oomph.hardware import GPU

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


class Kernel(StrEnum):
    """The attention kernels in CUDA builds of PyTorch."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of scaled dot product attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False
    """Whether several query heads may share one key and value head."""

    @property
    def wants_gradient(self) -> bool:
        """Whether the call will have a backward pass."""
        return _wants_gradient(self.query, self.key, self.value)

    @property
    def fits_fused_kernels(self) -> bool:
        """Requirements of all fused kernels: four dimensions, non-empty sequences, dense rows."""
        query, key, value = self.query, self.key, self.value
        return (
            query.dim() == key.dim() == value.dim() == 4
            and min(query.shape[2], key.shape[2]) > 0
            and all(
                t is None or t.stride(-1) == 1 or t.shape[-1] == 1
                for t in (query, key, value, self.mask)
            )
        )

    @property
    def heads_match(self) -> bool:
        """Whether query, key and value have the same number of heads."""
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]


def choose_kernel(gpu: GPU, call: Attention) -> Kernel:
    """The first kernel, in the GPU's order of preference, whose conditions hold."""
    capability = gpu.compute_capability or (9, 0)
    conditions = {
        Kernel.CUDNN: (_cudnn_can, torch.backends.cuda.cudnn_sdp_enabled),
        Kernel.FLASH: (_flash_can, torch.backends.cuda.flash_sdp_enabled),
        Kernel.EFFICIENT: (_efficient_can, torch.backends.cuda.mem_efficient_sdp_enabled),
    }
    # cuDNN's kernels come first on data-centre Hopper and Blackwell only.
    if capability[0] not in (9, 10):
        del conditions[Kernel.CUDNN]
    for kernel, (can, enabled) in conditions.items():
        if enabled() and call.fits_fused_kernels and can(capability, call):
            return kernel
    return Kernel.MATH


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _cudnn_can(capability: tuple[int, int], call: Attention) -> bool:
    widths = call.query.shape[-1], call.value.shape[-1]
    # 192 with 128 is the only wider pair that cuDNN 9.11+ takes on these cards.
    limit = 192 if widths == (192, 128) else 128
    return (
        capability >= (8, 0)
        and call.query.dtype in _HALF
        and not (call.mask is not None and _wants_gradient(call.mask))
        and (call.grouped or call.heads_match)
        and max(widths) <= limit
        and all(width % 8 == 0 for width in widths)
        and call.key.shape[2] != 1
        and (call.dropout == 0.0 or call.query.shape[2] != 1)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash_can(capability: tuple[int, int], call: Attention) -> bool:
    width = call.query.shape[-1]
    if (8, 6) <= capability <= (8, 9) or capability[0] == 12:
        too_wide = width > 192 and not (call.dropout == 0.0 and width > 224)
        if too_wide and call.wants_gradient:
            return False
    return (
        capability >= (8, 0)
        and call.mask is None
        and call.query.dtype in _HALF
        and (call.grouped or call.heads_match)
        and width == call.key.shape[-1] == call.value.shape[-1] <= 256
        and not (call.causal and call.query.shape[2] != call.key.shape[2])
    )


def _efficient_can(capability: tuple[int, int], call: Attention) -> bool:
    half = call.query.dtype in _HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    if tensor_cores:
        alignment = max(alignment, 8 if half else 4)
    dtypes = (torch.float16, torch.float32) + ((torch.bfloat16,) if capability >= (8, 0) else ())
    given = (call.query, call.key, call.value, call.mask)
    return (
        call.query.dtype in dtypes
        and all(tensor is None or tensor.stride(-1) == 1 for tensor in given)
        and call.heads_match
        and call.query.shape[-1] == call.key.shape[-1]
        and call.query.shape[-1] % alignment == 0
        and call.value.shape[-1] % alignment == 0
    )


def attend(gpu: GPU, call: Attention) -> Tensor:
    """Attention as the GPU would run it, on fake tensors."""
    run = {
        Kernel.CUDNN: _run_cudnn,
        Kernel.FLASH: _run_flash,
        Kernel.EFFICIENT: _run_efficient,
        Kernel.MATH: _run_math,
    }[choose_kernel(gpu, call)]
    result: Tensor = run(call)
    return result


def _run_math(call: Attention) -> Any:
    return aten._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        call.mask,
        call.dropout,
        call.causal,
        None,
        scale=call.scale,
        enable_gqa=call.grouped,
    )[0]


def _run_cudnn(call: Attention) -> Any:
    mask = _as_float_mask(call.mask, call.query.dtype)
    saves, given = call.wants_gradient, (call.query, call.key, call.value)
    return aten._scaled_dot_product_cudnn_attention(
        *given, mask, saves, call.dropout, call.causal, False, scale=call.scale
    )[0]


def _run_flash(call: Attention) -> Any:
    width = call.query.shape[-1]
    # The kernel needs a multiple of eight; the scale stays that of the true width.
    scale = call.scale if call.scale is not None else width**-0.5
    padded = [_pad_last(tensor, 8) for tensor in (call.query, call.key, call.value)]
    out = aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _run_efficient(call: Attention) -> Any:
    mask = _as_float_mask(call.mask, call.query.dtype)
    if mask is not None:
        mask = _aligned_mask(mask).expand(*call.query.shape[:3], call.key.shape[2])
    saves, given = call.wants_gradient, (call.query, call.key, call.value)
    return aten._scaled_dot_product_efficient_attention(
        *given, mask, saves, call.dropout, call.causal, scale=call.scale
    )[0]


def _as_float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Fused kernels add the mask: a boolean mask becomes zeros and minus infinities first."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    # On the mask's device: a block that is traced for compiling is not on the GPU.
    low, zero = (torch.scalar_tensor(x, dtype=dtype, device=mask.device) for x in (-math.inf, 0.0))
    return torch.where(mask, zero, low)


def _pad_last(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned_mask(mask: Tensor) -> Tensor:
    """Pad rows to the 16-byte multiple that the efficient kernel needs, then slice them back."""
    width = mask.shape[-1]
    if width % 8 == 0:
        return mask
    return _pad_last(mask, 8)[..., :width]
