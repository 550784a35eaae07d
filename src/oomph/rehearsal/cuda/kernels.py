"""The memory that CUDA's kernels take beyond their outputs, op by op.

The formulas are taken from ATen's sources and checked against allocation histories of an H200
(torch 2.11, cuDNN 9.19). Where a library decides by itself, the formula is fitted to those
histories: CUB's sort, and the conversions and partial results seen in cuDNN's convolutions. Those
of cuDNN are marked as doubtful, which widens the estimate's interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.hardware import GPU
from oomph.hardware.timing.layouts import (
    converted_weight,
    has_channels_last,
    is_converted,
    per_group,
    weight_parts,
)
from oomph.rehearsal.cuda.recurrent import (
    cudnn_rnn,
    cudnn_rnn_backward,
    flatten_weights,
    rnn_workspace,
)
from oomph.rehearsal.cuda.reductions import reduction_scratch
from oomph.rehearsal.kept_storage import run_with_kept_storage
from oomph.rehearsal.products import grouped_product
from oomph.rehearsal.rules import Burst
from oomph.units import KIB, MIB

aten = torch.ops.aten
Arguments = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class CudaKernels:
    """The rules of one GPU."""

    gpu: GPU

    def replace(self, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Outputs of ops without a fake kernel, or whose fake kernel follows the CPU's rules."""
        make = _REPLACED.get(func)
        if make is None:
            return run_with_kept_storage(func, args, kwargs)
        return make(*args, **kwargs)

    def scratch(self, func: Any, args: Arguments, out: Any) -> Sequence[Burst]:
        """The memory allocated and freed inside the op: one burst after the other."""
        formula = _SCRATCH.get(func)
        return formula(self, args, out) if formula is not None else ()

    def fixed_part(
        self, func: Any, args: Arguments, in_backward: bool
    ) -> Sequence[tuple[str, int]]:
        """Workspaces that stay: cuBLAS keeps one per thread, and backward has its own thread."""
        if func not in _MATRIX_PRODUCTS:
            return ()
        thread = "backward" if in_backward else "forward"
        kept = [(f"cuBLAS workspace, {thread} thread", self.cublas_workspace)]
        if func is aten.addmm.default and args[0].dim() == 1:
            kept.append((f"cuBLASLt workspace, {thread} thread", MIB))
        return kept

    def output_order(self, func: Any) -> Sequence[int] | None:
        """The order in which the kernel allocates its outputs, where it is not the outputs' own."""
        return _OUTPUT_ORDER.get(func)

    def host_outputs(self, func: Any) -> Collection[int]:
        """Outputs that stay on the host: the efficient kernel keeps its random seed there."""
        return (2, 3) if func is aten._scaled_dot_product_efficient_attention.default else ()

    @property
    def cublas_workspace(self) -> int:
        """32 MiB on Hopper and later, 8.1 MiB before: the sizes NVIDIA recommends."""
        recent = self.gpu.compute_capability is not None and self.gpu.compute_capability >= (9, 0)
        return 32 * MIB if recent else (4096 * 2 + 16 * 8) * KIB

    @property
    def threads_per_sm(self) -> int:
        """Resident threads per multiprocessor, fixed per architecture by CUDA."""
        capability = self.gpu.compute_capability or (9, 0)
        if capability == (7, 5):
            return 1024
        return 1536 if capability in ((8, 6), (8, 9), (12, 0)) else 2048

    def reduction(self, tensor: Tensor, dims: Sequence[int], accumulator: int = 4) -> list[int]:
        """Scratch sizes for reducing `tensor` over `dims` on this GPU."""
        return reduction_scratch(
            tensor,
            dims,
            accumulator_bytes=accumulator,
            sm_count=self.gpu.sm_count,
            threads_per_sm=self.threads_per_sm,
        )


