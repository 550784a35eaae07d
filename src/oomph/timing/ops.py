"""The work of one op: its floating-point operations and the bytes it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from oomph.timing.work import Work

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
#: Read rows of their first argument, not all of it.
_LOOKUPS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.index_select.default,
}
#: Launch nothing.
_IDLE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.detach.default,
    aten.alias.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
}


def work_of(func: Any, args: Sequence[Any], out: Any) -> Work:
    """What `func(*args) = out` asks of the hardware; shapes are enough, the tensors may be fake."""
    if func in _IDLE or (isinstance(func, torch._ops.OpOverload) and func.is_view):
        return NO_WORK
    packet = getattr(func, "_overloadpacket", None)
    name = str(packet)
    written = sum(_nbytes(tensor) for tensor in _tensors(out))
    if func in _LOOKUPS:
        return Work(bytes=2 * written)
    read = sum(_nbytes(tensor) for tensor in _tensors(args))
    if packet not in flop_registry and packet not in _ATTENTION and packet not in _GROUPED:
        return Work(bytes=read + written)
    first = next(_tensors(args), None)
    return Work(
        flops=_flops(packet, args, out),
        dtype=DTYPES.get(first.dtype, "fp32") if first is not None else "fp32",
        bytes=read + written,
        kind=_kind(name),
    )


def _flops(packet: Any, args: Sequence[Any], out: Any) -> float:
    if packet in _ATTENTION:
        return _attention_flops(args, *_ATTENTION[packet])
    if packet in _GROUPED:
        return _grouped_flops(*args[:2])
    try:
        return float(flop_registry[packet](*args, out_val=out))
    except TypeError:  # an argument that a formula wants by name, as a transposed convolution's
        return 0.0


#: Products of several pairs of matrices that lie behind each other, as those of experts.
_GROUPED = {aten._grouped_mm}


def _grouped_flops(one: Tensor, other: Tensor) -> float:
    """Groups are a dimension of both, or parts of one that the other's groups share."""
    groups = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return float(2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1])


#: Attention ops: where the query stands, where `is_causal` stands, and products against forward's.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: (0, 4, 1.0),
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 4, 1.0),
    aten._scaled_dot_product_efficient_attention: (0, 6, 1.0),
    aten._scaled_dot_product_cudnn_attention: (0, 6, 1.0),
    aten._scaled_dot_product_flash_attention_backward: (1, 11, 2.5),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 7, 2.5),
    aten._scaled_dot_product_efficient_attention_backward: (1, 11, 2.5),
    aten._scaled_dot_product_cudnn_attention_backward: (1, 14, 2.5),
}


def _attention_flops(args: Sequence[Any], query_at: int, causal_at: int, products: float) -> float:
    """Two products over all pairs of positions, or over half of them under a causal mask."""
    batch, heads, queries, width = args[query_at].shape
    keys = args[query_at + 1].shape[2]
    causal = len(args) > causal_at and args[causal_at] is True
    pairs = queries * keys / (2 if causal else 1)
    return float(products * 4 * batch * heads * pairs * width)


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
    """Bytes that are touched; a broadcast dimension is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()
