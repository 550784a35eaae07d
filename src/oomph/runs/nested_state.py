"""Converts nested state, such as a `state_dict()`, to plain JSON and named tensors (rule 8).

What JSON cannot express is an object with one key that begins with `$`. Numbers are restored
exactly, and so are keys and tuples.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oomph.errors import BadCheckpoint, BadInput

#: Most levels of nested lists and dictionaries; deeper state could be saved but not read.
DEEPEST = 100
#: JSON levels that one of them may take: an object, its list of pairs, a pair.
JSON_LEVELS = 3


def take_apart(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Convert `value` to JSON; its tensors are added to `tensors`, named by their path."""
    if depth > DEEPEST:
        raise BadInput(f"{path[:100]}… cannot be saved: it is nested over {DEEPEST} levels deep")
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return take_apart(value.item(), path, tensors, depth)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case Tensor():
            return {"$tensor": _add(value, path, tensors)}
        case np.ndarray():
            return {"$array": _add(_as_tensor(value, path), path, tensors)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case Mapping():
            return _take_mapping_apart(value, path, tensors, depth + 1)
        case list() | tuple():
            parts = [
                take_apart(one, f"{path}.{at}", tensors, depth + 1) for at, one in enumerate(value)
            ]
            return {"$tuple": parts} if isinstance(value, tuple) else parts
    raise BadInput(
        f"{path} is a {type(value).__name__}, which cannot be saved: a state is made of numbers,"
        " words, lists, dictionaries and tensors"
    )


def put_together(stored: Any, get_tensor: Callable[[str], Tensor]) -> Any:
    """Rebuild the value; `get_tensor` gives the tensors by name."""
    try:
        return _put_together(stored, get_tensor)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"a saved state was changed into something else: {error}") from None


def _put_together(stored: Any, get_tensor: Callable[[str], Tensor]) -> Any:
    match stored:
        case list():
            return [_put_together(one, get_tensor) for one in stored]
        case {"$float": str(word)}:
            return float(word)
        case {"$tensor": name}:
            return get_tensor(name)
        case {"$array": name}:
            return get_tensor(name).numpy()
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tuple": parts}:
            return tuple(_put_together(one, get_tensor) for one in parts)
        case {"$items": pairs}:
            return {key: _put_together(one, get_tensor) for key, one in _keys(pairs, get_tensor)}
        case {"$counter": pairs}:
            return Counter(dict(_keys(pairs, get_tensor)))
        case dict():
            if unknown := [key for key in stored if key.startswith("$")]:
                raise BadCheckpoint(f"{unknown[0]} is nothing this oomph can read: use a newer one")
            return {key: _put_together(one, get_tensor) for key, one in stored.items()}
    return stored


def _take_mapping_apart(
    value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], depth: int
) -> Any:
    parts = [(key, take_apart(one, f"{path}.{key}", tensors, depth)) for key, one in value.items()]
    if isinstance(value, Counter):
        return {"$counter": _pairs(parts, path)}
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in parts):
        return dict(parts)
    return {"$items": _pairs(parts, path)}


def _pairs(parts: list[tuple[Any, Any]], path: str) -> list[list[Any]]:
    """Pairs whose keys may be other than strings, but not tensors."""
    return [[take_apart(key, f"a key of {path}", {}), one] for key, one in parts]


def _keys(pairs: Any, get_tensor: Callable[[str], Tensor]) -> list[tuple[Any, Any]]:
    return [(_put_together(key, get_tensor), one) for key, one in pairs]


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise BadInput(f"{path} cannot be saved: PyTorch knows no {array.dtype} array") from None


def _add(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    name, again = path, 1
    while name in tensors:  # paths are joined with dots, and keys may contain dots
        name, again = f"{path}~{again}", again + 1
    tensors[name] = tensor
    return name
