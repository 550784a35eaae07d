"""Finds the tensors among an op's arguments and results, and identifies their storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.functorch import is_wrapped, unwrapped
from oomph.torch_compat.storages import cdata_of


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results, also those inside lists, tuples and dicts."""
    found: list[Tensor] = []
    _collect((tree,), found)
    return iter(found)


def _collect(items: Iterable[Any], found: list[Tensor]) -> None:
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(item.values(), found)


def storage_key(tensor: Tensor) -> int:
    """A number shared by all views of one storage, valid while the storage lives."""
    with DisableTorchFunction():
        return storage_key_inside(_unwrapped(tensor))


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside `torch.func` wrappers, which have no memory of their own."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


def storage_key_inside(tensor: Tensor) -> int:
    """The same, for use where torch functions are disabled already: inside a dispatch."""
    key: int = cdata_of(tensor.untyped_storage())
    return key
