"""Multiply matrices in FP8: twice the rate of bf16 on Hopper and later (lossy).

Each operand of a linear layer's three products is scaled by its largest value, as it is at that
moment, into eight bits: weights and activations with more digits (e4m3), gradients with more range
(e5m2). Products are summed in fp32. What is saved for backward stays as it was, so this buys speed,
not memory; unless its block is compiled, finding scales and rounding take longer than is won.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, register
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import ApplyContext, SearchContext, Technique, Tried, Undo
from oomph.torch_compat.operators import scaled_mm

DIGITS = torch.float8_e4m3fn
RANGE = torch.float8_e5m2
#: Sizes of matrices that the card's kernels take are multiples of this.
MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class FP8ProductsSettings(Settings):
    """Which matrices are multiplied in FP8."""

    enabled: bool = False
    """Whether the linear layers of the blocks multiply in FP8."""


@register
class FP8Products(Technique[FP8ProductsSettings]):
    """Linear layers of blocks multiply in FP8."""

    name = "fp8_products"
    title = "products"
    words = ("as they are", "FP8 inside blocks")
    settings = FP8ProductsSettings
    tried = Tried.AS_VARIANT
    decides_precision = True
    runs_in_foreign_loops = True

    def elsewhere(self, settings: FP8ProductsSettings) -> str:
        return "matrix products in FP8"

    def fidelity(self, settings: FP8ProductsSettings, precision: str) -> Fidelity:
        return Fidelity.LOSSY

    def why_not(self, context: SearchContext) -> str:
        if context.gpu is None or "fp8" not in context.gpu.rates:
            return "the card does not multiply in FP8"
        if not context.choices.compiled:
            return "only compiled blocks are faster for it"
        if context.choices.precision not in ("bf16", "bf16-mixed"):
            return "products are rounded from bf16 alone"
        return ""

    def apply(self, settings: FP8ProductsSettings, context: ApplyContext) -> Undo:
        inside = dict.fromkeys(module for block in context.blocks for module in block.modules())
        with contextlib.ExitStack() as undos:
            for module in inside:
                if can_multiply_in_fp8(module):
                    undos.callback(multiply_in_fp8(module))
            return undos.pop_all().close


def multiply_in_fp8(linear: nn.Linear) -> Undo:
    """Make a linear layer multiply in FP8."""
    return replace_forward(linear, MethodType(_linear, linear))


def can_multiply_in_fp8(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer of sizes that have kernels."""
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
        return False  # a class of its own may multiply in its own way
    return not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    rows = x.reshape(-1, linear.in_features)
    if rows.shape[0] % MULTIPLE or dtype is not torch.bfloat16:
        return F.linear(x, linear.weight, linear.bias)
    out = _Product.apply(rows.to(dtype), linear.weight.to(dtype))
    if linear.bias is not None:
        out = out + linear.bias.to(dtype)
    return out.reshape(*x.shape[:-1], linear.out_features)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """rows × weightᵀ, and its two gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiply(_Rounded.of(rows, DIGITS), _Rounded.of(weight.t(), DIGITS), fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        for_rows = for_weight = None
        if ctx.needs_input_grad[0]:
            for_rows = _multiply(_Rounded.of(gradient, RANGE), _Rounded.of(weight, DIGITS))
        if ctx.needs_input_grad[1]:
            for_weight = _multiply(_Rounded.of(gradient.t(), RANGE), _Rounded.of(rows, DIGITS))
        return for_rows, for_weight


class _Rounded:
    """A matrix in eight bits, and what its numbers are to be multiplied by."""

    __slots__ = ("matrix", "scale")

    def __init__(self, matrix: Tensor, scale: Tensor) -> None:
        self.matrix = matrix
        self.scale = scale

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype) -> _Rounded:
        """Scaled so that its largest number is the largest there is in eight bits."""
        largest = torch.finfo(dtype).max
        # A matrix of zeros has no scale; any does.
        scale = matrix.abs().amax().float().clamp(min=1e-12) / largest
        return cls((matrix.float() / scale).clamp(-largest, largest).to(dtype), scale)


def _multiply(one: _Rounded, other: _Rounded, *, fast: bool = False) -> Tensor:
    # Kernels want the first matrix by rows and the second by columns.
    product: Tensor = scaled_mm(
        one.matrix.contiguous(),
        other.matrix.t().contiguous().t(),
        scale_a=one.scale,
        scale_b=other.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product
