"""Which attention kernel a GPU would run, and a call of that kernel's own op.

The kernels save different things for backward and need different workspaces, so the choice decides
gigabytes. The rules are those of ATen's `sdp_utils.cpp` (torch 2.11 to 2.13); the ops are called on
fake tensors, so that autograd saves what it would save on the GPU.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


class Kernel(StrEnum):
    """The ways CUDA builds of PyTorch compute attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def choose_kernel(
    gpu: GPU,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> Kernel:
    """The first kernel, in the GPU's order of preference, whose conditions hold."""
    capability = gpu.compute_capability or (9, 0)
    # cuDNN's kernels come first on data-centre Hopper and Blackwell only.
    prefers_cudnn = capability[0] in (9, 10)
    order = [Kernel.FLASH, Kernel.EFFICIENT]
    if prefers_cudnn:
        order.insert(0, Kernel.CUDNN)
    checks = {Kernel.CUDNN: _cudnn_can, Kernel.FLASH: _flash_can, Kernel.EFFICIENT: _efficient_can}
    for kernel in order:
        if _enabled(kernel) and checks[kernel](
            capability, query, key, value, mask, dropout, causal, grouped
        ):
            return kernel
    return Kernel.MATH


def _enabled(kernel: Kernel) -> bool:
    """Whether the user left this kernel on (`torch.nn.attention.sdpa_kernel` turns it off)."""
    cuda = torch.backends.cuda
    return bool(
        {
            Kernel.CUDNN: cuda.cudnn_sdp_enabled,
            Kernel.FLASH: cuda.flash_sdp_enabled,
            Kernel.EFFICIENT: cuda.mem_efficient_sdp_enabled,
        }[kernel]()
    )


def _dense_4d(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.dim() == key.dim() == value.dim() == 4 and min(query.shape[2], key.shape[2]) > 0


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.shape[1] == key.shape[1] == value.shape[1]


def _last_stride_is_one(*tensors: Tensor | None) -> bool:
    return all(t is None or t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _cudnn_can(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> bool:
    d_query, d_value = query.shape[-1], value.shape[-1]
    # 192 against 128 is the one wider pair cuDNN 9.11+ takes on these cards.
    limit = 192 if (d_query, d_value) == (192, 128) else 128
    return (
        capability >= (8, 0)
        and query.dtype in _HALF
        and not (mask is not None and _wants_gradient(mask))
        and _dense_4d(query, key, value)
        and _last_stride_is_one(query, key, value, mask)
        and (grouped or _same_heads(query, key, value))
        and max(d_query, d_value) <= limit
        and d_query % 8 == 0
        and d_value % 8 == 0
        and key.shape[2] != 1
        and (dropout == 0.0 or query.shape[2] != 1)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash_can(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> bool:
    width = query.shape[-1]
    if (8, 6) <= capability <= (8, 9) or capability[0] == 12:
        wide_gradient = width > 192 and not (dropout == 0.0 and width > 224)
        if wide_gradient and _wants_gradient(query, key, value):
            return False
    return (
        capability >= (8, 0)
        and mask is None
        and query.dtype in _HALF
        and _dense_4d(query, key, value)
        and _last_stride_is_one(query, key, value, mask)
        and (grouped or _same_heads(query, key, value))
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and not (causal and query.shape[2] != key.shape[2])
    )


def _efficient_can(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> bool:
    half = query.dtype in _HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    if tensor_cores:
        alignment = max(alignment, 8 if half else 4)
    dtypes = (torch.float16, torch.float32) + ((torch.bfloat16,) if capability >= (8, 0) else ())
    return (
        query.dtype in dtypes
        and _dense_4d(query, key, value)
        and all(t is None or t.stride(-1) == 1 for t in (query, key, value, mask))
        and _same_heads(query, key, value)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def attend(
    gpu: GPU,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Tensor:
    """Scaled dot product attention as the GPU would run it, on fake tensors."""
    kernel = choose_kernel(gpu, query, key, value, mask, dropout, causal, grouped)
    if kernel is Kernel.MATH:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=grouped
        )
        return out[0]  # type: ignore[no-any-return]
    saves = _wants_gradient(query, key, value)
    mask = _as_float_mask(mask, query.dtype)
    result: Any
    if kernel is Kernel.CUDNN:
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, saves, dropout, causal, False, scale=scale
        )
    elif kernel is Kernel.FLASH:
        width = query.shape[-1]
        # The kernel wants a multiple of eight; the scale stays that of the true width.
        scale = scale if scale is not None else width**-0.5
        padded = [_pad_last(tensor, 8) for tensor in (query, key, value)]
        result = aten._scaled_dot_product_flash_attention(
            *padded, dropout, causal, False, scale=scale
        )
        return result[0][..., :width] if width % 8 else result[0]  # type: ignore[no-any-return]
    else:
        if mask is not None:
            mask = _aligned_mask(mask).expand(*query.shape[:3], key.shape[2])
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, saves, dropout, causal, scale=scale
        )
    return result[0]  # type: ignore[no-any-return]


def _as_float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Fused kernels add the mask: a boolean one becomes zeros and minus infinities first."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    low, zero = (torch.scalar_tensor(x, dtype=dtype, device="cuda") for x in (-math.inf, 0.0))
    return torch.where(mask, zero, low)


def _pad_last(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned_mask(mask: Tensor) -> Tensor:
    """The efficient kernel wants rows of a multiple of 16 bytes: pad, then show the true width."""
    width = mask.shape[-1]
    if width % 8 == 0:
        return mask
    return _pad_last(mask, 8)[..., :width]
