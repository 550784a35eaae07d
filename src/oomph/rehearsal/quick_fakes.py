"""Fake results of the commonest ops, made without a detour.

PyTorch's fake tensors describe every argument of an op to look its result up in a cache. For views,
copies and empty tensors, most ops of a step that streams its optimizer's state, the kernel that
only works out shapes is several times quicker than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

aten = torch.ops.aten

#: Ops that show their first argument, and no other tensor, in another way.
_VIEWS = {
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
}
#: Ops that make a tensor from sizes alone.
_MAKERS = {aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default}
#: Ops that make one of the size of their argument.
_COPIERS = {aten._to_copy.default, aten.empty_like.default, aten.zeros_like.default}
#: Ops that write to their first argument, tensors in a list, and give nothing back.
_WRITERS = {aten._foreach_add_.Scalar}
_CPU, _META = torch.device("cpu"), torch.device("meta")


def quick_fake(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the active fake mode would return for the op, or NotImplemented for it to do so."""
    if func in _MAKERS:
        device = _CPU
    elif func in _WRITERS:
        return None if all(map(_is_plain, args[0])) else NotImplemented
    elif func in _VIEWS or func in _COPIERS:
        if not _is_plain(args[0]):
            return NotImplemented
        device = kwargs.get("device") or args[0].fake_device
    else:
        return NotImplemented
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if not isinstance(mode, FakeTensorMode) or kwargs.get("pin_memory"):
        return NotImplemented
    if func not in _VIEWS:
        kwargs = {**kwargs, "device": _META}
    with in_kernel_invocation_manager(mode):
        made = func(*args, **kwargs)
    return FakeTensor(mode, made, device)


def _is_plain(tensor: Any) -> bool:
    """Whether it is fake through and through: what is known of a constant is not lost."""
    return type(tensor) is FakeTensor and tensor.constant is None
