"""Which of its modules' settings a forward reads: blocks that agree in these have one graph.

PyTorch's compiler looks at the same. A window that is shifted in every second block makes another
graph; the number of a block, which is another one in each, makes none where forward does not ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

#: What may be a setting; tensors and modules are known by their shapes and classes.
_PLAIN = (bool, int, float, str, type(None), tuple, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class SettingsRead:
    """What was read, by the module's path and the attribute's name."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)

    def hold_for(self, block: nn.Module) -> bool:
        """Whether a block has the same."""
        modules = dict(block.named_modules())
        return all(
            _is_same(getattr(modules[path], name, None), value)
            for (path, name), value in self.values.items()
        )


@contextlib.contextmanager
def reading_settings(block: nn.Module) -> Iterator[SettingsRead]:
    """Write down what is read of a block, and of the modules inside, while this is active."""
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
