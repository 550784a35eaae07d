"""The work of one op: its floating-point operations and the bytes it reads and writes.

Also the share of its kind's rate that it reaches: numbers here that are not shapes come from
profiles of steps on an H200, with torch 2.11. Those of grouped convolutions, normalisation,
pooling, gather and scatter and small fp32 products come from one model each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from oomph.hardware.timing.layouts import (
    converted_weight,
    has_channels_last,
    is_converted,
    is_converted_for_weight,
    nbytes,
)
from oomph.hardware.timing.work import Work
from oomph.torch_compat.operators import OVERLOADS, OpOverload, schema_of

aten = torch.ops.aten

NO_WORK = Work()
DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}
#: Ops that read some rows of their first argument rather than all of it.
_LOOKUPS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.index_select.default,
}
#: Ops that write all of their result and read almost nothing.
_FILLS = {
    aten.zero_,
    aten.fill_,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.nll_loss_backward,
}
_ZEROS = {aten.zero_, aten.zeros_like}
#: Ops that read as many elements as this argument has, from another one.
_PICKS = {aten.nll_loss_forward: 1}
#: Ops that launch nothing.
_IDLE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.alias.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
}


def work_of(func: Any, args: Sequence[Any], out: Any) -> Work:
    """The work of `func(*args) = out`; only shapes matter, so the tensors may be fake."""
    if func in _IDLE or (isinstance(func, OpOverload) and func.is_view):
        return NO_WORK
    packet: Any = getattr(func, OVERLOADS, None)
    name = str(packet)
    written = sum(_nbytes(tensor) for tensor in _tensors(out))
    if func in _LOOKUPS:
        return Work(bytes=2 * written)
    if packet in _FILLS:
        return Work(bytes=written, launches=_BARE if packet in _ZEROS else 1.0)
    if packet in _PICKS:
        return Work(bytes=_nbytes(args[_PICKS[packet]]) + written)
    read = sum(_nbytes(tensor) for tensor in _tensors(args))
    if _steps_an_optimizer(name, args):
        moved = read + _updated(func, args)
        launches = _step_launches(args) if name.startswith(_FUSED) else 1.0
        return Work(bytes=moved, reach=_STEP_REACH, launches=launches)
    if name == _LOSS_CHUNK:
        return Work(bytes=_LOSS_PASSES * read)
    if packet not in flop_registry and packet not in _ATTENTION and packet not in _GROUPED:
        launches = _BARE if packet is aten.copy_ else 1.0
        reach = _moving_reach(func, packet, args, out)
        return Work(bytes=read + written, reach=reach, launches=launches)
    if (groups := _groups(packet, args)) > 1 and args[_WEIGHT[packet]].shape[1] == 1:
        return Work(bytes=read + written, reach=_DEPTHWISE[packet])
    first = next(_tensors(args), None)
    kind = _kind(name)
    return Work(
        flops=_flops(packet, args, out),
        dtype=DTYPES.get(first.dtype, "fp32") if first is not None else "fp32",
        bytes=read + written,
        converted=_converted(packet, args, out, groups),
        kind=kind,
        reach=_reach(kind, packet, args, out) * _groups_reach(packet, args, out, groups),
    )


#: Logits of a chunk are read for their sum, then read again and overwritten by their gradient:
#: 8,192 rows of 151,936 took 1.83 ms, and those of 50,304 took 0.67 ms.
_LOSS_CHUNK, _LOSS_PASSES = "oomph.cross_entropy_chunk", 3
#: The share of the bandwidth that kernels over many tensors reach.
_STEP_REACH = 0.84
_FUSED, _MANY = "aten._fused_", "aten._foreach_"
#: Around the single kernel of a fused step there is Python code of the optimizer, most of it for
#: each parameter: 4.5 to 9 ms for 138 to 393 of them, in steps whose other kernels are in a graph.
_STEP_LAUNCHES, _STEP_LAUNCHES_EACH = 5, 0.6
#: A bare launch, as when gradients are zeroed or masters are copied one after the other: 6.7 µs of
#: the 30 µs that a launch takes in a model.
_BARE = 0.22
#: Kernels that read their inputs several times, or write to scattered memory.
SLOW = {
    aten.native_layer_norm_backward: 0.3,
    aten.native_batch_norm: 0.112,
    aten.native_batch_norm_backward: 0.114,
    aten.max_pool2d_with_indices: 0.26,
    aten.max_pool2d_with_indices_backward: 0.16,
    aten.gather: 0.3,
    aten.scatter_add: 0.07,
    # Rows of 50,265 numbers: 8,192 of them took 1.48 ms forward and 1.74 ms backward.
    aten._log_softmax: 0.53,
    aten._log_softmax_backward_data: 0.68,
}
#: The same with channels-last images. Batch norm reads and writes 5.7 GB in the forward of
#: resnet-50 in bf16 (12.1 ms; 6.8 with channels last) and 8.5 GB in its backward (17.8 ms; 5.7),
#: for 128 images of 224 × 224.
_SLOW_WITH_CHANNELS_LAST = {
    aten.native_batch_norm: 0.2,
    aten.native_batch_norm_backward: 0.36,
}
#: For inputs that are strided, read repeatedly, or read one element at a time because dtypes or
#: shapes differ; by element size. In modernbert-base and gemma-3-1b, products with a broadcast row
#: reach 0.55 and 0.58, sums of bf16 and fp32 0.64 and 0.70, conversions of bf16 to fp32 0.57, and
#: strided bf16 0.38 to 0.50.
_ONE_BY_ONE = {2: 0.45, 4: 0.6}
#: The same for concatenation, per byte of an element: 0.44 in fp32, 0.25 in bf16.
_JOINED = 0.11
_JOINS = {aten.cat, aten.stack}
_COPIES = {aten._to_copy, aten.copy_}
#: Convolutions in groups, whose channels hardly mix.
_GROUPS = 0.015
#: Below this many results per channel, such a convolution takes as long as with this many: 16
#: images of 149, and 4 of them, took the same time in wav2vec2-base.
_LEAST_IN_GROUPS = 16 * 149
#: Depthwise convolutions, whose channels do not mix: 36 of 7 × 7 in convnext-base take 2.7 ms in
#: forward and 7.2 ms in backward, in bf16, for 64 images of 224 × 224.
_DEPTHWISE = {aten.convolution: 0.107, aten.convolution_backward: 0.059}
#: Positions of a convolution's weight and its groups among the arguments.
_WEIGHT = {aten.convolution: 1, aten.convolution_backward: 2}
_GROUPS_AT = {aten.convolution: 8, aten.convolution_backward: 9}


def _groups(packet: Any, args: Sequence[Any]) -> int:
    at = _GROUPS_AT.get(packet)
    return int(args[at]) if at is not None and len(args) > at else 1


def _groups_reach(packet: Any, args: Sequence[Any], out: Any, groups: int) -> float:
    """What a grouped convolution reaches relative to others."""
    if groups == 1:
        return 1.0
    results: Tensor = out if packet is aten.convolution else args[0]
    return _GROUPS * min(results.numel() / results.shape[1] / _LEAST_IN_GROUPS, 1.0)


def _converted(packet: Any, args: Sequence[Any], out: Any, groups: int) -> int:
    """Bytes that a half-precision convolution moves to convert image layouts."""
    if packet not in _WEIGHT or args[0].element_size() != 2:
        return 0
    weight = args[_WEIGHT[packet]]
    if packet is aten.convolution:
        return 2 * _to_compute(args[0], weight, out, args[3], groups)
    gradient, images, _, _, stride = args[:5]
    for_images, for_weight = args[10][:2]
    moved = _to_compute(images, weight, gradient, stride, groups) if for_images else 0
    if for_weight:
        converted = is_converted(images, weight, stride, groups)
        moved += nbytes(images) + nbytes(gradient) if converted or _in_parts(*args[:3]) else 0
    # ATen converts it to the layout of the images first.
    other = has_channels_last(images) is not has_channels_last(gradient)
    return 2 * (moved + nbytes(gradient) * other)


def _to_compute(
    images: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], groups: int
) -> int:
    """Bytes of a convolution's inputs and results that have to change layout."""
    if has_channels_last(images):
        return 0 if has_channels_last(weight) else converted_weight(weight)
    if not is_converted(images, weight, stride, groups):
        return 0
    return nbytes(images) + nbytes(out) + converted_weight(weight)


