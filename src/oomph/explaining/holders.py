"""Finds what keeps tensors alive in Python: the list or variable, and the line that fills it."""

from __future__ import annotations

import gc
import linecache
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

#: Most tensors whose attributes are searched, as each search scans all objects.
MOST_ATTRIBUTES = 3
_CONTAINERS = (list, tuple, dict, set, deque)
_MODES = ("__torch_dispatch__", "__torch_function__")
_TORCH = str(Path(torch.__file__).parent)
_OOMPH = str(Path(__file__).resolve().parents[1])
#: How a container grows: `x.append(`, `x[key] =`, `x +=`, `x = x +`.
_GROWS = (
    r"\b{0}\s*\.\s*(?:append|extend|add|update|insert|appendleft|setdefault)\s*\("
    r"|\b{0}\s*\[[^\]]*\]\s*=(?!=)"
    r"|\b{0}\s*[-+*|]=|\b{0}\s*=\s*{0}\b"
)
#: How a variable is set.
_IS_SET = r"\b{0}\s*(?::[^=]+)?=(?!=)"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A container or variable that keeps tensors."""

    name: str
    """Its name in the program: `outputs`, `self.history`."""
    kind: str
    """Its Python type."""
    place: str
    """`train.py:41`, where it is filled; empty if not found."""
    tensors: tuple[Tensor, ...]


def find_holders(tensors: Sequence[Tensor], frames: Sequence[FrameType]) -> list[Holder]:
    """The holders of these tensors, if their names can be found."""
    containers = _containers_of(tensors)
    names = _Names(frames)
    found = [
        Holder(name=name, kind=type(container).__name__, place=place, tensors=tuple(inside))
        for container, inside in containers
        for name, place in [names.of(container)]
        if name
    ]
    found += names.variables({id(tensor) for tensor in tensors})
    named = {id(tensor) for holder in found for tensor in holder.tensors}
    unnamed = [tensor for tensor in tensors if id(tensor) not in named]
    largest = sorted(unnamed, key=lambda tensor: -tensor.untyped_storage().nbytes())
    return [*found, *names.attributes(largest[:MOST_ATTRIBUTES])]


def own_frames(frames: Sequence[FrameType]) -> Iterator[FrameType]:
    """Frames of the user's program, innermost first, without those of libraries, of oomph, and of
    modes that ops pass through."""
    modes = [at for at, frame in enumerate(frames) if frame.f_code.co_name in _MODES]
    for frame in frames[modes[-1] + 1 if modes else 0 :]:
        file = frame.f_code.co_filename
        library = "site-packages" in file or "dist-packages" in file or file.startswith("<frozen")
        if not library and not file.startswith((_TORCH, _OOMPH)):
            yield frame


def _containers_of(tensors: Sequence[Tensor]) -> list[tuple[Any, list[Tensor]]]:
    """Containers that hold tensors, directly or one level down."""
    wanted = {id(tensor): tensor for tensor in tensors}
    direct = _referring(tensors, ignore=[tensors, wanted])
    inside: dict[int, tuple[Any, list[Tensor]]] = {}
    for container in direct:
        held = [wanted[id(item)] for item in _items(container) if id(item) in wanted]
        if held:
            inside[id(container)] = (container, held)
    # A batch's outputs may be in a tuple or dict inside the list that grows.
    nested = [container for container, _ in inside.values()]
    for outer in _referring(nested, ignore=[nested, inside, direct]):
        parts = [inside[id(item)] for item in _items(outer) if id(item) in inside]
        if len(parts) > 1 and id(outer) not in inside:
            inside[id(outer)] = (outer, [tensor for _, held in parts for tensor in held])
            for container, _ in parts:
                inside[id(container)] = (container, [])
    return [(container, held) for container, held in inside.values() if len(held) > 1]


def _referring(objects: Sequence[Any], ignore: Sequence[Any]) -> list[Any]:
    skip = {id(one) for one in (*ignore, objects)}
    referrers = gc.get_referrers(*objects) if objects else []
    return [one for one in referrers if isinstance(one, _CONTAINERS) and id(one) not in skip]


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


class _Names:
    """Looks up the program's names for objects."""

    def __init__(self, frames: Sequence[FrameType]) -> None:
        self._frames = list(own_frames(frames))
        self._scopes = [(frame, frame.f_locals) for frame in self._frames]

    def of(self, target: Any) -> tuple[str, str]:
        """The name of an object and where it is filled; empty if it has no name."""
        for frame, scope in self._scopes:
            for name, value in scope.items():
                if value is target:
                    return name, _place(name, frame.f_code.co_filename, frame)
        for frame in self._frames:
            for name, value in frame.f_globals.items():
                if value is target:
                    return name, _place(name, frame.f_code.co_filename, None)
        return _attribute(target)

    def variables(self, wanted: set[int]) -> Iterator[Holder]:
        """Variables that are wanted tensors themselves, such as `total += loss`."""
        for frame, scope in self._scopes:
            for name, value in scope.items():
                if id(value) in wanted:
                    place = _place(name, frame.f_code.co_filename, frame)
                    yield Holder(name=name, kind="tensor", place=place, tensors=(value,))

    def attributes(self, tensors: Sequence[Tensor]) -> Iterator[Holder]:
        """Objects that have one of these tensors as an attribute."""
        for tensor in tensors:
            name, place = _attribute(tensor)
            if name:
                yield Holder(name=name, kind="attribute", place=place, tensors=(tensor,))


def _attribute(target: Any) -> tuple[str, str]:
    """`Logger.history` for an object's attribute, or a name in a module."""
    for owner in gc.get_referrers(target):
        attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        name = next((key for key, value in attributes.items() if value is target), None)
        if not isinstance(name, str) or not name.isidentifier():
            continue
        owners = gc.get_referrers(owner) if isinstance(owner, dict) else [owner]
        whose = next((o for o in owners if getattr(o, "__dict__", None) is attributes), None)
        if isinstance(whose, ModuleType):
            return name, _place(name, getattr(whose, "__file__", None) or "", None)
        if whose is not None:
            return f"{type(whose).__name__}.{name}", _place(name, _file_of(whose), None)
    return "", ""


def _file_of(instance: Any) -> str:
    module = sys.modules.get(type(instance).__module__)
    return getattr(module, "__file__", None) or ""


def _place(name: str, file: str, frame: FrameType | None) -> str:
    """The last line that makes a variable grow, or else the last that sets it."""
    lines = linecache.getlines(file)
    first, last = 0, len(lines)
    if frame is not None and frame.f_code.co_name != "<module>":
        numbers = [line for _, _, line in frame.f_code.co_lines() if line]
        first, last = min(numbers, default=1) - 1, max(numbers, default=last)
    for pattern in (_GROWS, _IS_SET):
        matches = re.compile(pattern.format(re.escape(name))).search
        for number in reversed(range(first, min(last, len(lines)))):
            if matches(lines[number]):
                return f"{Path(file).name}:{number + 1}"
    return ""
