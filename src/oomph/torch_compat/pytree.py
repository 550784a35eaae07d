"""Flatten and rebuild nested lists, tuples and dictionaries of tensors.

No version that oomph was tested with has a public module for this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.utils._pytree.GetAttrKey",
        used_for="the place of a tensor in a dataclass",
        without_it="no batch that is a dataclass can be planned for",
    ),
    PrivateName(
        "torch.utils._pytree.keystr",
        used_for="names the place of a tensor in a batch, in errors and reasons",
        without_it="errors about batches name no place",
    ),
    PrivateName(
        "torch.utils._pytree.register_pytree_node",
        used_for="finds the tensors in a batch that is a dataclass",
        without_it="no batch that is a dataclass can be planned for",
    ),
    PrivateName(
        "torch.utils._pytree.tree_flatten",
        used_for="batches and arguments of blocks become lists of tensors",
        without_it="no batch can be rehearsed, split or moved to a device",
    ),
    PrivateName(
        "torch.utils._pytree.tree_flatten_with_path",
        used_for="the same, with the place of each tensor",
        without_it="no batch can be split into micro-batches",
    ),
    PrivateName(
        "torch.utils._pytree.tree_is_leaf",
        used_for="tells a tensor of a batch from a container of tensors",
        without_it="no batch can be read by `Job`",
    ),
    PrivateName(
        "torch.utils._pytree.tree_leaves",
        used_for="the tensors in batches, arguments and results",
        without_it="no batch can be rehearsed, split or moved to a device",
    ),
    PrivateName(
        "torch.utils._pytree.tree_map",
        used_for="a batch with each tensor replaced",
        without_it="no batch can be rehearsed, split or moved to a device",
    ),
    PrivateName(
        "torch.utils._pytree.tree_map_with_path",
        used_for="the same, with the place of each tensor",
        without_it="no batch can be split into micro-batches",
    ),
    PrivateName(
        "torch.utils._pytree.tree_unflatten",
        used_for="puts together what `tree_flatten` took apart",
        without_it="no block can be compiled, captured or recomputed",
    ),
)

keystr = _pytree.keystr
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_is_leaf = _pytree.tree_is_leaf
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_with_path = _pytree.tree_map_with_path
tree_unflatten = _pytree.tree_unflatten


def register_attributes(
    kind: type,
    attributes: Callable[[Any], dict[str, Any]],
    make: Callable[[dict[str, Any]], Any],
) -> None:
    """Have pytrees look into objects of a class, which are made anew of their attributes."""

    def flatten(one: Any) -> tuple[list[Any], tuple[str, ...]]:
        held = attributes(one)
        return list(held.values()), tuple(held)

    def flatten_with_keys(one: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        held = attributes(one)
        return [(_pytree.GetAttrKey(name), value) for name, value in held.items()], tuple(held)

    def unflatten(values: Any, names: tuple[str, ...]) -> Any:
        return make(dict(zip(names, values, strict=True)))

    _pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