def _in_parts(gradient: Tensor, images: Tensor, weight: Tensor) -> bool:
    """Whether the weight's gradient is not computed by a plain matrix product over each image."""
    return not has_channels_last(images) and is_converted_for_weight(images, weight, gradient)


def _moving_reach(func: Any, packet: Any, args: Sequence[Any], out: Any) -> float:
    if packet in SLOW:
        last = packet in _SLOW_WITH_CHANNELS_LAST and _all_have_channels_last(args)
        return _SLOW_WITH_CHANNELS_LAST[packet] if last else SLOW[packet]
    tensors = [tensor for tensor in _tensors((*args, out)) if tensor.dim()]
    if _is_in_one_order(tensors) and not _takes_one_by_one(func, packet, tensors):
        return 1.0
    size = tensors[-1].element_size()
    return _JOINED * size if packet in _JOINS else _ONE_BY_ONE.get(size, _ONE_BY_ONE[4])


def _takes_one_by_one(func: Any, packet: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether a pointwise kernel reads one element at a time because shapes or dtypes differ."""
    if not tensors or not (packet in _COPIES or _is_pointwise(func)):
        return False
    if len({tensor.shape for tensor in tensors}) > 1:
        return True
    # Rounding to 16 bits has a separate kernel.
    rounds = packet in _COPIES and tensors[-1].element_size() == 2
    return not rounds and len({t.dtype for t in tensors if t.is_floating_point()}) > 1


@functools.cache
def _is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in getattr(func, "tags", ())


def _all_have_channels_last(args: Sequence[Any]) -> bool:
    """Whether all images are channels-last; otherwise batch norm uses kernels for any layout."""
    return all(has_channels_last(tensor) for tensor in _tensors(args) if tensor.dim() >= 4)


def _is_in_one_order(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are read and written sequentially."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    last, plain = torch.channels_last, torch.contiguous_format
    forms = (last if tensor.dim() == 4 else plain for tensor in tensors)
    return all(t.is_contiguous(memory_format=form) for t, form in zip(tensors, forms, strict=True))


def _step_launches(args: Sequence[Any]) -> float:
    return _STEP_LAUNCHES + _STEP_LAUNCHES_EACH * len(args[0])


def _steps_an_optimizer(name: str, args: Sequence[Any]) -> bool:
    """Whether it is given a list of tensors, unlike a fused norm."""
    return name.startswith((_FUSED, _MANY)) and isinstance(args[0], (list, tuple))


def _updated(func: Any, args: Sequence[Any]) -> int:
    """Bytes written in place; gradients are declared as written, but are not."""
    return sum(
        _nbytes(tensor)
        for argument, value in zip(schema_of(func).arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        if argument.name != "grads"
        for tensor in _tensors(value)
    )


#: Many small products in fp32, such as in attention computed op by op.
_SMALL_PRODUCTS = 0.75


def _reach(kind: str, packet: Any, args: Sequence[Any], out: Any) -> float:
    if packet in _ATTENTION:
        return _attention_reach(args, _ATTENTION[packet])
    if packet is aten.bmm and args[0].dtype == torch.float32:
        return _SMALL_PRODUCTS
    return _alignment(args, out) if kind == "product" else 1.0


#: By the multiple of 16-bit elements that rows have: what Tensor Cores reach below 8. The value for
#: 4 lies between its neighbours and was not measured.
_ALIGNED = {4: 0.6, 2: 0.33, 1: 0.16}


def _alignment(args: Sequence[Any], out: Any) -> float:
    """What products reach whose rows do not begin at 16 bytes, which run in older kernels."""
    matrices = [t for t in (*_tensors(args), *_tensors(out)) if t.dim() > 1]
    halves = [t for t in matrices if t.element_size() == 2]
    pitches = [max(t.stride()[-2:]) for t in halves if min(t.shape[-2:]) > 1]
    return min((_ALIGNED.get(math.gcd(pitch, 8), 1.0) for pitch in pitches), default=1.0)


def _flops(packet: Any, args: Sequence[Any], out: Any) -> float:
    if packet in _ATTENTION:
        return _attention_flops(args, _ATTENTION[packet])
    if packet in _GROUPED:
        return _grouped_flops(*args[:2])
    if packet is aten.convolution_backward:
        return _convolution_backward_flops(args)
    try:
        return float(flop_registry[packet](*args, out_val=out))
    except TypeError:  # an argument that a formula takes by name, as for a transposed convolution
        return 0.0


def _convolution_backward_flops(args: Sequence[Any]) -> float:
    """As many operations as forward for each gradient; PyTorch's own count ignores groups."""
    gradient, input, weight, *_ = args
    transposed, wanted = args[7], args[10]
    places = input if transposed else gradient
    return float(2 * places.numel() * math.prod(weight.shape[1:]) * sum(wanted[:2]))


#: Products of several pairs of matrices stored one after the other, such as those of experts.
_GROUPED = {aten._grouped_mm}


def _grouped_flops(one: Tensor, other: Tensor) -> float:
    """Groups are a dimension of both, or parts of one that the other's groups share."""
    groups = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return float(2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1])


