"""Ops whose output's storage is larger than its shape.

Some kernels write a large intermediate result into their output, then shrink the output's shape;
its storage keeps its size. A loss of one number can hold the bytes of a whole image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_NO_REDUCTION = 0


def run_with_kept_storage(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Such an op's outputs, with storages as large as on a real device, or NotImplemented."""
    size_of = _KEPT.get(func)
    if size_of is None:
        return NotImplemented
    out = func(*args, **kwargs)
    grow(out, size_of(*args, **kwargs))
    return out


def grow(tensor: Tensor, nbytes: int) -> None:
    """Make the tensor's storage at least this large."""
    storage = tensor.untyped_storage()
    if nbytes > storage.nbytes():
        storage.resize_(nbytes)


def _loss(at: int) -> Callable[..., int]:
    """A loss whose reduction is argument number `at`."""

    def unreduced(*args: Any, **kwargs: Any) -> int:
        given = args[at] if len(args) > at else kwargs.get("reduction")
        if given == _NO_REDUCTION:
            return 0
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return int(shape.numel()) * torch.result_type(args[0], args[1]).itemsize

    return unreduced


def _columns(columns: Tensor, *_: Any, **__: Any) -> int:
    return columns.numel() * columns.element_size()


_KEPT: dict[Any, Callable[..., int]] = {
    aten.mse_loss.default: _loss(2),
    aten.smooth_l1_loss.default: _loss(2),
    aten.soft_margin_loss.default: _loss(2),
    aten.binary_cross_entropy.default: _loss(3),
    aten.col2im.default: _columns,
}
