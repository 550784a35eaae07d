"""Cross-entropy of a linear layer, computed over chunks of rows: loss and gradients in one pass.

Only one chunk of logits exists at a time. It is turned in place into its own gradient, softmax
minus one-hot, which goes straight into the gradients of the rows and of the weight: nothing as wide
as the vocabulary is kept for backward, and nothing is computed twice.

The gradients are kept unscaled until backward, where they are multiplied in fp32 by the incoming
gradient over the number of targets, so that small values do not underflow in fp16.

On a GPU, half-precision products over a vocabulary that is no multiple of 8 cannot load 16 bytes at
a time and take several times as long. There the weight is copied and padded with rows of zeros, and
the logits get the same number of extra columns, which the softmax ignores and whose gradient is
zero.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from oomph.torch_compat.autograd import keeps_graph

#: Elements of a chunk that the plain implementation converts to fp32 at a time.
_CONVERTED_AT_A_TIME = 1 << 22
#: fp16 has no number below 6e-8, and a rare token's probability is near that. A power of two rounds
#: nothing; this one is small enough to keep the rows' gradient below fp16's largest number.
_FP16_FACTOR = 256.0
#: Half-precision numbers in 16 bytes, which fast kernels load at once.
_LOADED_AT_A_TIME = 8
#: Other vocabularies are padded to a multiple of this: whole tiles, and little memory.
_PADDED_TO = 64


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How a chunked loss is computed."""

    compute_dtype: torch.dtype
    """The dtype of the logits: the dtype that the untouched layer would return."""
    tokens: int
    """Rows per chunk."""
    ignore_index: int
    mean: bool
    """Divide by the number of targets that count, or only sum."""
    scale: float = 1.0
    """The factor of the logits before the softmax."""