class _Attention(NamedTuple):
    """An attention op."""

    query: int
    """Position of the query among its arguments."""
    causal: int
    """Position of `is_causal`."""
    dropout: int
    """Position of the dropout probability."""
    products: float = 1.0
    """Number of products relative to forward's."""
    with_dropout: float = 0.5
    """What it reaches with dropout, which needs a random number for each pair."""
    of_the_fastest: float = 1.0
    """What it reaches relative to kernels written for the GPU."""


#: The memory-efficient kernel was written for Ampere. With a bias that has a gradient, 32 × 16
#: heads of 512 × 64 took 0.408 ms forward and 1.005 ms backward; 0.645 and 1.43 ms with dropout.
_AMPERE = {"of_the_fastest": 0.27, "with_dropout": 0.63}
_AMPERE_BACKWARD = {"of_the_fastest": 0.35, "with_dropout": 0.70}
_forward = functools.partial(_Attention, 0)
_backward = functools.partial(_Attention, 1, products=2.5, with_dropout=0.83)
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: _forward(4, 3),
    aten._scaled_dot_product_flash_attention_for_cpu: _forward(4, 3),
    aten._scaled_dot_product_efficient_attention: _forward(6, 5, **_AMPERE),
    aten._scaled_dot_product_cudnn_attention: _forward(6, 5),
    aten._scaled_dot_product_flash_attention_backward: _backward(11, 10),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward(7, 6),
    aten._scaled_dot_product_efficient_attention_backward: _backward(11, 9, **_AMPERE_BACKWARD),
    aten._scaled_dot_product_cudnn_attention_backward: _backward(14, 13),
}
#: Positions that a kernel processes together: an incomplete last tile takes as long.
_TILE = 128
#: The head width from which attention reaches its full rate, and the limit for width zero.
_WIDE_HEAD, _NARROWEST = 128, 0.28


def _attention_flops(args: Sequence[Any], op: _Attention) -> float:
    """Two products over all pairs of positions, or over half of them with a causal mask."""
    batch, heads, queries, width = args[op.query].shape
    keys = args[op.query + 1].shape[2]
    causal = len(args) > op.causal and args[op.causal] is True
    pairs = queries * keys / (2 if causal else 1)
    return float(op.products * 4 * batch * heads * pairs * width)


def _attention_reach(args: Sequence[Any], op: _Attention) -> float:
    *_, queries, width = map(int, args[op.query].shape)
    keys = int(args[op.query + 1].shape[2])
    filled = math.prod(n / (math.ceil(n / _TILE) * _TILE) for n in (queries, keys))
    wide = _NARROWEST + (1 - _NARROWEST) * min(width / _WIDE_HEAD, 1.0)
    drops = len(args) > op.dropout and bool(args[op.dropout])
    return filled * wide * op.of_the_fastest * (op.with_dropout if drops else 1.0)


def _kind(name: str) -> str:
    if "attention" in name:
        return "attention backward" if "backward" in name else "attention"
    return "convolution" if "conv" in name else "product"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _nbytes(tensor: Tensor) -> int:
    """Bytes that are accessed; a broadcast dimension is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()
