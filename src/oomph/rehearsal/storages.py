"""Tensors among an op's arguments and results, and what tells their storages apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results, lists included."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def storage_key(tensor: Tensor) -> int:
    """The same number for all views of one storage, while it lives."""
    with torch._C.DisableTorchFunction():
        key: int = tensor.untyped_storage()._cdata
        return key