def chunked_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    added: Tensor | None = None,
) -> Tensor:
    """`cross_entropy(scale * (linear(rows, weight, bias) + added), target)`, in fp32 or fp64.

    `added` has one number for each class, is not trained, and has the dtype of the sum.
    """
    wanted = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (rows, weight, bias)
    )
    loss: Tensor = _ChunkedCrossEntropy.apply(rows, weight, bias, added, target, options, wanted)
    return loss


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums when products are computed in `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def padded_vocabulary(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Number of logits columns for `dtype` on `device`: padded where that is faster."""
    slow = (
        vocabulary % _LOADED_AT_A_TIME
        and dtype in (torch.bfloat16, torch.float16)
        and device.type == "cuda"
    )
    return vocabulary + -vocabulary % _PADDED_TO if slow else vocabulary


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        added: Tensor | None,
        target: Tensor,
        options: LossOptions,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        dtype = options.compute_dtype
        wide = wide_dtype(dtype)
        factor = _FP16_FACTOR if dtype is torch.float16 else 1.0
        wants_rows, wants_weight, wants_bias = wanted
        vocabulary, width = weight.shape
        columns = padded_vocabulary(vocabulary, dtype, rows.device)
        # `new_*` name no device, so a rehearsal puts them on the device of the rows.
        total = rows.new_zeros((), dtype=wide)
        rows_grad = rows.new_empty(rows.shape, dtype=dtype) if wants_rows else None
        weight_grad = weight.new_empty((columns, width), dtype=wide) if wants_weight else None
        bias_grad = weight.new_zeros(columns, dtype=wide) if wants_bias else None
        # Cast by hand: autocast may be on by now and would cache this copy of the weight, which has
        # no graph, so that the weight would get no gradient from its later uses.
        with torch.autocast(rows.device.type, enabled=False):
            cast_weight = _cast_and_pad(weight, dtype, columns)
            cast_bias = _cast_and_pad(bias, dtype, columns) if bias is not None else None
            if added is not None:
                added = _cast_and_pad(added, added.dtype, columns)
            for start in range(0, len(rows), options.tokens):
                chunk = slice(start, start + options.tokens)
                part = rows[chunk].to(dtype)
                logits = F.linear(part, cast_weight, cast_bias)
                if added is not None:
                    logits = logits.to(added.dtype).add_(added)
                losses = cross_entropy_chunk(
                    logits,
                    target[chunk],
                    vocabulary,
                    options.ignore_index,
                    options.scale,
                    factor,
                    any(wanted),
                )
                total += losses.sum()
                logits = logits.to(dtype)
                if rows_grad is not None:
                    torch.mm(logits, cast_weight, out=rows_grad[chunk])
                if weight_grad is not None:
                    add_product(logits.t(), part, weight_grad, start > 0)
                if bias_grad is not None:
                    bias_grad += logits.sum(0, dtype=wide)
                del logits  # before the next chunk's logits are allocated
        count = (target != options.ignore_index).sum().to(wide) if options.mean else None
        if any(wanted):
            # Without a target that counts, the loss is 0/0 and the gradient is zero.
            divisor = count.clamp(min=1) if count is not None else None
            of_classes = (_without_padding(grad, vocabulary) for grad in (weight_grad, bias_grad))
            ctx.save_for_backward(rows_grad, *of_classes, divisor)
            ctx.multiplier = options.scale / factor
            ctx.dtypes = rows.dtype, weight.dtype, bias.dtype if bias is not None else None
            ctx.tokens = options.tokens
        return total if count is None else total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *gradients, divisor = ctx.saved_tensors
        scale = gradient * ctx.multiplier
        if divisor is not None:
            scale = scale / divisor
        # If the graph is retained, another backward may need the unscaled gradients.
        overwrite = not keeps_graph()
        scaled = [
            _scaled(unscaled, scale, dtype, ctx.tokens, overwrite) if unscaled is not None else None
            for unscaled, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _cast_and_pad(tensor: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """Cast a tensor to `dtype` and pad it with zeros to this number of rows."""
    if len(tensor) == rows:
        return tensor.to(dtype)
    padded = tensor.new_empty((rows, *tensor.shape[1:]), dtype=dtype)
    padded[: len(tensor)] = tensor
    padded[len(tensor) :] = 0
    return padded


def _without_padding(gradient: Tensor | None, rows: int) -> Tensor | None:
    """The first rows, in the same memory."""
    if gradient is None or len(gradient) == rows:
        return gradient
    # A plain slice would reference the whole tensor, and autograd adds a tied embedding's gradient
    # in place only if nothing else references the memory.
    return gradient[:rows].data


def _scaled(
    gradient: Tensor, scale: Tensor, dtype: torch.dtype, tokens: int, overwrite: bool
) -> Tensor:
    """`gradient * scale` in `dtype`, multiplied in the dtype of `scale`, with little memory."""
    if gradient.dtype is scale.dtype:
        return (gradient.mul_(scale) if overwrite else gradient * scale).to(dtype)
    if dtype is scale.dtype:
        return gradient.to(dtype).mul_(scale)
    # A direct product with a half-precision gradient would round the scale first.
    reuse = overwrite and dtype is gradient.dtype
    out = gradient if reuse else torch.empty_like(gradient, dtype=dtype)
    for into, part in zip(out.split(tokens), gradient.split(tokens), strict=True):
        into.copy_(part.to(scale.dtype).mul_(scale))
    return out


# -- weight gradients in fp32 from half-precision factors ------------------------------------------


@torch.library.custom_op("oomph::add_product", mutates_args=("total",))
def add_product(left: Tensor, right: Tensor, total: Tensor, adds: bool) -> None:
    """Write `left @ right` into `total`, or add it; `total` may be wider than the factors."""
    if total.dtype is left.dtype:
        torch.addmm(total, left, right, beta=int(adds), out=total)
    elif total.is_cuda and adds:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif total.is_cuda:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif adds:
        total.add_(left @ right)
    else:
        total.copy_(left @ right)


@add_product.register_fake
def _(left: Tensor, right: Tensor, total: Tensor, adds: bool) -> None:
    """Allocates nothing."""


@register_flop_formula(torch.ops.oomph.add_product)
def _(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


# -- one chunk of logits ---------------------------------------------------------------------------


@torch.library.custom_op("oomph::cross_entropy_chunk", mutates_args=("logits",))
def cross_entropy_chunk(
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    ignore_index: int,
    scale: float,
    factor: float,
    needs_grad: bool,
) -> Tensor:
    """Each row's loss; with `needs_grad`, the logits become `factor * (softmax - one-hot)`.

    Columns beyond the `vocabulary` are padding: the losses ignore their contents, which become
    zero. Rows whose target is `ignore_index` have no loss and no gradient. Without `needs_grad` the
    logits are left in an undefined state.
    """
    classes = _clear_padding(logits, vocabulary)
    return _plain_chunk(classes, target, ignore_index, scale, factor, needs_grad)


def _clear_padding(logits: Tensor, vocabulary: int) -> Tensor:
    """Zero the padding of the logits; returns the logits without it."""
    logits[:, vocabulary:] = 0
    return logits[:, :vocabulary]


def _plain_chunk(
    logits: Tensor, target: Tensor, ignore_index: int, scale: float, factor: float, needs_grad: bool
) -> Tensor:
    wide = wide_dtype(logits.dtype)
    losses = logits.new_empty(len(logits), dtype=wide)
    rows = len(logits)
    if logits.dtype is not wide:
        rows = max(1, _CONVERTED_AT_A_TIME // logits.shape[1])
    for into, part, wanted in zip(
        losses.split(rows), logits.split(rows), target.split(rows), strict=True
    ):
        values = part.to(wide)
        if scale != 1:
            values.mul_(scale)
        values.sub_(values.amax(1, keepdim=True))
        ignored = wanted == ignore_index
        at = wanted.masked_fill(ignored, 0).unsqueeze(1)
        at_target = values.gather(1, at)
        total = values.exp_().sum(1, keepdim=True)
        into.copy_((total.log() - at_target).squeeze(1).masked_fill_(ignored, 0))
        if needs_grad:
            values.mul_(factor / total)
            values.scatter_add_(1, at, values.new_full(at.shape, -factor))
            values.masked_fill_(ignored.unsqueeze(1), 0)
            if values is not part:
                part.copy_(values)
    return losses


@cross_entropy_chunk.register_fake
def _(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_empty(len(logits), dtype=wide_dtype(logits.dtype))


if importlib.util.find_spec("triton") is not None:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")

    _BLOCK = 4096
    _WARPS = 8

    @cross_entropy_chunk.register_kernel("cuda")
    def _(
        logits: Tensor,
        target: Tensor,
        vocabulary: int,
        ignore_index: int,
        scale: float,
        factor: float,
        needs_grad: bool,
    ) -> Tensor:
        if logits.dtype is torch.float64:
            classes = _clear_padding(logits, vocabulary)
            return _plain_chunk(classes, target, ignore_index, scale, factor, needs_grad)
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        with torch.cuda.device(logits.device):
            _row_kernel[(len(logits),)](
                logits,
                target.contiguous(),
                losses,
                logits.stride(0),
                logits.shape[1],
                vocabulary,
                ignore_index,
                scale,
                factor,
                needs_grad,
                _BLOCK,
                num_warps=_WARPS,
            )
        return losses

    @triton.jit  # type: ignore[untyped-decorator]
    def _row_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations
        logits,
        target,
        losses,
        row_stride,
        width,
        vocabulary,
        ignore_index,
        scale,
        factor,
        NEEDS_GRAD: tl.constexpr,  # noqa: N803
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride  # beyond 2³¹ in a large chunk
        wanted = tl.load(target + row)
        columns = tl.arange(0, BLOCK)
        if wanted == ignore_index:
            tl.store(losses + row, 0.0)
            if NEEDS_GRAD:
                for start in range(0, width, BLOCK):
                    at = start + columns
                    tl.store(logits + at, 0.0, mask=at < width)
            return
        # A target outside the vocabulary makes its row NaN: noticed without syncing with the GPU.
        known = (wanted >= 0) & (wanted < vocabulary)
        at_target = tl.load(logits + wanted, mask=known, other=0.0).to(tl.float32) * scale
        at_target = tl.where(known, at_target, float("nan"))
        peak = float("-inf")
        total = 0.0
        for start in range(0, vocabulary, BLOCK):
            at = start + columns
            # Up to the width, not the vocabulary: with an odd bound, Triton loads one at a time.
            x = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32) * scale
            x = tl.where(at < vocabulary, x, float("-inf"))
            higher = tl.maximum(peak, tl.max(x, 0))
            # All logits of a block may be masked with -inf, and -inf - -inf is NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift), 0)
            peak = higher
        tl.store(losses + row, tl.log(total) - (at_target - peak))
        if NEEDS_GRAD:
            tl.debug_barrier()  # every warp has read the target's logit before one overwrites it
            share = tl.where(known, factor / total, float("nan"))
            for start in range(0, width, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < width, other=0.0).to(tl.float32) * scale
                gradient = tl.exp(x - peak) * share
                gradient = tl.where(at == wanted, gradient - factor, gradient)
                gradient = tl.where(at < vocabulary, gradient, 0.0)
                tl.store(logits + at, gradient, mask=at < width)
