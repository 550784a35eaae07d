"""Finds in-place writes that PyTorch replaces by new tensors only because a rehearsal is watching.

Under a dispatch mode autograd avoids in-place writes. In two places this would count memory that
the real step never takes:

- A tensor that is used twice gets two gradients. Autograd adds the second into the first if nothing
  else holds the first (`input_buffer.cpp`), so a residual connection needs two gradients at once,
  not three.
- Some backward formulas overwrite a tensor they made themselves (`FunctionsManual.cpp`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.torch_compat.dispatch import TorchDispatchMode, disable_current_modes
from oomph.torch_compat.fake_tensors import FakeTensorMode
from oomph.torch_compat.storages import cdata_of, storage_use_count
from oomph.torch_compat.tensors import use_count

aten = torch.ops.aten

#: Ops with which a backward formula overwrites a tensor it made itself.
FORMULAS: dict[str, frozenset[Any]] = {
    "BinaryCrossEntropyWithLogitsBackward0": frozenset({aten.sub.Tensor, aten.mul.Tensor}),
    "GatherBackward0": frozenset({aten.scatter_add.default}),
    "IndexBackward0": frozenset({aten.index_put.default}),
    "IndexSelectBackward0": frozenset({aten.index_add.default}),
}
_IN_FORMULAS = frozenset[Any]().union(*FORMULAS.values())

#: Formulas that use a tensor twice but never add: an addition seen in them is autograd's.
_ADD_NOTHING = frozenset({"MulBackward0", "MmBackward0", "BmmBackward0"})

Holders = tuple[int, int, int]


def may_be_in_place(func: Any) -> bool:
    """Whether this op, seen during backward, could write in place in the real step."""
    return func is aten.add.Tensor or func in _IN_FORMULAS


def is_in_place(
    func: Any, node: str, args: Sequence[Any], made_by_node: bool, held: Holders
) -> bool:
    """Whether the real step writes the result over the first argument.

    `node` is the backward formula that is running or ran last; `made_by_node` tells whether it made
    the first argument, and `held` by how many references that is held.
    """
    if torch.is_grad_enabled():
        return False
    if func is not aten.add.Tensor:
        return made_by_node and func in FORMULAS.get(node, ())
    if made_by_node and node not in _ADD_NOTHING:
        return False  # an addition that is part of the formula
    first, second = args[:2]
    return (
        isinstance(second, Tensor)
        and all(now <= alone for now, alone in zip(held, held_by_autograd_alone(), strict=True))
        and first.shape == second.shape
        and first.dtype is second.dtype
        and _is_dense(first)
    )


def holders(args: Sequence[Any]) -> Holders:
    """How many references the first argument has: in C++, in Python, and to its storage."""
    storage = cdata_of(args[0].untyped_storage())
    return (
        use_count(args[0]),
        sys.getrefcount(args[0]),
        storage_use_count(storage),
    )


@functools.cache
def held_by_autograd_alone() -> Holders:
    """What `holders` returns, in a mode's dispatch, for a gradient that only autograd holds.

    Measured, because versions of PyTorch hold a different number of references on the way there.
    """
    seen: list[Holders] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                seen.append(holders(args))
            return func(*args, **(kwargs or {}))

    with disable_current_modes(), torch.enable_grad(), FakeTensorMode(), Watch():
        x = torch.ones(2, 2, requires_grad=True, device="cpu") * 1.0
        torch.mul(x.exp(), x.tanh()).sum().backward()
    (alone,) = seen
    return alone


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a contiguous stretch of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
