"""Records which module settings a forward reads: blocks that agree in these share one graph.

PyTorch's compiler checks the same settings. A window that is shifted in every second block makes
another graph; a block's index, which differs in every block, makes none if forward never reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

#: Types that count as settings; tensors and modules are compared by shapes and classes.
_PLAIN = (bool, int, float, str, type(None), tuple, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class SettingsRead:
    """The settings read, by the module's path and the attribute's name."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)

    def hold_for(self, block: nn.Module) -> bool:
        """Whether a block has the same values."""
        modules = dict(block.named_modules())
        return all(
            _is_same(getattr(modules[path], name, None), value)
            for (path, name), value in self.values.items()
        )


@contextlib.contextmanager
def reading_settings(block: nn.Module) -> Iterator[SettingsRead]:
    """Record the settings read from a block and the modules inside it, while active."""
    paths = {id(module): path for path, module in block.named_modules()}
    found = SettingsRead()

    def read(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if isinstance(value, _PLAIN) and id(module) in paths:
            found.values[paths[id(module)], name] = value
        return value

    own = nn.Module.__getattribute__
    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        nn.Module.__getattribute__ = own  # type: ignore[method-assign]


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other
