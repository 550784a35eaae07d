"""Where PyTorch writes in place, and makes a new tensor only because a rehearsal is watching.

Under a dispatch mode autograd avoids writing in place. Two places would then count memory that the
real step never takes:

- A tensor that is used twice gets two gradients. Autograd adds the second into the first if nothing
  else holds the first (`input_buffer.cpp`), so a residual connection needs two gradients at once,
  not three.
- Some backward formulas fill a tensor of their own (`FunctionsManual.cpp`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

#: Ops by which a backward formula overwrites what it made itself.
FORMULAS: dict[str, frozenset[Any]] = {
    "BinaryCrossEntropyWithLogitsBackward0": frozenset({aten.sub.Tensor, aten.mul.Tensor}),
    "GatherBackward0": frozenset({aten.scatter_add.default}),
    "IndexBackward0": frozenset({aten.index_put.default}),
    "IndexSelectBackward0": frozenset({aten.index_add.default}),
}
_IN_FORMULAS = frozenset[Any]().union(*FORMULAS.values())

#: Formulas that use a tensor twice but add nothing: an addition seen in them is autograd's.
_ADD_NOTHING = frozenset({"MulBackward0", "MmBackward0", "BmmBackward0"})

Holders = tuple[int, int, int]


def may_be_in_place(func: Any) -> bool:
    """Whether this op, seen during backward, could be one that writes in place for real."""
    return func is aten.add.Tensor or func in _IN_FORMULAS


def is_in_place(
    func: Any, node: str, args: Sequence[Any], made_by_node: bool, held: Holders
) -> bool:
    """Whether the real step writes the result over the first argument.

    `node` is the backward formula that runs or has just run, `made_by_node` whether it made that
    argument, and `held` by whom the argument is held.
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
    """How many hold the first argument: in C++, in Python, and its storage."""
    storage = args[0].untyped_storage()._cdata
    return (
        args[0]._use_count(),
        sys.getrefcount(args[0]),
        torch._C._storage_Use_Count(storage),
    )


@functools.cache
def held_by_autograd_alone() -> Holders:
    """What `holders` says, asked from a mode's dispatch, of a gradient that only autograd holds.

    Measured, because each version of PyTorch holds its arguments differently on the way there.
    """
    seen: list[Holders] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                seen.append(holders(args))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.enable_grad(), FakeTensorMode(), Watch():
        x = torch.ones(2, 2, requires_grad=True) * 1.0
        torch.mul(x.exp(), x.tanh()).sum().backward()
    (alone,) = seen
    return alone


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
