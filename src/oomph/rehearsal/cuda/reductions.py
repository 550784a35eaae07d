"""The scratch memory of CUDA reductions (sum, mean, norm …), from ATen's launch configuration.

If few outputs are each reduced from many inputs, the work is split over blocks that combine their
results in a buffer in global memory. That buffer can be larger than the reduced tensor: the bias
gradient of one wide linear layer takes 132 MiB on an H200. The rules are those of ATen's
`Reduce.cuh`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_VECTOR = 4


def reduction_scratch(
    tensor: Tensor,
    dims: Sequence[int],
    *,
    accumulator_bytes: int,
    sm_count: int,
    threads_per_sm: int,
) -> list[int]:
    """Bytes of (buffer, semaphores) that reducing `tensor` over `dims` takes; empty if none."""
    if tensor.numel() == 0:
        return []
    wanted = {dim % max(tensor.dim(), 1) for dim in dims} or set(range(tensor.dim()))
    reduced = _coalesced(tensor, wanted)
    kept = _coalesced(tensor, set(range(tensor.dim())) - wanted)
    outputs = math.prod(size for size, _ in kept)
    inputs = tensor.numel() // outputs
    if not reduced:
        return []

    along_fastest = not kept or reduced[0][1] < kept[0][1]
    dim0, dim1 = (inputs, outputs) if along_fastest else (outputs, inputs)
    vector = 1
    if along_fastest:
        if reduced[0][1] == 1 and dim0 >= 128 and len(reduced) == 1:
            dim0 //= _VECTOR
    elif kept[0][1] == 1:
        vector = _output_vector(tensor, reduced, kept)
        dim0 //= vector

    most = _MAX_THREADS // vector
    width_limit, height_limit = _power_below(dim0, most), _power_below(dim1, most)
    width = min(width_limit, _WARP)
    height = min(height_limit, most // width)
    width = min(width_limit, most // height)

    step_input, step_output = (width, 1) if along_fastest else (1, width)
    across_warps = _up(inputs, step_input) >= min(height * 16, _MAX_VALUES_PER_THREAD)
    if across_warps:
        step_input *= height
    else:
        step_output *= height
    grid = _up(outputs // vector, step_output)
    target = sm_count * (threads_per_sm // (width * height))
    per_thread = _up(inputs, step_input)
    if not across_warps or per_thread < _MAX_VALUES_PER_THREAD or grid > target:
        return []
    blocks = max(
        min(_up(target, grid), _up(per_thread, _MIN_VALUES_PER_THREAD)),
        _up(per_thread, _MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return []
    buffer = accumulator_bytes * outputs * blocks
    if not along_fastest:
        buffer *= width * vector
    return [buffer, 4 * grid]


def _coalesced(tensor: Tensor, dims: set[int]) -> list[tuple[int, int]]:
    """(size, stride) of these dimensions, fastest first, with adjacent dimensions merged."""
    pairs = sorted(
        ((tensor.shape[dim], tensor.stride(dim)) for dim in dims if tensor.shape[dim] != 1),
        key=lambda pair: pair[1],
    )
    merged: list[tuple[int, int]] = []
    for size, stride in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def _output_vector(
    tensor: Tensor, reduced: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]
) -> int:
    """How many outputs one load can serve: 4, 2 or 1, as size, strides and offset allow."""
    vector = _VECTOR
    strides = [stride for _, stride in (*reduced, *kept[1:])]
    for quantity in (tensor.storage_offset(), kept[0][0], *strides):
        while quantity % vector:
            vector //= 2
    return vector


def _power_below(value: int, most: int) -> int:
    """The largest power of two up to `value`, or `most` if `value` is at least that."""
    return most if value >= most else 1 << max(value.bit_length() - 1, 0)


def _up(a: int, b: int) -> int:
    return -(-a // b)