_MATRIX_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten.mv.default,
    aten.dot.default,
}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _up(a: int, b: int) -> int:
    return -(-a // b)


# -- outputs the fake kernels get wrong or do not know ---------------------------------------------


def _cudnn_batch_norm(input: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    stats = weight.new_empty(weight.shape), weight.new_empty(weight.shape)
    return torch.empty_like(input), *stats, input.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    input: Tensor, grad: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


def _native_group_norm(images: Tensor, *args: Any) -> tuple[Tensor, ...]:
    out, *statistics = aten.native_group_norm(images, *args)
    return out.new_empty(out.shape), *statistics


def _native_group_norm_backward(grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    of_images, *others = aten.native_group_norm_backward(grad, *args)
    return None if of_images is None else of_images.new_empty(of_images.shape), *others


def _cudnn_attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    out = list(aten._scaled_dot_product_cudnn_attention(query, *args, **kwargs))
    computes_log_sums = args[3]
    if not computes_log_sums:
        out[1] = query.new_empty(0, dtype=torch.float32)
    return tuple(out)


_REPLACED: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    aten._cudnn_rnn.default: cudnn_rnn,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward,
    aten._cudnn_rnn_flatten_weight.default: flatten_weights,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    # CUDA's group norm has no channels-last kernel, so its results are not channels last, either.
    aten.native_group_norm.default: _native_group_norm,
    aten.native_group_norm_backward.default: _native_group_norm_backward,
    aten._grouped_mm.default: grouped_product,
    # The CPU's histc takes only floats, CUDA's also integers.
    aten.histc.default: lambda tensor, bins=100, *_: tensor.new_empty(bins),
}


#: The mask before the masked result; the random seed before the attention's result.
_OUTPUT_ORDER: dict[Any, Sequence[int]] = {
    aten.native_dropout.default: (1, 0),
    aten._scaled_dot_product_cudnn_attention.default: (2, 3, 0, 1),
}


# -- scratch --------------------------------------------------------------------------------------

Formula = Callable[[CudaKernels, Arguments, Any], Sequence[Burst]]


def _sum(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    # Integers are converted to the result's type up front; floats inside the kernel.
    whole = not tensor.is_floating_point() and tensor.dtype is not out.dtype
    cast = [tensor.numel() * out.element_size()] if whole else []
    accumulator = 8 if out.dtype in (torch.int64, torch.float64) else 4
    return [Burst(*cast, *rules.reduction(tensor, dims, accumulator))]


def _vector_norm(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    dims = args[2] if len(args) > 2 and args[2] is not None else ()
    return [Burst(*rules.reduction(args[0], dims))]


def _foreach_norm(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    tensors = args[0]
    chunks = max(_up(tensor.numel(), 65536) for tensor in tensors)
    return [Burst(len(tensors) * chunks * 4)]


def _cudnn_attention_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    in_fp32 = batch * heads * length * width * 4
    row_sums = batch * heads * length * 4
    # Keys and values shared by several heads get a gradient per head first.
    per_head = 0
    if key.shape[1] != heads:
        per_head = 2 * batch * heads * key.shape[2] * width * query.element_size()
    return [Burst(in_fp32 + row_sums + per_head + 256)]


def _flash_attention_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rounded_length = _up(length, 128) * 128
    rounded_width = _up(width, 32) * 32 if width <= 128 else _up(width, 64) * 64
    row_sums = batch * heads * rounded_length * 4
    in_fp32 = batch * heads * rounded_length * rounded_width * 4
    per_head: list[int] = []
    if key.shape[1] != heads:
        per_head = 2 * [batch * heads * key.shape[2] * width * query.element_size()]
    return [Burst(*per_head, row_sums, in_fp32)]


def _efficient_attention_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    grad, query = args[0], args[1]
    batch, heads, length, width = query.shape
    blocks = _up(length, 64)
    workspace = batch * heads * (blocks * 64 * _up(width, 64) * 64 + 4 * blocks) * 4
    row_sums = batch * heads * length * 4
    if query.dtype is torch.float32:
        # In fp32 the row sums of gradient × output are computed outside the kernel.
        return [Burst(grad.numel() * 4, row_sums, row_sums), Burst(row_sums, workspace)]
    return [Burst(row_sums, workspace)]


def _safe_softmax(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    rows = out.numel() // out.shape[-1] if out.dim() else 1
    return [Burst(out.numel(), rows, 4)]


def _radix_sort(count: int) -> int:
    """CUB's temporary storage for sorting pairs of 8-byte keys and values."""
    return 16 * count + 16895 + 1024 * _up(count, 4096)


def _embedding_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    grad, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    copies = [] if indices.is_contiguous() else [count * 8]
    if count <= 3072 and not args[4]:
        return [Burst(*copies)]
    segments = min(count, rows)
    parts = count // 10 + segments
    width = grad.numel() // count
    return [
        Burst(*copies, *[count * 8] * 3, _radix_sort(count), after=0),
        Burst(*copies, *[count * 8] * 4, *[segments * 8] * 2, parts * 8, parts * width * 4),
    ]


def _embedding(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    indices = args[1]
    return [] if indices.is_contiguous() else [Burst(indices.numel() * 8)]


def _index(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    indices = [index for index in args[1] if index is not None]
    if len({index.shape for index in indices}) < 2:
        return []
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    return [Burst(*[count * 8] * len(indices))]


def _index_put(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    indices, values = [index for index in args[1] if index is not None], args[2]
    accumulate = args[3] if len(args) > 3 else False
    if not accumulate:
        return []
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    copies = [] if values.is_contiguous() else [_bytes(values)]
    return [Burst(*copies, *[count * 8] * 4, _radix_sort(count))]


def _sort(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    count = args[0].numel()
    return [Burst(count * 8, _radix_sort(count))]


def _cumsum(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    tensor = args[0]
    return [Burst(_bytes(out))] if tensor.dtype is not out.dtype else [Burst(1023)]


def _layer_norm(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    return [] if args[0].is_contiguous() else [Burst(_bytes(args[0]))]


def _layer_norm_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    grad, tensor, shape = args[0], args[1], args[2]
    copies = [_bytes(t) for t in (grad, tensor) if not t.is_contiguous()]
    width = math.prod(shape)
    rows = tensor.numel() // width
    bursts = [Burst(*copies)]
    if rows > 64 * 1024 and width // 32 < rules.gpu.sm_count // 2 and args[5] is not None:
        # Tall inputs: weight and bias gradients of 32 rows each, then summed.
        partial = args[5].new_empty(_up(rows, 32), width)
        total = rules.reduction(partial, (0,))
        bursts.append(Burst(*copies, _bytes(partial), _bytes(partial), width * 4, *total))
    return bursts


def _roll(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    return [Burst(_bytes(out))] * (len(args[1]) - 1)


def _convolution(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    tensor, weight, stride, groups = args[0], args[1], args[3], args[8]
    copies = _copied_weight(tensor, weight)
    return [Burst(*copies, _converted(tensor, weight, out, stride, groups), doubtful=True)]


def _convolution_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    grad, tensor, weight, stride, groups, mask = (args[i] for i in (0, 1, 2, 4, 9, 10))
    copies = [] if _is_laid_out_as(tensor, grad) else [_bytes(grad)]
    converted = _converted(tensor, weight, grad, stride, groups, pad=True)
    bursts = []
    if mask[0]:
        needed = [*copies, *_copied_weight(tensor, weight), converted]
        bursts.append(Burst(*needed, doubtful=True, after=1))
    if mask[1]:
        parts = _weight_gradient(tensor, weight, grad, converted) if groups == 1 else converted
        bursts.append(Burst(*copies, parts, doubtful=True, after=1 + mask[0]))
    if mask[2]:
        others = [dim for dim in range(grad.dim()) if dim != 1]
        bursts.append(Burst(*copies, *rules.reduction(grad, others)))
    return bursts


def _copied_weight(images: Tensor, weight: Tensor) -> list[int]:
    """ATen first converts the weight to the images' memory layout."""
    copies = has_channels_last(images) and not weight.is_contiguous(memory_format=_last(weight))
    return [_bytes(weight)] if copies else []


def _is_laid_out_as(images: Tensor, gradient: Tensor) -> bool:
    """Whether the gradient has the images' memory layout; if not, ATen converts it first."""
    form = _last(images) if has_channels_last(images) else torch.contiguous_format
    return gradient.is_contiguous(memory_format=form)


def _last(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def _weight_gradient(tensor: Tensor, weight: Tensor, grad: Tensor, converted: int) -> int:
    """The weight's gradient is computed in parts, in fp32, which are summed at the end.

    A plain matrix product makes one part per sample, unless converting the images takes less.
    """
    parts = weight_parts(tensor, weight)
    if converted or has_channels_last(tensor):
        return converted + parts
    return min(tensor.shape[0] * weight.numel() * 4, _bytes(tensor) + _bytes(grad) + parts)


def _converted(
    tensor: Tensor,
    weight: Tensor,
    out: Tensor,
    stride: Sequence[int],
    groups: int,
    *,
    pad: bool = False,
) -> int:
    """Workspace bytes for conversion to channels last, the layout that cuDNN's kernels need.

    The kernels for fp16 and bf16, and those that compute weight gradients, also need channels
    padded to groups of 16 bytes: `pad`.
    """
    if not is_converted(tensor, weight, stride, groups):
        return 0
    width = per_group(tensor)
    total = converted_weight(weight)
    for image in (tensor, out):
        channels = image.shape[1]
        padded = _up(channels, width) * width if pad or width == 8 else channels
        total += _bytes(image) // channels * padded
    return total + 16


def _rnn_forward_scratch(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    input, batch_first = args[0], args[10]
    copies = [_bytes(input)] if batch_first else []
    workspace = rnn_workspace(input, sum(map(_bytes, args[1])), hidden=args[7])
    return [Burst(*copies, workspace, doubtful=True)]


def _rnn_backward_scratch(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    input, output, batch_first = args[0], args[6], args[14]
    copies = [_bytes(input), _bytes(output)] if batch_first else []
    workspace = rnn_workspace(input, sum(map(_bytes, args[1])), hidden=args[11])
    return [Burst(*copies, workspace, doubtful=True)]


def _batch_norm(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    training = args[5]
    return [Burst(*_sums_in_parts(args[0], 4))] if training and has_channels_last(args[0]) else []


def _batch_norm_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    grad, images, training = args[0], args[1], args[7]
    if not (training and has_channels_last(images) and has_channels_last(grad)):
        return []
    sums = 2 * [images.shape[1] * 4]
    return [Burst(*sums, *_sums_in_parts(images, 2))]


def _sums_in_parts(images: Tensor, numbers: int) -> list[int]:
    """Channels-last sums: so many `numbers` per channel are summed by groups of pixels."""
    channels = images.shape[1]
    pixels = images.numel() // channels
    across = min(_floor_power(channels), 32)
    down = min(_floor_power(_up(pixels, 16)), 512 // across)
    if across * down != 512:
        across = min(_floor_power(channels), 512 // down)
    groups = min(_up(pixels, 16 * down), 128)
    if groups < 8:  # then one group covers all pixels
        return []
    return [numbers * channels * groups * 4, _up(channels, across) * 4]


def _floor_power(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


def _group_norm(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    batch, channels = args[3], args[4]
    copies = [] if args[0].is_contiguous() else [_bytes(args[0])]
    return [Burst(*copies, *[batch * channels * 4] * 2)]


def _group_norm_backward(rules: CudaKernels, args: Arguments, out: Any) -> list[Burst]:
    batch, channels = args[5], args[6]
    copies = [_bytes(images) for images in args[:2] if not images.is_contiguous()]
    return [Burst(*copies, *[batch * channels * 4] * 3)]


_SCRATCH: dict[Any, Formula] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _sum,
    aten.mean.dim: _sum,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._scaled_dot_product_cudnn_attention.default: lambda *_: [Burst(256)],
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._safe_softmax.default: _safe_softmax,
    # gradient × output, before its rows are summed
    aten._softmax_backward_data.default: lambda _, args, out: [Burst(_bytes(args[0]))],
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.cumsum.default: _cumsum,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.roll.default: _roll,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._cudnn_rnn.default: _rnn_forward_scratch,
    aten._cudnn_rnn_backward.default: _rnn_backward_scratch,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
