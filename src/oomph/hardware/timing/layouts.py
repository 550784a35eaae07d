"""Image layouts: which images are channels-last, and what cuDNN converts of the others.

cuDNN's Tensor Core kernels need channels-last. The rules for conversions come from allocation
histories and kernels of an H200 (torch 2.11, cuDNN 9.19): of the 226 copies in a resnet-50's step
in bf16 these rules find 222.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oomph.torch_compat.tensors import suggest_memory_format
from oomph.units import MIB


def has_channels_last(images: Tensor) -> bool:
    """Whether the channels of a pixel are adjacent, as PyTorch infers from strides."""
    return suggest_memory_format(images) is not torch.contiguous_format


def is_converted(images: Tensor, weight: Tensor, stride: Sequence[int], groups: int) -> bool:
    """Whether cuDNN converts a convolution's images, and its result, to another layout."""
    if has_channels_last(images) or groups > 1:
        return False
    if images.shape[1] == 1:
        return False  # one channel is both first and last
    aligned = all(side % per_group(images) == 0 for side in weight.shape[:2])
    large = math.prod(images.shape[2:]) > 64
    unit = all(step == 1 for step in stride)
    return not (_is_pointwise(weight) and large and aligned and unit)  # a plain matrix product


def is_converted_for_weight(images: Tensor, weight: Tensor, gradient: Tensor) -> bool:
    """Whether images of a plain matrix product are converted to compute its weight's gradient.

    Without conversion, the product makes one partial gradient per sample, which are summed up;
    cuDNN converts if that takes less memory.
    """
    per_sample = images.shape[0] * weight.numel() * 4
    return nbytes(images) + nbytes(gradient) + weight_parts(images, weight) < per_sample


def weight_parts(images: Tensor, weight: Tensor) -> int:
    """Bytes of the fp32 partial results in which a weight's gradient is computed."""
    whole = weight.numel() * 4
    room = 2 * MIB if images.element_size() == 2 else 8 * MIB
    return min(room // whole, 14) * whole


def converted_weight(weight: Tensor) -> int:
    """Bytes of a weight in another layout; for single-pixel ones, all layouts are the same."""
    return 0 if _is_pointwise(weight) else nbytes(weight)


def per_group(images: Tensor) -> int:
    """Channels in the 16 bytes that kernels read at a time."""
    return 16 // images.element_size()


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _is_pointwise(weight: Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])
