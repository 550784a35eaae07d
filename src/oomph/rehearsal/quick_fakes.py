"""Fast fake results for the most frequent ops.

PyTorch's fake tensors describe every argument of an op to look its result up in a cache. For a
step's most frequent ops the meta kernel, which only works out shapes, is several times faster; ops
that write to their first argument, or copy a packed one, need no kernel at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.torch_compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    allows_data_ptr,
    current_fake_mode,
    in_kernel_invocation,
    make_subclass,
    throw_on_mutable_data_ptr,
    warn_on_mutable_data_ptr,
)

aten = torch.ops.aten

_CPU, _META = torch.device("cpu"), torch.device("meta")
_Quick = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def quick_fake(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the active fake mode would return for the op; NotImplemented if it has to."""
    make = _QUICK.get(func)
    return NotImplemented if make is None else make(func, args, kwargs)


def shows_its_argument(func: Any, args: Sequence[Any]) -> bool:
    """Whether `quick_fake` only views its first argument's memory in another way."""
    return _QUICK.get(func) is _view and _is_plain(args[0])


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views its first argument, and no other tensor, in another way."""
    first = args[0]
    return _run(func, args, kwargs, first.fake_device) if _is_plain(first) else NotImplemented


def _new(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Makes a tensor from sizes alone."""
    if kwargs.get("pin_memory"):
        return NotImplemented
    return _run(func, args, {**kwargs, "device": _META}, _CPU)


def _like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Makes a tensor of its argument's size."""
    first = args[0]
    if not _is_plain(first) or kwargs.get("pin_memory"):
        return NotImplemented
    device = kwargs.get("device") or first.fake_device
    if kwargs.get("memory_format") in _SAME_ORDER and _is_packed(first):
        options = {"dtype": kwargs.get("dtype") or first.dtype, "device": _META}
        return _run(aten.empty.memory_format, (first.shape,), options, device)
    if func is aten.clone.default:
        return _run(func, args, kwargs, device)
    return _run(func, args, {**kwargs, "device": _META}, device)


def _filled(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Makes a tensor from sizes, filled with one number, with the dtype given."""
    if kwargs.get("pin_memory") or kwargs.get("dtype") is None:
        return NotImplemented
    options = {"dtype": kwargs["dtype"], "device": _META}
    return _run(aten.empty.memory_format, args[:1], options, _CPU)


def _write_to_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Writes to tensors in lists, and returns nothing."""
    lists = [*args, *kwargs.values()]
    tensors = (tensor for one in lists if isinstance(one, (list, tuple)) for tensor in one)
    return None if all(map(_is_plain, tensors)) else NotImplemented


def _write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Writes another tensor to its first argument, or computes in place with both."""
    first, other = args[:2]
    if not _is_plain(first) or not _is_plain(other):
        return NotImplemented
    fits = first.shape == other.shape or not other.dim()
    of_one_sort = first.is_floating_point() and other.is_floating_point()
    return first if fits and (of_one_sort or func is aten.copy_.default) else NotImplemented


def _pointwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Computes each element from those at the same place, of floats of one dtype and numbers."""
    first = args[0]
    if kwargs or not _is_plain(first) or not first.is_floating_point() or not _is_packed(first):
        return NotImplemented
    shape: Sequence[int] | None = first.shape
    if len(args) > 1:
        other = args[1]
        if isinstance(other, Tensor):
            alike = _is_plain(other) and other.dtype is first.dtype and _is_packed(other)
            shape = _broadcast(first.shape, other.shape) if alike else None
        elif not isinstance(other, (int, float)):
            shape = None
    return _empty(shape, first) if shape is not None else NotImplemented


def _product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Multiplies two matrices."""
    one, other = args
    if not _is_plain(one) or not _is_plain(other) or one.dtype is not other.dtype:
        return NotImplemented
    (rows, inner), (same, columns) = one.shape, other.shape
    return _empty((rows, columns), one) if inner == same else NotImplemented


def _empty(shape: Sequence[int], like: Any) -> Any:
    """A packed tensor of this shape, otherwise like `like`."""
    options = {"dtype": like.dtype, "device": _META}
    return _run(aten.empty.memory_format, (shape,), options, like.fake_device)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    """The result of the meta kernel, which works out shapes."""
    mode = current_fake_mode()
    if not isinstance(mode, FakeTensorMode):
        return NotImplemented
    with in_kernel_invocation(mode):
        made = func(*args, **kwargs)
    return _wrap(mode, made, device)


def _wrap(mode: FakeTensorMode, made: Tensor, device: torch.device) -> FakeTensor:
    """The same as `FakeTensor(mode, made, device)`, with attributes computed only once."""
    attributes = _attributes.get(device)
    if attributes is None:
        fake = FakeTensor(mode, made, device)
        _attributes[device] = {k: v for k, v in vars(fake).items() if k != "fake_mode"}
        return fake
    fake = make_subclass(
        FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device
    )
    if allows_data_ptr(mode):
        warn_on_mutable_data_ptr(fake)
    else:
        throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes, fake_mode=mode)
    return fake


#: By device: attributes of every fake tensor on it that has no real tensor behind it.
_attributes: dict[torch.device, dict[str, Any]] = {}


def _is_plain(tensor: Any) -> bool:
    """Whether it is a fake tensor without a known constant, which a quick result would lose."""
    return type(tensor) is FakeTensor and tensor.constant is None


def _broadcast(one: Sequence[int], other: Sequence[int]) -> Sequence[int] | None:
    """The shape that these two broadcast to, or None if they do not broadcast."""
    if one == other:
        return one
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    shape = list(longer)
    for at in range(-len(shorter), 0):
        if shape[at] == 1:
            shape[at] = shorter[at]
        elif shorter[at] not in (1, shape[at]):
            return None
    return shape


def _is_packed(tensor: Tensor) -> bool:
    """Whether its elements are contiguous, in row-major order."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


#: Memory formats in which a packed tensor's copy is packed.
_SAME_ORDER = (None, torch.preserve_format, torch.contiguous_format)
_KINDS: dict[_Quick, list[Any]] = {
    _view: [
        aten._unsafe_view.default,
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
    ],
    _new: [aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default],
    _filled: [aten.full.default],
    _like: [
        aten._to_copy.default,
        aten.clone.default,
        aten.empty_like.default,
        aten.zeros_like.default,
    ],
    _write_to_lists: [
        aten._foreach_add_.Scalar,
        aten._fused_adam_.default,
        aten._fused_adamw_.default,
        aten._fused_sgd_.default,
    ],
    _write: [aten.add_.Tensor, aten.copy_.default, aten.mul_.Tensor],
    _pointwise: [
        aten.add.Tensor,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.rsqrt.default,
        aten.silu.default,
    ],
    _product: [aten.mm.default],
}
_QUICK: dict[Any, _Quick] = {func: make for make, funcs in _KINDS.items() for func in funcs}
