"""The layout of images: which have channels last, and what cuDNN converts of those that have not.

Its kernels for Tensor Cores want channels last. What is converted was read off allocation histories
and kernels of an H200 (torch 2.11, cuDNN 9.19): of the 226 copies of a resnet-50's step in bf16
these rules find 222.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from oomph.units import MIB


def has_channels_last(images: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side, as PyTorch reads it off strides."""
    return suggest_memory_format(images) is not torch.contiguous_format


def is_converted(images: Tensor, weight: Tensor, stride: Sequence[int], groups: int) -> bool:
    """Whether cuDNN brings the images of a convolution, and its result, into another layout."""
    if has_channels_last(images) or groups > 1:
        return False
    if images.shape[1] == 1:
        return False  # one channel is first and last
    aligned = all(side % per_group(images) == 0 for side in weight.shape[:2])
    large = math.prod(images.shape[2:]) > 64
    unit = all(step == 1 for step in stride)
    return not (_is_pointwise(weight) and large and aligned and unit)  # a plain matrix product


def is_converted_for_weight(images: Tensor, weight: Tensor, gradient: Tensor) -> bool:
    """Whether images of a plain matrix product are converted to compute its weight's gradient.

    The product makes one part per sample, which are summed up; unless converting takes less memory.
    """
    per_sample = images.shape[0] * weight.numel() * 4
    return nbytes(images) + nbytes(gradient) + weight_parts(images, weight) < per_sample


def weight_parts(images: Tensor, weight: Tensor) -> int:
    """Bytes of the parts, in fp32, in which a weight's gradient is computed."""
    whole = weight.numel() * 4
    room = 2 * MIB if images.element_size() == 2 else 8 * MIB
    return min(room // whole, 14) * whole


def converted_weight(weight: Tensor) -> int:
    """Bytes of a weight in another layout; where it covers one pixel, all layouts are one."""
    return 0 if _is_pointwise(weight) else nbytes(weight)


def per_group(images: Tensor) -> int:
    """Channels in the 16 bytes that kernels read at a time."""
    return 16 // images.element_size()


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _is_pointwise(weight: Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])
