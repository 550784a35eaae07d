"""What CUDA's kernels take beyond their outputs, op by op.

Every formula was read off ATen's sources and checked against allocation histories of an H200 (torch
2.11, cuDNN 9.19); where a library decides by itself (cuDNN's convolutions), the formula is what it
did in those histories and the estimate's interval is widened. Nothing here is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.rehearsal.cuda.reductions import reduction_scratch

aten = torch.ops.aten
_Scratch = Callable[["CudaKernels", Sequence[Any], dict[str, Any], Any], list[int]]


@dataclass(frozen=True, kw_only=True)
class CudaKernels:
    """The rules of one GPU."""

    gpu: GPU

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Outputs of ops that have no fake kernel, or one that follows the CPU's dtypes."""
        make = _REPLACED.get(func)
        return make(*args, **kwargs) if make is not None else NotImplemented

    def scratch(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> Sequence[int]:
        """Bytes allocated and freed inside the op."""
        formula = _SCRATCH.get(func)
        return formula(self, args, kwargs, out) if formula is not None else ()

    def lasting(self, func: Any, in_backward: bool) -> Sequence[tuple[str, int]]:
        """Workspaces that stay: cuBLAS keeps one per thread, and backward has its own thread."""
        if func not in _MATRIX_PRODUCTS:
            return ()
        thread = "backward" if in_backward else "forward"
        return ((f"cuBLAS workspace, {thread} thread", self.cublas_workspace),)

    @property
    def cublas_workspace(self) -> int:
        """32 MiB on Hopper and later, 8.1 MiB before: the sizes NVIDIA recommends."""
        recent = self.gpu.compute_capability is not None and self.gpu.compute_capability >= (9, 0)
        return 32 << 20 if recent else (4096 * 2 + 16 * 8) << 10

    def reduction(self, tensor: Tensor, dims: Sequence[int], accumulator_bytes: int) -> list[int]:
        """Scratch of reducing `tensor` over `dims` on this GPU."""
        return reduction_scratch(
            tensor,
            dims,
            accumulator_bytes=accumulator_bytes,
            sm_count=self.gpu.sm_count,
            threads_per_sm=self.threads_per_sm,
        )

    @property
    def threads_per_sm(self) -> int:
        """Resident threads per multiprocessor, fixed per architecture by CUDA."""
        capability = self.gpu.compute_capability or (9, 0)
        if capability == (7, 5):
            return 1024
        return 1536 if capability in ((8, 6), (8, 9), (12, 0)) else 2048


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


# -- outputs the fake kernels get wrong or do not know ---------------------------------------------


def _cudnn_batch_norm(
    input: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, *_: Any
) -> tuple[Tensor, ...]:
    stats = weight.new_empty(weight.shape), weight.new_empty(weight.shape)
    return torch.empty_like(input), *stats, input.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    input: Tensor, grad: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(weight)


_REPLACED: dict[Any, Callable[..., Any]] = {
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    # The CPU counts floats only, CUDA integers, too.
    aten.histc.default: lambda tensor, bins=100, *_: tensor.new_empty(bins),
}


# -- scratch --------------------------------------------------------------------------------------


def _sum(rules: CudaKernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[int]:
    tensor = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    cast = []
    if not tensor.is_floating_point() and tensor.dtype is not out.dtype:
        cast = [tensor.numel() * out.element_size()]
    accumulator = 8 if out.dtype in (torch.int64, torch.float64) else 4
    return cast + rules.reduction(tensor, dims or (), accumulator)


def _cudnn_attention_backward(
    rules: CudaKernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> list[int]:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    in_fp32 = batch * heads * length * width * 4
    row_sums = batch * heads * length * 4
    # Keys and values shared by several heads get a gradient per head first.
    per_head = 0
    if key.shape[1] != heads:
        per_head = 2 * batch * heads * key.shape[2] * width * query.element_size()
    return [in_fp32 + row_sums + per_head + 256]


_SCRATCH: dict[Any, _Scratch] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _sum,
    aten.mean.dim: _sum,
    aten._scaled_dot_product_cudnn_attention.default: lambda *_: [256],
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    aten._softmax_backward_data.default: lambda _, args, kwargs, out: [_bytes(out)],
}
