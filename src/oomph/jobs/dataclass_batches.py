"""Batches that are dataclasses, which PyTorch's pytrees do not look into.

The user's class is not registered with PyTorch, where that would stay. A batch becomes an object of
a subclass that is, with the same attributes and methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from oomph.torch_compat.pytree import register_attributes, tree_is_leaf, tree_leaves


def is_closed(value: Any) -> bool:
    """Whether it is a dataclass's object that pytrees take for a leaf."""
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor))
    return is_data and tree_is_leaf(value)


def opened(value: Any, inside: Callable[[Any], Any]) -> Any:
    """The same with its tensors in reach of pytrees, and each attribute as `inside` gives it.

    What holds no tensors stays as it is.
    """
    held = {name: inside(one) for name, one in _attributes(value).items()}
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(held)):
        return value
    kind: type = type(value)
    try:
        return _made(_subclass(kind), held)
    except TypeError:
        return value  # a class that its owner lets nobody inherit from


def _attributes(value: Any) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return {**{name: getattr(value, name) for name in fields}, **getattr(value, "__dict__", {})}


@functools.cache
def _subclass(kind: type) -> type:
    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    register_attributes(made, _attributes, functools.partial(_made, made))
    return made


def _made(kind: type, held: dict[str, Any]) -> Any:
    one: Any = object.__new__(kind)
    for name, value in held.items():
        object.__setattr__(one, name, value)  # it may be frozen
    return one
