"""Tensors among an op's arguments and results, and what tells their storages apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results, lists included."""
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
    """The same number for all views of one storage, while it lives."""
    with torch._C.DisableTorchFunction():
        return storage_key_inside(tensor)


def storage_key_inside(tensor: Tensor) -> int:
    """The same, asked where torch functions are disabled already: inside a dispatch."""
    key: int = tensor.untyped_storage()._cdata
    return key


def written_by(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among an op's arguments that it writes to."""
    arguments = func._schema.arguments
    given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
    written = (one for one in arguments if one.alias_info is not None and one.alias_info.is_write)
    return tensors_in([given.get(one.name) for one in written])
